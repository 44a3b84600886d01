"""Parquet files of rows: the columns of named_columns.py, with weights as lists of float32, which
pyarrow, polars and DuckDB read.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from trireme.errors import BadRequest, DataError
from trireme.interchange.formats.named_columns import RANK2, STATISTICS, checked
from trireme.protocol.wire import Array
from trireme.rows.feature_keys import FeatureKeys
from trireme.rows.wide_rows import RowLayout, WideRows

BATCH_ROWS = 1 << 16


def arrow_schema(layout: RowLayout, *, state: bool) -> pa.Schema:
    """The columns of an export."""
    lists = pa.list_(pa.float32())
    kinds = {"key": pa.uint64(), "weights": lists}
    if state:
        kinds["state"] = lists
    names = layout.statistics_type.names or ()
    kinds |= {n: pa.from_numpy_dtype(STATISTICS[n]) for n in STATISTICS if n in names}
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in kinds.items()])


def record_batch(
    arrow: pa.Schema, layout: RowLayout, keys: Array | pa.Array, num_weights: Array, rows: WideRows
) -> pa.RecordBatch:
    """Wide rows as a batch of `arrow_schema`. keys: or values, as `arrow` has them. num_weights:
    (n,) weights that each row has.
    """
    statistics = layout.statistics(rows)
    state = layout.state(rows)
    columns: dict[str, Any] = {
        "key": pa.array(keys, arrow.field("key").type),
        "weights": _lists(layout.weights(rows), num_weights),
        "state": _lists(state, np.full(len(state), state.shape[1])),
        **{n: pa.array(np.ascontiguousarray(statistics[n])) for n in statistics.dtype.names or ()},
    }
    return pa.record_batch([columns[name] for name in arrow.names], schema=arrow)


def _lists(values: Array, lengths: Array) -> pa.Array:
    """Lists of the first `lengths` values of each row."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    is_there = np.arange(values.shape[1]) < lengths[:, None]
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values[is_there]))


def batches(
    path: str,
    names: Mapping[str, str],
    storage_options: Mapping[str, Any] | None = None,
    feature: FeatureKeys | None = None,
) -> Iterator[dict[str, Array]]:
    """A file's rows, some thousand at a time, as checked columns and `num_weights`. Lists with
    fewer weights are filled up with zeros.

    names: the file's name of a column by ours; other columns have ours. The rest is ignored.
    feature: the column `key` has its values; None: keys.

    Raises DataError: no such file, no key or weights, or nulls.
    """
    try:
        with fsspec.open(path, "rb", **(storage_options or {})) as stored:
            file = pq.ParquetFile(stored)
            wanted = _wanted(path, file.schema_arrow.names, names)
            for batch in file.iter_batches(BATCH_ROWS, columns=list(wanted.values())):
                columns = {
                    name: _column(path, name, batch[in_file], feature)
                    for name, in_file in wanted.items()
                }
                yield {**columns, "num_weights": _lengths(batch[wanted["weights"]])}
    except DataError:
        raise
    except BadRequest as error:
        raise DataError(f"{path}: {error}") from error
    except (OSError, ValueError, ImportError) as error:
        raise DataError(f"{path}: cannot read it: {error}") from error


def _wanted(path: str, in_file: Sequence[str], names: Mapping[str, str]) -> dict[str, str]:
    """The file's name of each of our columns that it has."""
    wanted = {
        name: names.get(name, name)
        for name in ("key", "weights", "state", *STATISTICS)
        if names.get(name, name) in in_file or name in ("key", "weights") or name in names
    }
    missing = sorted(set(wanted.values()) - set(in_file))
    if missing:
        raise DataError(f"{path}: expected columns {missing}, found {list(in_file)}")
    return wanted


def _column(path: str, name: str, column: pa.Array, feature: FeatureKeys | None) -> Array:
    if name == "key" and feature is not None:
        try:
            return feature.of(column)
        except DataError as error:
            raise DataError(f"{path}: {error}") from error
    return checked(name, _array(path, name, column))


def _array(path: str, name: str, column: pa.Array) -> Array:
    if column.null_count:
        raise DataError(f"{path}: expected no nulls in column {name!r}, found {column.null_count}")
    if name not in RANK2:
        values: Array = column.to_numpy(zero_copy_only=False)
        return values
    if not hasattr(column, "flatten"):
        raise DataError(f"{path}: expected lists in column {name!r}, found {column.type}")
    flat, lengths = column.flatten(), _lengths(column)
    if flat.null_count:
        raise DataError(f"{path}: expected no nulls in the lists of column {name!r}")
    lists = np.zeros((len(column), int(lengths.max(initial=0))), flat.type.to_pandas_dtype())
    lists[np.arange(lists.shape[1]) < lengths[:, None]] = flat.to_numpy(zero_copy_only=False)
    return lists


def _lengths(column: pa.Array) -> Array:
    lengths: Array = pc.list_value_length(column).to_numpy(zero_copy_only=False).astype(np.int64)
    return lengths
