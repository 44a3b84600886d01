"""Gradient clipping in a worker. A mode says whether the worker or the servers clip a step."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trireme.errors import BadRequest, NotFinite
from trireme.protocol.clipping import Clip
from trireme.protocol.gradients import TableGradient
from trireme.protocol.routing import Floats
from trireme.table import RowClassId, Table


def make_clip(norm: float | None, value: float | None, tables: Iterable[Table]) -> Clip | None:
    """What gradients are clipped by; None: by nothing.

    Raises:
        BadRequest: both a norm and a value, a limit that is not above 0, or tables whose rule
            scales gradients afterwards.
    """
    clip = _clip(norm, value)
    for table in tables if clip is not None else ():
        if table.optimizer.scale == "fleet":
            raise BadRequest(
                f"DistributedOptimizer: expected scale='loss' for table {table.name!r}, whose"
                " gradients are to be clipped, found 'fleet', which scales them afterwards"
            )
    return clip


def clip_gradients(
    clip: Clip | None, tables: dict[RowClassId, TableGradient], parameters: Iterable[Tensor]
) -> dict[RowClassId, TableGradient]:
    """Clip the gradients of a step, those of the parameters in place; returns those of the rows.

    Raises:
        NotFinite: the norm is not finite; no gradient has changed.
    """
    if clip is None:
        return tables
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = _norm(tables, gradients) if clip.kind == "norm" else None
    with torch.no_grad():
        for gradient in gradients:
            clip_tensor(clip, gradient, norm)
    return {
        name: replace(part, gradients=clip.clipped(part.gradients, norm))
        for name, part in tables.items()
    }


def clip_tensor(clip: Clip, gradient: Tensor, norm: float | None) -> None:
    """As `Clip.clipped`, in place."""
    if clip.kind == "value":
        gradient.clamp_(-clip.limit, clip.limit)
    elif norm is not None and (factor := float(clip.factor(norm))) != 1:
        gradient.mul_(factor)


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


def _clip(norm: float | None, value: float | None) -> Clip | None:
    if norm is not None and value is not None:
        raise BadRequest(
            f"DistributedOptimizer: expected clip_norm or clip_value, found both: {norm}, {value}"
        )
    for kind, limit in (("norm", norm), ("value", value)):
        if limit is not None:
            if not _is_limit(limit):
                raise BadRequest(
                    f"DistributedOptimizer: expected clip_{kind} > 0 and finite, found {limit!r}"
                )
            return Clip(kind, float(limit))
    return None


def _is_limit(limit: Any) -> bool:
    is_number = isinstance(limit, int | float) and not isinstance(limit, bool)
    return is_number and 0 < limit < math.inf
