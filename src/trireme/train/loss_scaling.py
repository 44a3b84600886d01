"""Loss scaling by torch.amp.GradScaler, for gradients of rows as well.

A scaler reads the gradients in the param groups, checks them, and then calls `step` with two
attributes set, `grad_scale` and `found_inf` (torch's contract with optimizers that have
`_step_supports_amp_scaling`). So a table's group shows the rows that wait for the next push.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from trireme.table import Table
from trireme.worker.lookups import PendingLookups


class PendingRows(Sequence[Tensor]):
    """The rows of a table that forward passes have looked up since the last step: (K, W) leaves."""

    def __init__(self, table: Table, pending: Callable[[], PendingLookups]) -> None:
        self._parts = {part.class_id for part in table.parts}
        self._pending = pending

    def _rows(self) -> list[Tensor]:
        entries = self._pending().entries
        return [entry.rows for entry in entries if entry.table.class_id in self._parts]

    def __len__(self) -> int:
        return len(self._rows())

    def __getitem__(self, index: Any) -> Any:
        return self._rows()[index]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._rows())


def unscale(optimizer: torch.optim.Optimizer) -> bool:
    """Divide the gradients by the scale of a GradScaler, if one calls the step. Returns False: the
    scaler found a gradient that is not finite; all gradients are dropped.
    """
    found_inf = getattr(optimizer, "found_inf", None)
    if found_inf is not None and bool(found_inf):
        optimizer.zero_grad()
        return False
    scale: Tensor | None = getattr(optimizer, "grad_scale", None)
    if scale is not None:
        inverse = scale.double().reciprocal().float()  # as in the scaler's own unscale_
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                if tensor.grad is not None:
                    tensor.grad.mul_(inverse.to(tensor.grad.device))
    return True
