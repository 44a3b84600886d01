"""Paddle's classes of gradient clipping, for `fleet.distributed_optimizer(grad_clip=...)`."""

from trireme.errors import BadRequest


class ClipGradByGlobalNorm:
    """`clip_norm` of trireme.DistributedOptimizer: of parameters and rows together."""

    def __init__(self, clip_norm: float, group_name: str = "default_group") -> None:
        if group_name != "default_group":
            raise BadRequest(
                f"ClipGradByGlobalNorm: expected one group for all, found {group_name!r}"
            )
        self.clip_norm, self.clip_value = clip_norm, None


class ClipGradByValue:
    """`clip_value` of trireme.DistributedOptimizer. min: -max, its default."""

    def __init__(self, max: float, min: float | None = None) -> None:
        if min is not None and min != -max:
            raise BadRequest(f"ClipGradByValue: expected min {-max}, found {min}")
        self.clip_norm, self.clip_value = None, max


class ClipGradByNorm:
    """Refused: clips each parameter by its own norm."""

    def __init__(self, clip_norm: float) -> None:
        raise BadRequest(
            f"ClipGradByNorm: expected ClipGradByGlobalNorm({clip_norm}) or ClipGradByValue, found"
            " a norm for each parameter, which blocks and rows do not have"
        )
