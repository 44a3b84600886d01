"""Exports for inference on the servers' side: each server writes the rows it owns as frozen rows
(docs/format/export.md), which are searched as they lie in the file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from trireme import _core
from trireme.errors import BadRequest, writing
from trireme.protocol.core_table import ServedTable
from trireme.protocol.routing import Keys
from trireme.protocol.wide_rows import RowLayout
from trireme.protocol.wire import Array, need, need_list, need_time, need_version
from trireme.rpc import Reply, Request
from trireme.server.places import local_place
from trireme.server.shard import Handler, Shard
from trireme.storage.checked_file import written_for_mapping

DTYPES = ("float32", "float16", "int8")
FLAG_BYTES = 8
FLOAT16_MAX = 65504.0
INT8_MAX = 127.0


class ExportHandlers:
    """The method `export.save`; paths stay under `root`."""

    def __init__(self, shard: Shard, root: Path) -> None:
        self._shard, self._root = shard, root

    def handlers(self) -> dict[str, Handler]:
        return {"export.save": self._on_save}

    def _on_save(self, request: Request) -> Reply:
        folder = local_place(self._root, need(request.body, "path", str))
        names = need_list(request.body, "tables", str)
        classes = need_list(request.body, "classes", int)
        dtype = need(request.body, "dtype", str)
        since = need_version(request.body, "since")
        version = need_version(request.body, "version")
        forget = need_version(request.body, "forget")
        if dtype not in DTYPES:
            raise BadRequest(f"export.save: expected dtype one of {DTYPES}, found {dtype!r}")
        if len(classes) != len(names):
            raise BadRequest(
                f"export.save: expected a class for {len(names)} tables, found {classes}"
            )
        self._shard.raise_version(version + 1)
        self._shard.forget_removed(forget)
        with writing(f"export: cannot write {folder}"):
            tables = []
            for number, (name, row_class) in enumerate(zip(names, classes, strict=True)):
                table = self._shard.table(name)
                rows = _RowsExport(
                    table, row_class, self._shard.pool, dtype, since, need_time(request.body)
                )
                tables.append(rows.save(self._owned(), folder, f"tables/{number}"))
        return Reply({"tables": tables})

    def _owned(self) -> Array:
        return self._shard.map().owned_by(self._shard.index)


class _RowsExport:
    """Writes the rows of one row class of a table that this server owns, and of those that are a
    head as yet: nothing says which class theirs will be.

    since: 0: all rows. Else those that have changed after that version, and the keys removed.
    time: data time that statistics are of, where the table gives them to models.
    """

    def __init__(
        self,
        table: ServedTable,
        row_class: int,
        pool: _core.Pool,
        dtype: str,
        since: int,
        time: int,
    ) -> None:
        self._table, self._pool = table, pool
        self._dtype, self._since, self._time = dtype, since, time
        schema = table.schema
        self._dim = schema.dim_of(row_class)
        self._others = [of for of in range(len(schema.dims)) if of != row_class]
        self._layout = RowLayout.of(schema, table.rows)
        self._num_statistics = schema.width_of(row_class) - self._dim
        self._num_rows = self._num_removed = 0
        self._max_error = self._sum_of_squares = 0.0

    def save(self, owned: Array, folder: Path, under: str) -> dict[str, Any]:
        """What has been written: a file of each run of owned buckets, and the error of the rows."""
        return {
            "files": [self._save_run(buckets, folder, under) for buckets in _runs(owned)],
            "rows": self._num_rows,
            "removed": self._num_removed,
            "max_error": self._max_error,
            "sum_of_squares": self._sum_of_squares,
        }

    def _save_run(self, buckets: Array, folder: Path, under: str) -> dict[str, Any]:
        low, high = int(buckets[0]), int(buckets[-1])
        path = f"{under}/{low:04d}-{high:04d}.rows"
        writer = _core.FrozenWriter(
            encoding=self._dtype,
            dim=self._dim,
            statistics=self._num_statistics,
            has_flags=self._since > 0,
            first_bucket=low,
        )
        with written_for_mapping(folder, path) as (file, entry):
            for bucket in range(low, high + 1):
                file.write(writer.add(*self._content(bucket, writer.value_bytes)))
            file.write(writer.finish())
        return dict(entry)

    def _content(self, bucket: int, value_bytes: int) -> tuple[Keys, Array]:
        """The keys of a bucket, and behind each what its row holds."""
        content = self._table.rows.snapshot(bucket, self._since)
        keys, rows = content.keys, content.rows
        if self._others:
            is_ours = ~np.isin(content.classes, self._others)
            keys, rows = keys[is_ours], rows[is_ours]
        weights = self._layout.weights(rows)[:, : self._dim]
        encoded, stored = encode(weights, self._dtype, self._table.schema.name)
        self._count(weights, stored)
        values = np.zeros((len(keys), value_bytes), np.uint8)
        at = FLAG_BYTES if self._since else 0
        for part in (self._statistics(keys), encoded):
            values[:, at : at + part.shape[1]] = part
            at += part.shape[1]
        if not self._since:
            return keys, values
        removed = np.setdiff1d(content.removed, content.keys)  # some have come back
        self._num_removed += len(removed)
        gone = np.zeros((len(removed), value_bytes), np.uint8)
        gone[:, 0] = 1
        return np.concatenate([keys, removed]), np.concatenate([values, gone])

    def _statistics(self, keys: Keys) -> Array:
        """(n, bytes): what lookups answer before the weights."""
        found = np.empty((len(keys), 2))
        if self._num_statistics:
            self._table.rows.statistics(keys, found, self._time, False, self._pool)
        return found[:, : self._num_statistics].astype(np.float32).view(np.uint8)

    def _count(self, weights: Array, stored: Array) -> None:
        self._num_rows += len(weights)
        difference = np.abs(stored - weights)
        self._max_error = max(self._max_error, float(difference.max(initial=0.0)))
        self._sum_of_squares += float(np.square(difference, dtype=np.float64).sum())


def _runs(buckets: Array) -> Iterator[Array]:
    """Owned buckets in files' worth: consecutive numbers."""
    if len(buckets):
        yield from np.split(buckets, np.flatnonzero(np.diff(buckets) != 1) + 1)


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
