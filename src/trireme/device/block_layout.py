"""From wide rows (trireme.rows.wide_rows) to the tensors of a block, and back, bit for bit.

Shapes: U rows, D weights, S floats of state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trireme.errors import BadRequest
from trireme.rows.core_table import make_core_table
from trireme.rows.wide_rows import RowLayout, WideRows
from trireme.table import TableSchema


class BlockTensors(NamedTuple):
    """The parts of U rows, one tensor each.

    weights: (U, D) float32.
    state: (U, S) float32: planes of D floats, then floats of the row, of which the last ones may be
        32-bit counts.
    stamps: (U, 2) int32: the bits of version and time, which are uint32.
    shows: (U, 2) float64: show and click; with 0 rows where the table is not scored, as the next.
    delta_scores: (U,) float32.
    features: (U,) int32: the bits of a uint32.
    """

    weights: Tensor
    state: Tensor
    stamps: Tensor
    shows: Tensor
    delta_scores: Tensor
    features: Tensor


@dataclass(frozen=True)
class BlockLayout:
    """What a table's schema says of the rows of one of its classes.

    dim: D of the class. planes, row_floats, counts: of its state, S = planes * D + row_floats, of
        which the last `counts` are counts of updates. wide: of the table's wide rows.
    """

    rule: Mapping[str, Any]
    dim: int
    planes: int
    row_floats: int
    counts: int
    is_scored: bool
    policy: Mapping[str, Any]
    wide: RowLayout

    @classmethod
    def of(cls, schema: TableSchema, row_class: int = 0) -> BlockLayout:
        """Raises BadRequest: weights of 16 bits, heads, lookups with statistics, or no such
        class.
        """
        for is_found, expected in (
            (schema.dtype != "float32", f"dtype float32, found {schema.dtype}"),
            (schema.head_class is not None, "whole rows, found a policy with embedx_threshold"),
            (schema.pulls_statistics, "lookups of weights alone, found pulls_statistics"),
        ):
            if is_found:
                raise BadRequest(f"device block of table {schema.name!r}: expected {expected}")
        table = make_core_table(schema)
        return cls(
            rule=schema.rule,
            dim=schema.dim_of(row_class),
            planes=table.state_planes,
            row_floats=table.state_floats - table.state_planes * schema.wide_dim,
            counts=table.state_counts,
            is_scored=schema.is_scored,
            policy=schema.policy,
            wide=RowLayout.of(schema, table),
        )

    @property
    def state_floats(self) -> int:
        """S."""
        return self.planes * self.dim + self.row_floats

    @property
    def device_bytes(self) -> int:
        """Of a row in a block, with the mark that it has changed."""
        statistics = 24 if self.is_scored else 0
        return 4 * (self.dim + self.state_floats) + 8 + statistics + 1

    def zeros(self, num_rows: int, device: torch.device) -> BlockTensors:
        """Rows of zeros, for a block whose slots are filled later."""
        empty = np.zeros((0, self.wide.row_bytes), np.uint8)
        num_scored = num_rows if self.is_scored else 0
        sizes = (num_rows, num_rows, num_rows, num_scored, num_scored, num_scored)
        parts = zip(sizes, self.split(empty), strict=True)
        return BlockTensors(
            *(torch.zeros(n, *p.shape[1:], dtype=p.dtype, device=device) for n, p in parts)
        )

    def new_rows(self, weights: np.ndarray[Any, np.dtype[np.float32]]) -> WideRows:
        """Wide rows of keys that have none yet, from their initial weights, (n, D) float32."""
        rows = np.zeros((len(weights), self.wide.row_bytes), np.uint8)
        self.wide.weights(rows)[:, : self.dim] = weights
        state = self.wide.state(rows)
        for begin in (plane * self.wide.dim for plane in range(self.planes)):
            state[:, begin : begin + self.dim] = self.initial_state
        state[:, self.planes * self.wide.dim :] = self.initial_state
        return rows

    @property
    def initial_state(self) -> float:
        """Of every float of state."""
        return float(self.rule.get("initial_accumulator", 0.0))

    def split(self, rows: WideRows) -> BlockTensors:
        """The parts of wide rows, (U, row_bytes) uint8, as tensors of the CPU. Raises BadRequest:
        another shape, or rows of a wider class.
        """
        if rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] != self.wide.row_bytes:
            raise BadRequest(
                f"RowBlock: expected wide rows as uint8 of shape (U, {self.wide.row_bytes}), found"
                f" {rows.dtype} of shape {rows.shape}"
            )
        rows = np.ascontiguousarray(rows)
        weights, state = self.wide.weights(rows), self.wide.state(rows)
        wide_planes = state[:, : self.planes * self.wide.dim]
        planes = wide_planes.reshape(len(rows), self.planes, self.wide.dim)
        if weights[:, self.dim :].view(np.uint32).any() or planes[..., self.dim :].any():
            raise BadRequest(f"RowBlock: expected rows of dim {self.dim}, found wider ones")
        own_state = np.empty((len(rows), self.state_floats), np.float32)
        own_planes = own_state[:, : self.planes * self.dim]
        own_planes.reshape(len(rows), self.planes, self.dim)[:] = planes[..., : self.dim]
        own_state[:, self.planes * self.dim :] = state[:, self.planes * self.wide.dim :]
        return BlockTensors(
            torch.from_numpy(np.array(weights[:, : self.dim])),
            torch.from_numpy(own_state),
            *self._statistics(self.wide.statistics(rows)),
        )

    def _statistics(self, records: np.ndarray[Any, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        stamps = np.stack([records["version"], records["time"]], 1).view(np.int32)
        num_scored = len(records) if self.is_scored else 0
        shows, deltas = np.zeros((num_scored, 2)), np.zeros(num_scored, np.float32)
        features = np.zeros(num_scored, np.int32)
        if self.is_scored:
            shows[:, 0], shows[:, 1] = records["show"], records["click"]
            deltas[:], features[:] = records["delta_score"], records["feature"].view(np.int32)
        parts = stamps, shows, deltas, features
        return tuple(map(torch.from_numpy, parts))  # type: ignore[return-value]

    def join(self, tensors: BlockTensors) -> WideRows:
        """The inverse of `split`: (U, row_bytes) uint8, from tensors of the CPU."""
        weights, state, stamps, shows, deltas, features = (t.numpy() for t in tensors)
        num_rows = len(weights)
        rows = np.zeros((num_rows, self.wide.row_bytes), np.uint8)
        self.wide.weights(rows)[:, : self.dim] = weights
        wide_state, end = self.wide.state(rows), self.planes * self.dim
        for plane in range(self.planes):
            begin = plane * self.wide.dim
            wide_state[:, begin : begin + self.dim] = state[:, plane * self.dim :][:, : self.dim]
        wide_state[:, self.planes * self.wide.dim :] = state[:, end:]
        records = self.wide.statistics(rows)
        records["version"], records["time"] = stamps.view(np.uint32).T
        if self.is_scored:
            records["show"], records["click"] = shows.T
            records["delta_score"], records["feature"] = deltas, features.view(np.uint32)
        return rows
