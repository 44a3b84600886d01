"""The outputs of a pass over data, kept for the caller."""

import torch
from torch import Tensor, nn

from trireme.errors import BadRequest, Unavailable
from trireme.train.loop.scoring import Scored


class CollectedOutputs:
    """are_lost: the process was restarted and is past the pass."""

    def __init__(self) -> None:
        self.are_lost = False
        self._parts: dict[str, list[Tensor]] = {}

    def observe(self, _: nn.Module, scored: Scored) -> None:
        """Keep the outputs of a batch."""
        for name, output in scored.outputs.items():
            self._parts.setdefault(name, []).append(output.cpu())

    def by_name(self) -> dict[str, Tensor]:
        """(N, ...) of all batches. Raises Unavailable: they are lost. BadRequest: an output has no
        axis of examples, or rows of other shapes from batch to batch.
        """
        if self.are_lost:
            raise Unavailable(
                "Trainer.predict: expected a worker that was here when the others predicted, found"
                " one that was restarted after it: the rows have changed since; predict again"
            )
        return {name: _joined(name, parts) for name, parts in self._parts.items()}


def _joined(name: str, parts: list[Tensor]) -> Tensor:
    try:
        return torch.cat(parts)
    except RuntimeError as error:
        shapes = ", ".join(str(shape) for shape in dict.fromkeys(tuple(p.shape) for p in parts))
        raise BadRequest(
            f"Trainer.predict: expected output {name!r} with a row of one shape per example, found"
            f" batches of {shapes}: {error}"
        ) from error
