"""The consistency dial: when a push becomes visible to the other workers."""

from __future__ import annotations

from trireme.errors import BadRequest

MODES = ("sync", "async")
LATER = ("bounded", "geo", "hybrid", "collective")


class Strategy:
    """How workers agree.

    Args:
        mode: "sync": every step equals one process on the union of the workers' batches.
            "async": a push is applied when it arrives; its staleness is measured and reported.
        staleness: of mode "bounded" only.
        k: of mode "geo" only.

    Raises:
        BadRequest: an unknown mode, a mode that this version does not have, or a knob of another
    mode.
    """

    def __init__(
        self, mode: str = "async", *, staleness: int | None = None, k: int | None = None
    ) -> None:
        if mode in LATER:
            raise BadRequest(f"Strategy: expected one of {MODES} in this version, found {mode!r}")
        if mode not in MODES:
            raise BadRequest(f"Strategy: expected one of {MODES + LATER}, found {mode!r}")
        if staleness is not None:
            raise BadRequest(f"Strategy: staleness belongs to mode 'bounded', found mode {mode!r}")
        if k is not None:
            raise BadRequest(f"Strategy: k belongs to mode 'geo', found mode {mode!r}")
        self.mode = mode

    def __repr__(self) -> str:
        return f"Strategy({self.mode!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Strategy) and other.mode == self.mode

    def __hash__(self) -> int:
        return hash(self.mode)
