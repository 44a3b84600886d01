"""The outputs of a pass over data, kept for the caller."""

import torch
from torch import Tensor, nn

from trireme.errors import Unavailable
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
        """(N, ...) of all batches. Raises Unavailable: they are lost."""
        if self.are_lost:
            raise Unavailable(
                "Trainer.predict: expected a worker that was here when the others predicted, found"
                " one that was restarted after it: the rows have changed since; predict again"
            )
        return {name: torch.cat(parts) for name, parts in self._parts.items()}
