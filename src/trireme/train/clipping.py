"""Gradient clipping in a worker. A mode says whether the worker or the servers clip a step."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from trireme.errors import BadRequest, check_numbers
from trireme.protocol.clipping import Clip
from trireme.table import RowClassId, Table
from trireme.worker.gradients import TableGradient


def make_clip(norm: float | None, value: float | None, tables: Iterable[Table]) -> Clip | None:
    """What gradients are clipped by; None: by nothing. Raises BadRequest."""
    if norm is not None and value is not None:
        raise BadRequest(
            f"DistributedOptimizer: expected clip_norm or clip_value, found both: {norm}, {value}"
        )
    kind, limit = ("value", value) if norm is None else ("norm", norm)
    if limit is None:
        return None
    check_numbers("DistributedOptimizer", "> 0", **{f"clip_{kind}": limit})
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
    Requires: they are finite.
    """
    if clip is None:
        return tables
    gradients = [p.grad for p in parameters if p.grad is not None]
    factor = float(clip.factor(_norm(tables, gradients))) if clip.kind == "norm" else 1.0
    with torch.no_grad():
        for gradient in gradients:
            gradient.copy_(_clipped(gradient, clip, factor))
    return {
        name: replace(part, gradients=_clipped(part.gradients, clip, factor))
        for name, part in tables.items()
    }


def _clipped(gradient: Tensor, clip: Clip, factor: float) -> Tensor:
    """As `Clip.clipped`."""
    if clip.kind == "value":
        return gradient.clamp(-clip.limit, clip.limit)
    return gradient if factor == 1 else gradient * factor


def _norm(tables: Mapping[RowClassId, TableGradient], dense: Iterable[Tensor]) -> float:
    squares = map(_squares, [*(part.gradients for part in tables.values()), *dense])
    return math.sqrt(math.fsum(squares))


def _squares(gradient: Tensor) -> float:
    values = gradient.detach().float().cpu().numpy()
    return float(np.square(values.reshape(-1), dtype=np.float64).sum())
