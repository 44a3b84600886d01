"""Exports for inference, on the servers: each writes the rows that it owns as frozen rows
(docs/format/export.md), which readers search in the file.
"""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from trireme import _core
from trireme.errors import BadRequest, check_choice, writing
from trireme.protocol.routing import Keys
from trireme.protocol.wire import Array, need, need_list, need_time, need_version
from trireme.rows.frozen_rows import DTYPES, encode
from trireme.rows.wide_rows import RowLayout
from trireme.rpc import Handler, Reply, Request
from trireme.server.assignment import consecutive
from trireme.server.paths import resolve_local_path
from trireme.server.repeated_calls import repeatable
from trireme.server.served_tables import ServedTable
from trireme.server.state import ServerState
from trireme.storage.checked_file import written_for_mapping

FLAG_BYTES = 8


def frozen_export_handlers(state: ServerState, root: Path) -> dict[str, Handler]:
    """The method `export.save`; paths stay under `root`."""
    return {"export.save": repeatable(partial(_on_save, state, root))}


def _on_save(state: ServerState, root: Path, request: Request) -> Reply:
    body = request.body
    folder = resolve_local_path(root, need(body, "path", str))
    names, classes = need_list(body, "tables", str), need_list(body, "classes", int)
    dtype, time = need(body, "dtype", str), need_time(body)
    since, version = need_version(body, "since"), need_version(body, "version")
    forget = need_version(body, "forget")
    check_choice("export.save", DTYPES, dtype=dtype)
    if len(classes) != len(names):
        raise BadRequest(f"export.save: expected a class for {len(names)} tables, found {classes}")
    state.check_settled()
    state.raise_version(version + 1)
    state.forget_removed(forget)
    with writing(f"export: cannot write {folder}"):
        tables = []
        for number, (name, row_class) in enumerate(zip(names, classes, strict=True)):
            export = _TableExport(state.table(name), row_class, dtype, since, time, state.pool)
            tables.append(export.save(state.assignment.owned_buckets(), folder, f"tables/{number}"))
    return Reply({"tables": tables})


class _TableExport:
    """Writes this server's rows of one row class, and heads, whose class is not known yet.

    since: 0: all rows. Otherwise rows that changed after that version, and removed keys.
    time: data time of the statistics, where the table gives them to models.
    """

    def __init__(
        self,
        table: ServedTable,
        row_class: int,
        dtype: str,
        since: int,
        time: int,
        pool: _core.Pool,
    ) -> None:
        self._table, self._pool = table, pool
        self._dtype, self._since, self._time = dtype, since, time
        schema = table.schema
        self._dim = schema.dim_of(row_class)
        self._other_classes = [c for c in range(len(schema.dims)) if c != row_class]
        self._layout = RowLayout.of(schema, table.rows)
        self._num_statistics = schema.width_of(row_class) - self._dim
        self._num_rows = self._num_removed = 0
        self._max_error = self._sum_of_squares = 0.0

    def save(self, owned: Array, folder: Path, prefix: str) -> dict[str, Any]:
        """Write a file per run of consecutive buckets; returns the files and rows' errors."""
        return {
            "files": [self._save_run(run, folder, prefix) for run in consecutive(owned)],
            "rows": self._num_rows,
            "removed": self._num_removed,
            "max_error": self._max_error,
            "sum_of_squares": self._sum_of_squares,
        }

    def _save_run(self, buckets: Array, folder: Path, prefix: str) -> dict[str, Any]:
        low, high = int(buckets[0]), int(buckets[-1])
        path = f"{prefix}/{low:04d}-{high:04d}.rows"
        writer = _core.FrozenWriter(
            encoding=self._dtype,
            dim=self._dim,
            statistics=self._num_statistics,
            has_flags=self._since > 0,
            first_bucket=low,
        )
        (folder / path).unlink(missing_ok=True)
        with written_for_mapping(folder, path) as (file, entry):
            for bucket in range(low, high + 1):
                file.write(writer.add(*self._content(bucket, writer.value_bytes)))
            file.write(writer.finish())
        return dict(entry)

    def _content(self, bucket: int, value_bytes: int) -> tuple[Keys, Array]:
        """The keys of a bucket and the value of each: flags in a delta, statistics, weights."""
        since = self._since
        content = self._table.rows.snapshot(bucket, since)
        keys, rows = content.keys, content.rows
        if self._other_classes:
            is_ours = ~np.isin(content.classes, self._other_classes)
            keys, rows = keys[is_ours], rows[is_ours]
        weights = self._layout.weights(rows)[:, : self._dim]
        encoded, decoded = encode(weights, self._dtype, self._table.schema.name)
        error = np.abs(decoded - weights)
        self._num_rows += len(weights)
        self._max_error = max(self._max_error, float(error.max(initial=0.0)))
        self._sum_of_squares += float(np.square(error, dtype=np.float64).sum())
        values = np.zeros((len(keys), value_bytes), np.uint8)
        start = FLAG_BYTES if since else 0
        for part in (self._statistics(keys), encoded):
            values[:, start : start + part.shape[1]] = part
            start += part.shape[1]
        if not since:
            return keys, values
        removed = np.setdiff1d(content.removed, content.keys)  # some have come back
        self._num_removed += len(removed)
        tombstones = np.zeros((len(removed), value_bytes), np.uint8)
        tombstones[:, 0] = 1
        return np.concatenate([keys, removed]), np.concatenate([values, tombstones])

    def _statistics(self, keys: Keys) -> Array:
        """(n, bytes): what lookups answer before the weights."""
        shows_N2 = np.empty((len(keys), 2))
        if self._num_statistics:
            self._table.rows.statistics(keys, shows_N2, self._time, False, self._pool)
        return shows_N2[:, : self._num_statistics].astype(np.float32).view(np.uint8)
