"""Gradient clipping: what `clip_norm` and `clip_value` mean in each mode, and the worker's part.

In sync the gradient of a step is the sum of all workers', which servers have: they clip it.
Elsewhere a step is one worker's, which clips its own before the push.
"""

from __future__ import annotations

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
from trireme.strategy import Strategy
from trireme.table import RowClassId, Table
from trireme.worker.dense_parameters import DenseParameters


class Clipping:
    """Of an optimizer.

    Attributes:
        of_push: what servers are asked to clip by, or None.
        of_dense: what hybrid clips its dense gradient by after the all-reduce, or None.
        on_servers: whether they clip by the norm, which pulls must bring.

    Raises:
        BadRequest: both, or a limit that is not above 0; the norm in hybrid; tables whose rule
            scales gradients.
    """

    def __init__(
        self,
        norm: float | None,
        value: float | None,
        strategy: Strategy,
        num_workers: int,
        tables: Iterable[Table],
    ) -> None:
        clip = _clip(norm, value)
        if clip is not None:
            _check(clip, strategy, tables)
        is_summed = strategy.mode == "sync" and num_workers > 1
        self._own = None if is_summed else clip
        self.of_push = clip if is_summed else None
        self.of_dense = clip if strategy.mode == "hybrid" else None
        self.on_servers = self.of_push is not None and self.of_push.kind == "norm"

    def apply(
        self, tables: dict[RowClassId, TableGradient], dense: DenseParameters
    ) -> dict[RowClassId, TableGradient]:
        """Clip the gradients of a step of this worker alone: those of parameters in place.

        Raises:
            NotFinite: the norm is not finite; no gradient has changed.
        """
        clip = self._own
        if clip is None:
            return tables
        gradients = [p.grad for p in dense.parameters.values() if p.grad is not None]
        norm = _norm(tables, gradients) if clip.kind == "norm" else None
        with torch.no_grad():
            for gradient in [] if self.of_dense is not None else gradients:
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


def _check(clip: Clip, strategy: Strategy, tables: Iterable[Table]) -> None:
    if clip.kind == "norm" and strategy.mode == "hybrid":
        raise BadRequest(
            "DistributedOptimizer: expected clip_value or none in mode 'hybrid', found clip_norm:"
            " its dense gradient is of all workers and that of rows of one, so they have no norm in"
            " common"
        )
    for table in tables:
        if table.optimizer.scale == "fleet":
            raise BadRequest(
                f"DistributedOptimizer: expected scale='loss' for table {table.name!r}, whose"
                " gradients are to be clipped, found 'fleet', which scales them afterwards"
            )
