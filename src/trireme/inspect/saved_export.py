"""Exports for inference, as docs/format/export.md specifies them."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trireme import _core, drawing
from trireme.inference.export_manifest import ExportedTable, ModuleLookup, read_manifest
from trireme.inference.row_layers import map_rows
from trireme.inspect.saved_model import RowBatch, SavedModel, SavedTable
from trireme.protocol.wire import Array

ROWS_AT_A_TIME = 1 << 16
FLAGS_BYTES = 8
SHOW_CLICK = np.dtype([("show", "<f4"), ("click", "<f4")])


class ExportTable(SavedTable):
    has_all_features = True

    def __init__(
        self,
        folder: Path,
        name: str,
        table: ExportedTable,
        *,
        is_delta: bool,
        lookups: Sequence[ModuleLookup] = (),
        texts: Sequence[str] = (),
    ) -> None:
        self._folder, self._table, self._is_delta = folder, table, is_delta
        self.name = name
        features = (
            feature
            for lookup in lookups
            if (lookup.table, lookup.dim) == (table.name, table.dim)
            for feature in lookup.features
        )
        self.features = tuple(dict.fromkeys(features))
        self.string_features = frozenset(texts)
        self.salt = table.salt
        self.num_rows, self.num_removed = table.rows, table.removed
        self.num_bytes = sum(file.bytes for file in table.files)

    @property
    def comparable(self) -> Any:
        return self._table.dim

    def properties(self) -> dict[str, str]:
        table = self._table
        return {
            "dim": str(table.dim),
            "dtype": table.dtype,
            "largest error": drawing.number(table.max_error),
            "rms error": drawing.number(table.rms_error),
        }

    def rows(self, buckets: npt.NDArray[np.uint16] | None = None) -> Iterator[RowBatch]:
        stored = map_rows(self._folder, self._table, has_flags=self._is_delta, verify=False)
        wanted = range(_core.NUM_BUCKETS) if buckets is None else np.unique(buckets).tolist()
        parts: list[RowBatch] = []
        for bucket in wanted:
            keys, values = stored.content(bucket)
            if self._is_delta:
                is_row = values[:, :FLAGS_BYTES].copy().view(np.uint64)[:, 0] == 0
                keys, values = keys[is_row], values[is_row, FLAGS_BYTES:]
            parts.append(self._rows_of(keys, values))
            if sum(len(rows.keys) for rows in parts) >= ROWS_AT_A_TIME:
                yield from _joined(parts)
                parts = []
        yield from _joined(parts)

    def _rows_of(self, keys: Array, values: Array) -> RowBatch:
        """values: (n, bytes) as stored, without flags."""
        n, statistics_bytes = len(keys), SHOW_CLICK.itemsize if self._table.statistics else 0
        statistics = np.empty(n, SHOW_CLICK if statistics_bytes else [])
        if statistics_bytes:
            statistics = values[:, :statistics_bytes].copy().view(SHOW_CLICK)[:, 0]
        weights = self._weights(values[:, statistics_bytes:])
        no_state, no_updates = np.empty((n, 0), np.float32), np.empty((n, 0), np.uint32)
        return RowBatch(keys, np.zeros(n, np.uint8), weights, no_state, no_updates, statistics)

    def _weights(self, values: Array) -> Array:
        """(n, D) float32 of (n, bytes)."""
        dim = self._table.dim
        if self._table.dtype == "int8":
            scale = values[:, :4].copy().view(np.float32)
            return np.asarray(values[:, 4 : 4 + dim].view(np.int8) * scale)
        kind = np.dtype(self._table.dtype)
        stored = np.ascontiguousarray(values[:, : dim * kind.itemsize])
        weights: Array = stored.view(kind).reshape(-1, dim).astype(np.float32)
        return weights


def _named(tables: Sequence[ExportedTable]) -> dict[str, ExportedTable]:
    """By name; of a table with several dims each dim is exported as a table of its own."""
    count = Counter(table.name for table in tables)
    return {
        table.name if count[table.name] == 1 else f"{table.name}, dim {table.dim}": table
        for table in tables
    }


def _joined(parts: list[RowBatch]) -> Iterator[RowBatch]:
    """All rows in one batch; nothing if there are none."""
    if any(len(rows.keys) for rows in parts):
        yield RowBatch(*map(np.concatenate, zip(*parts, strict=True)))


class SavedExport(SavedModel):
    """Raises Corruption if the manifest is damaged."""

    def __init__(self, folder: Path) -> None:
        self._manifest = manifest = read_manifest(folder)
        self.path, self.version = str(folder), manifest.version
        self.tables = {
            name: ExportTable(
                folder,
                name,
                table,
                is_delta=manifest.is_delta,
                lookups=manifest.lookups,
                texts=manifest.texts,
            )
            for name, table in sorted(_named(manifest.tables).items())
        }

    def headline(self) -> Iterator[str]:
        manifest = self._manifest
        kind = f"delta since version {manifest.since}" if manifest.is_delta else "base"
        num_bytes = manifest.dense.bytes + sum(table.num_bytes for table in self.tables.values())
        yield f"inference export {self.path}: {kind}, version {self.version}"
        yield (
            f"{drawing.size(num_bytes)}, {drawing.size(manifest.dense.bytes)} of them the dense"
            f" part; outputs {', '.join(manifest.outputs)}"
        )
        columns = [f"{name}: {kind}" for name, kind in manifest.columns.items()]
        yield f"columns of a batch: {', '.join(columns)}"
        yield (
            f"outputs differ from the trained model's by {drawing.number(manifest.max_error)} at"
            f" most, root mean square {drawing.number(manifest.rms_error)}"
        )

    def dense(self) -> Iterator[tuple[str, int, Array]]:
        """Nothing: the dense part of an export is a program."""
        return iter(())
