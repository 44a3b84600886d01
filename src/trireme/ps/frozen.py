"""Exports for inference on the servers' side: each server writes the rows it owns as frozen rows
(docs/format/export.md), which are searched as they lie in the file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trireme import _core
from trireme.errors import BadRequest, UnknownTable, writing
from trireme.ps.manifest import inside, written
from trireme.ps.routing import Keys
from trireme.ps.rows import RowLayout
from trireme.ps.shard import Handler, ServedTable, Shard
from trireme.ps.wire import Array, need, need_list
from trireme.rpc import Reply, Request

DTYPES = ("float32", "float16", "int8")
FLOAT16_MAX = 65504.0
INT8_MAX = 127.0


class ExportHandlers:
    """The method `export.save`; paths stay under `root`."""

    def __init__(self, shard: Shard, root: Path) -> None:
        self._shard, self._root = shard, root

    def handlers(self) -> dict[str, Handler]:
        return {"export.save": self._on_save}

    def _on_save(self, request: Request) -> Reply:
        hint = "--root or TRIREME_ROOT of the servers says where exports may be"
        folder = inside(self._root, need(request.body, "path", str), hint)
        names = need_list(request.body, "tables", str)
        dtype = need(request.body, "dtype", str)
        if dtype not in DTYPES:
            raise BadRequest(f"export.save: expected dtype one of {DTYPES}, found {dtype!r}")
        with writing(f"export: cannot write {folder}"):
            tables = [
                self._save_table(name, folder, Path("tables") / str(number), dtype)
                for number, name in enumerate(names)
            ]
        return Reply({"tables": tables})

    def _save_table(self, name: str, folder: Path, under: Path, dtype: str) -> dict[str, Any]:
        if name not in self._shard.tables:
            raise UnknownTable(f"export.save: expected table {name!r}, found none of that name")
        table = self._shard.tables[name]
        error = RowError()
        owned = self._shard.map().owned_by(self._shard.index)
        files = [
            _save_buckets(table, folder, under, buckets, dtype, error) for buckets in _runs(owned)
        ]
        return {
            "files": files,
            "rows": error.rows,
            "removed": 0,
            "max_error": error.largest,
            "sum_of_squares": error.sum_of_squares,
        }


@dataclass
class RowError:
    """How far stored weights are from trained ones, and over how many rows."""

    rows: int = 0
    largest: float = 0.0
    sum_of_squares: float = 0.0

    def add(self, weights: Array, stored: Array) -> None:
        if len(weights) == 0:
            return
        difference = np.abs(stored - weights)
        self.rows += len(weights)
        self.largest = max(self.largest, float(difference.max()))
        self.sum_of_squares += float(np.square(difference, dtype=np.float64).sum())


def _runs(buckets: Array) -> Iterator[Array]:
    """Owned buckets in files' worth: consecutive numbers."""
    if len(buckets):
        yield from np.split(buckets, np.flatnonzero(np.diff(buckets) != 1) + 1)


def _save_buckets(
    table: ServedTable, folder: Path, under: Path, buckets: Array, dtype: str, error: RowError
) -> dict[str, Any]:
    low, high = int(buckets[0]), int(buckets[-1])
    path = under / f"{low:04d}-{high:04d}.rows"
    dim = table.schema.dim
    writer = _core.FrozenWriter(encoding=dtype, dim=dim, first_bucket=low)
    with written(folder / path) as (file, entry):
        for bucket in range(low, high + 1):
            keys, weights = _rows_of(table, bucket)
            values, stored = encode(weights, dtype, table.schema.name)
            error.add(weights, stored)
            file.write(writer.add(keys, _padded(values, writer.value_bytes)))
        file.write(writer.finish())
    return {**entry, "path": str(path)}


def _rows_of(table: ServedTable, bucket: int) -> tuple[Keys, Array]:
    content = table.rows.snapshot(bucket)
    return content.keys, RowLayout.of(table.schema, table.rows).weights(content.rows)


def encode(weights: Array, dtype: str, name: str) -> tuple[Array, Array]:
    """Rows as they are stored, and the weights that are read from there.

    Args:
        weights: (n, D) float32.
        dtype: float32; float16; or int8: round(weight / scale), with the row's scale, max(|row|) /
            127 as float32, before it.

    Returns:
        (n, bytes) uint8, and (n, D) float32.

    Raises:
        BadRequest: weights that are not finite, or too large for float16; names the table.
    """
    weights = np.ascontiguousarray(weights)
    largest = np.abs(weights).max(axis=1, initial=0.0, keepdims=True)
    limit = FLOAT16_MAX if dtype == "float16" else math.inf
    if not (largest <= limit).all() or np.isinf(largest).any():
        raise BadRequest(
            f"export of table {name!r}: expected finite weights, in float16 up to {FLOAT16_MAX:g},"
            f" found {largest.max()}"
        )
    if dtype == "float32":
        return weights.view(np.uint8), weights
    if dtype == "float16":
        halves = weights.astype(np.float16)
        return halves.view(np.uint8), halves.astype(np.float32)
    scale = (largest / np.float32(INT8_MAX)).astype(np.float32)
    codes = np.rint(weights / np.where(scale > 0, scale, 1)).clip(-INT8_MAX, INT8_MAX)
    codes = codes.astype(np.int8)
    values = np.concatenate([scale.view(np.uint8), codes.view(np.uint8)], axis=1)
    return values, codes.astype(np.float32) * scale


def _padded(values: Array, num_bytes: int) -> Array:
    if values.shape[1] == num_bytes:
        return values
    out = np.zeros((len(values), num_bytes), np.uint8)
    out[:, : values.shape[1]] = values
    return out
