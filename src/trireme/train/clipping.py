"""Gradient clipping in a worker. A mode says whether the worker or the servers clip a step."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from trireme.errors import BadRequest, NotFinite
from trireme.protocol.clipping import Clip
from trireme.protocol.routing import Floats
from trireme.table import RowClassId, Table
from trireme.worker.gradients import TableGradient


def make_clip(norm: float | None, value: float | None, tables: Iterable[Table]) -> Clip | None:
    """What gradients are clipped by; None: by nothing. Raises BadRequest."""
    if norm is None and value is None:
        return None
    if norm is not None and value is not None:
        raise BadRequest(
            f"DistributedOptimizer: expected clip_norm or clip_value, found both: {norm}, {value}"
        )
    kind, limit = ("value", value) if norm is None else ("norm", norm)
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not 0 < limit < math.inf:
        raise BadRequest(
            f"DistributedOptimizer: expected clip_{kind} > 0 and finite, found {limit!r}"
        )
    for table in tables:
        if table.optimizer.scale == "fleet":
            raise BadRequest(
                f"DistributedOptimizer: expected scale='loss' for table {table.name!r}, whose"
                " gradients are to be clipped, found 'fleet', which scales them afterwards"
            )
    return Clip(kind, float(limit))


def clip_gradients(
    clip: Clip | None, tables: dict[RowClassId, TableGradient], parameters: Iterable[Tensor]
) -> dict[RowClassId, TableGradient]:
    """Clip the gradients of a step, those of the parameters in place; returns those of the rows.
    Raises NotFinite: the norm is not finite; no gradient has changed.
    """
    if clip is None:
        return tables
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = _norm(tables, gradients) if clip.kind == "norm" else None
    factor = 1.0 if norm is None else float(clip.factor(norm))
    with torch.no_grad():
        for gradient in gradients:  # as `Clip.clipped`, in place
            if clip.kind == "value":
                gradient.clamp_(-clip.limit, clip.limit)
            elif factor != 1:
                gradient.mul_(factor)
    return {
        name: replace(part, gradients=clip.clipped(part.gradients, norm))
        for name, part in tables.items()
    }


def _norm(tables: Mapping[RowClassId, TableGradient], dense: Iterable[Tensor]) -> float:
    sums = [_squares(part.gradients) for part in tables.values()]
    sums += [_squares(gradient.detach().float().cpu().numpy()) for gradient in dense]
    total = math.fsum(sums)
    if not math.isfinite(total):
        raise NotFinite(
            "DistributedOptimizer.step: expected finite gradients to clip by their norm, found"
            f" others: its square is {total}; nothing was pushed"
        )
    return math.sqrt(total)


def _squares(values: Floats) -> float:
    return float(np.square(values.reshape(-1), dtype=np.float64).sum())
