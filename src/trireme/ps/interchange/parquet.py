"""Parquet files of rows: one column per field of `trireme.ps.interchange.columns`, weights as lists
of float32, which pyarrow, polars and DuckDB read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trireme.errors import DataError
from trireme.ps.interchange.columns import RANK2, STATISTICS, checked
from trireme.ps.rows import RowLayout, WideRows
from trireme.ps.wire import Array

BATCH_ROWS = 1 << 16


def arrow_schema(layout: RowLayout, *, state: bool) -> pa.Schema:
    """Columns of an export."""
    lists = pa.list_(pa.float32())
    kinds = {"key": pa.uint64(), "weights": lists}
    if state:
        kinds["state"] = lists
    names = layout.statistics_type.names or ()
    kinds |= {n: pa.from_numpy_dtype(STATISTICS[n]) for n in STATISTICS if n in names}
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in kinds.items()])


def record_batch(
    arrow: pa.Schema, layout: RowLayout, keys: Array, rows: WideRows
) -> pa.RecordBatch:
    """Wide rows as a batch of `arrow_schema`."""
    statistics = layout.statistics(rows)
    columns: dict[str, Any] = {
        "key": pa.array(keys),
        "weights": _lists(layout.weights(rows)),
        "state": _lists(layout.state(rows)),
        **{n: pa.array(np.ascontiguousarray(statistics[n])) for n in statistics.dtype.names or ()},
    }
    return pa.record_batch([columns[name] for name in arrow.names], schema=arrow)


def _lists(values: Array) -> pa.Array:
    offsets = np.arange(len(values) + 1, dtype=np.int32) * values.shape[1]
    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    return pa.ListArray.from_arrays(pa.array(offsets), flat)


def batches(
    path: str,
    names: Mapping[str, str],
    storage_options: Mapping[str, Any] | None = None,
) -> Iterator[dict[str, Array]]:
    """A file's rows, some thousand at a time, as checked columns.

    Args:
        names: what the file calls a column, by our name for it; others by their own name. Columns
            that are neither are passed over.

    Raises:
        DataError: no such file, no key or weights, nulls, or lists of different lengths.
    """
    try:
        with fsspec.open(path, "rb", **(storage_options or {})) as stored:
            file = pq.ParquetFile(stored)
            wanted = _wanted(path, file.schema_arrow.names, names)
            for batch in file.iter_batches(BATCH_ROWS, columns=list(wanted.values())):
                yield {
                    ours: checked(ours, _array(path, ours, batch[theirs]))
                    for ours, theirs in wanted.items()
                }
    except (OSError, ValueError, ImportError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path}: cannot read it: {error}") from error


def _wanted(path: str, found: Sequence[str], names: Mapping[str, str]) -> dict[str, str]:
    """What the file calls each of our columns that it has."""
    wanted = {ours: names.get(ours, ours) for ours in ("key", "weights", "state", *STATISTICS)}
    wanted = {
        ours: theirs
        for ours, theirs in wanted.items()
        if theirs in found or ours in ("key", "weights") or ours in names
    }
    missing = sorted(set(wanted.values()) - set(found))
    if missing:
        raise DataError(f"{path}: expected columns {missing}, found {list(found)}")
    return wanted


def _array(path: str, name: str, column: pa.Array) -> Array:
    if column.null_count:
        raise DataError(f"{path}: expected no nulls in column {name!r}, found {column.null_count}")
    if name not in RANK2:
        values: Array = column.to_numpy(zero_copy_only=False)
        return values
    if not hasattr(column, "flatten"):
        raise DataError(f"{path}: expected lists in column {name!r}, found {column.type}")
    flat = column.flatten()
    if flat.null_count or (len(column) and len(flat) % len(column)):
        raise DataError(f"{path}: expected lists of one length without nulls in column {name!r}")
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        lengths = np.diff(column.offsets.to_numpy())
        if len(lengths) and (lengths != lengths[0]).any():
            raise DataError(
                f"{path}: expected lists of one length in column {name!r}, found"
                f" {sorted(set(lengths.tolist()))[:5]}"
            )
    lists: Array = flat.to_numpy(zero_copy_only=False).reshape(len(column), -1)
    return lists
