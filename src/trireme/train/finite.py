"""The check that what a step changes is finite: gradients before a push, differences in geo, sums
in hybrid. A step that is not finite is not made.
"""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from trireme import _core, accelerator
from trireme.errors import BadRequest, NotFinite
from trireme.table import RowClassId
from trireme.worker.gradients import TableGradient
from trireme.worker.monitoring import WorkerMetrics

log = logging.getLogger("trireme.train")

# The core checks up to this many numbers while torch would wake its threads.
_ON_ONE_THREAD_MAX = 1 << 20


def check_finite_step(
    what: str, tables: Mapping[RowClassId, TableGradient], dense: Mapping[str, Tensor | None]
) -> None:
    """Raises NotFinite: NaN or infinity; names the table and the key, or the parameter. BadRequest:
    a sparse gradient. what: is checked, for the error. dense: by parameter.
    """
    for name, values in dense.items():
        if values is not None and values.is_sparse:
            raise BadRequest(
                f"{what}: expected a dense one for parameter {name}, found a sparse one: make its"
                " module with sparse=False, or keep its rows in a tr.Table"
            )
    present = {name: values for name, values in dense.items() if values is not None}
    if _are_finite([*(part.gradients for part in tables.values()), *present.values()]):
        return
    for class_id, part in tables.items():
        if not _are_finite([part.gradients]):
            row = _position(part.gradients)[0]
            where = f"key {part.keys[row]} of table {class_id.table!r}"
            raise _not_finite(what, part.gradients[row], where)
    for name, values in present.items():
        if not _are_finite([values]):
            where = f"parameter {name} at {list(_position(values))}"
            raise _not_finite(what, values, where)


def drop_step(error: NotFinite, *, skips: bool, metrics: WorkerMetrics) -> None:
    """What becomes of a step that is not finite: it is counted and logged, or the error raised."""
    if not skips:
        raise error
    metrics.num_skipped += 1
    log.warning("%s; skipped", error)


def _are_finite(tensors: Iterable[Tensor]) -> bool:
    others: dict[torch.device, list[Tensor]] = {}
    for values in tensors:
        is_small = values.numel() <= _ON_ONE_THREAD_MAX and values.dtype == torch.float32
        if not (is_small and values.device == accelerator.HOST and values.is_contiguous()):
            others.setdefault(values.device, []).append(values)
        elif _core.first_not_finite(values.detach().numpy().reshape(-1)) is not None:
            return False
    return all(map(_are_finite_there, others.values()))


def _are_finite_there(tensors: Sequence[Tensor]) -> bool:
    """Of one device, which is asked once: it answers when it has computed them."""
    # A finite sum has finite terms, and takes half the time of the exact test.
    sums = [values.sum().double() for values in tensors]
    if math.isfinite(torch.stack(sums).sum().item()):
        return True
    return all(bool(torch.isfinite(values).all()) for values in tensors)


def _position(values: Tensor) -> tuple[int, ...]:
    """Of the first value that is not finite."""
    return tuple(torch.nonzero(~torch.isfinite(values))[0].tolist())


def _not_finite(what: str, values: Tensor, where: str) -> NotFinite:
    value = values[~torch.isfinite(values)][0].item()
    return NotFinite(f"expected finite {what}, found {value} for {where}; the step is not made")
