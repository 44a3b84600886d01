"""From wide rows (trireme.rows.wide_rows) to the tensors of a block, and back, bit for bit.

Shapes: U rows, D weights, S floats of state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from trireme import _core, accelerator
from trireme.accelerator import HOST
from trireme.errors import BadRequest, ResourceExhausted
from trireme.rows.core_table import make_core_table
from trireme.rows.wide_rows import RowLayout, WideRows
from trireme.table import TableSchema

NEVER = 2**32 - 1
"""The version of a row that has not been updated yet, and that servers lack."""
SLOTS_MAX = (1 << 31) - 1
"""A slot is an int32."""

_Array: TypeAlias = np.ndarray[Any, Any]
Arrays: TypeAlias = tuple[_Array, _Array, _Array, _Array, _Array, _Array]


class RowTensors(NamedTuple):
    """The parts of U rows, one tensor each; on the CPU views of wide rows where these can be viewed
    so, see `BlockLayout.wide_rows`.

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

    def arrays(self) -> Arrays:
        """Those of the core, in the same memory; of tensors of the CPU."""
        weights, *others = self
        return (weights.detach().numpy(), *(part.numpy() for part in others))  # type: ignore[return-value]


@dataclass(frozen=True)
class BlockLayout:
    """What a table's schema says of the rows of one of its classes.

    dim: D of the class. planes, row_floats: of its state, S = planes * D + row_floats. hides_new:
        lookups of new rows give zeros. wide: of the table's wide rows. core: a table without rows,
        which computes.
    """

    rule: Mapping[str, Any]
    dim: int
    planes: int
    row_floats: int
    is_scored: bool
    hides_new: bool
    policy: Mapping[str, Any]
    wide: RowLayout
    core: _core.Table
    row_class: int

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
        table = make_core_table(replace(schema, absent="initial"))  # it makes new rows
        return cls(
            rule=schema.rule,
            dim=schema.dim_of(row_class),
            planes=table.state_planes,
            row_floats=table.state_floats - table.state_planes * schema.wide_dim,
            is_scored=schema.is_scored,
            hides_new=schema.absent == "zeros",
            policy=schema.policy,
            wide=RowLayout.of(schema, table),
            core=table,
            row_class=row_class,
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

    def new_rows(self, weights: np.ndarray[Any, np.dtype[np.float32]]) -> WideRows:
        """Wide rows of keys that have none yet, from their initial weights, (n, D) float32."""
        rows = np.zeros((len(weights), self.wide.row_bytes), np.uint8)
        self.wide.weights(rows)[:, : self.dim] = weights
        state = self.wide.state(rows)
        for begin in (plane * self.wide.dim for plane in range(self.planes)):
            state[:, begin : begin + self.dim] = self.initial_state
        state[:, self.planes * self.wide.dim :] = self.initial_state
        self.wide.statistics(rows)["version"] = NEVER
        return rows

    @property
    def initial_state(self) -> float:
        """Of every float of state."""
        return float(self.rule.get("initial_accumulator", 0.0))

    def room(
        self, num_rows: int, device: torch.device, memory: WideRows | None = None
    ) -> RowTensors:
        """Rows of any content, for a block whose slots are all filled later. memory: `wide_rows` of
        a block that is gone, which are used if they are as many, or few more. Raises
        ResourceExhausted: the device has no memory for them, or they are more than slots can name.
        """
        if memory is not None and num_rows <= len(memory) <= 2 * num_rows:
            return self.views(memory[:num_rows])
        try:
            if num_rows <= SLOTS_MAX:
                return self._room(num_rows, device)
            reason = f"a block has at most {SLOTS_MAX}"
        except accelerator.OUT_OF_MEMORY as error:
            reason = str(error).partition("\n")[0]
        raise ResourceExhausted(
            f"rows on a device: expected memory of {device} for {num_rows} rows of"
            f" {self.device_bytes} bytes, {num_rows * self.device_bytes} in all, found too little:"
            f" {reason}. Train on less data at once, or give a window less memory"
        )

    def _room(self, num_rows: int, device: torch.device) -> RowTensors:
        if device.type == HOST.type and self._can_view_wide:
            return self.views(np.empty((num_rows, self.wide.row_bytes), np.uint8))
        return self._parts(num_rows, device)

    @property
    def _can_view_wide(self) -> bool:
        """Whether each part of a row lies in a wide row as it does in a tensor."""
        is_aligned = not self.is_scored or (self.dim + self.state_floats) % 2 == 0  # float64
        return self.dim == self.wide.dim and is_aligned

    def views(self, rows: WideRows) -> RowTensors:
        """The parts of wide rows, in their memory, where these can be viewed so."""
        floats = torch.from_numpy(rows.view(np.float32))
        numbers, end = floats.view(torch.int32), self.dim + self.state_floats
        parts = (floats[:, : self.dim], floats[:, self.dim : end], numbers[:, end : end + 2])
        if not self.is_scored:
            return RowTensors(*parts, *self._parts(0, HOST)[3:])
        shows = floats.view(torch.float64)[:, end // 2 + 1 : end // 2 + 3]
        return RowTensors(*parts, shows, floats[:, end + 6], numbers[:, end + 7])

    def wide_rows(self, tensors: RowTensors) -> WideRows | None:
        """(U, row_bytes) uint8: the wide rows whose parts these tensors are, in their memory; None:
        the parts lie apart.
        """
        weights, floats = tensors.weights.detach(), self.wide.row_bytes // 4
        if weights.stride(0) != floats:
            return None
        return weights.as_strided((len(weights), floats), (floats, 1)).numpy().view(np.uint8)

    def _parts(self, num_rows: int, device: torch.device) -> RowTensors:
        num_scored = num_rows if self.is_scored else 0
        shapes: tuple[tuple[tuple[int, ...], np.dtype[Any]], ...] = (
            ((num_rows, self.dim), np.dtype(np.float32)),
            ((num_rows, self.state_floats), np.dtype(np.float32)),
            ((num_rows, 2), np.dtype(np.int32)),
            ((num_scored, 2), np.dtype(np.float64)),
            ((num_scored,), np.dtype(np.float32)),
            ((num_scored,), np.dtype(np.int32)),
        )
        if device.type == HOST.type:  # NumPy asks for huge pages
            return RowTensors(*(torch.from_numpy(np.empty(*one)) for one in shapes))
        dtypes = (torch.from_numpy(np.empty(0, dtype)).dtype for _, dtype in shapes)
        return RowTensors(
            *(
                torch.empty(shape, dtype=dtype, device=device)
                for (shape, _), dtype in zip(shapes, dtypes, strict=True)
            )
        )

    def zeros(self, num_rows: int, device: torch.device) -> RowTensors:
        """Rows of zeros, for a block whose slots are filled later."""
        return RowTensors(*(part.zero_() for part in self.room(num_rows, device)))

    def split(self, rows: WideRows, threads: _core.Pool) -> RowTensors:
        """The parts of wide rows, (U, row_bytes) uint8, as tensors of the CPU, each by itself.
        Raises BadRequest: another shape, or rows of a wider class.
        """
        tensors = self._parts(len(rows), HOST)
        self.fill(tensors, _numbers(len(rows)), rows, threads)
        return tensors

    def fill(self, tensors: RowTensors, slots: Tensor, rows: WideRows, threads: _core.Pool) -> None:
        """Write wide rows to (n,) int32 distinct slots of tensors of the CPU. Raises as `split`."""
        if rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] != self.wide.row_bytes:
            raise BadRequest(
                f"RowBlock: expected wide rows as uint8 of shape (U, {self.wide.row_bytes}), found"
                f" {rows.dtype} of shape {rows.shape}"
            )
        rows = np.ascontiguousarray(rows)
        self.core.split_wide(rows, tensors.arrays(), slots.numpy(), threads, self.row_class)

    def join(
        self, tensors: RowTensors, threads: _core.Pool, slots: Tensor | None = None
    ) -> WideRows:
        """The inverse of `split`: (n, row_bytes) uint8, from tensors of the CPU. slots: (n,) int32,
        of some of them.
        """
        if slots is None:
            slots = _numbers(len(tensors.weights))
        rows = np.empty((len(slots), self.wide.row_bytes), np.uint8)
        self.core.join_wide(tensors.arrays(), slots.numpy(), rows, threads, self.row_class)
        return rows


def _numbers(num: int) -> Tensor:
    return torch.arange(num, dtype=torch.int32)
