"""Files of rows: Arrow IPC, a column per part of a row; and beside each a file with a line per
bucket. docs/format/checkpoint.md specifies both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trireme import _core
from trireme.checkpoint.format.manifest import Piece
from trireme.checkpoint.server_side.jobs import Progress
from trireme.errors import Corruption, SchemaMismatch
from trireme.protocol.wide_rows import RowLayout
from trireme.protocol.wire import Array
from trireme.storage.storage import Storage, written

# Of a batch. A thread that writes holds it twice: as the table gave its buckets, and as columns;
# and once more the rows that are chosen, where not all are.
BATCH_BYTES = 2 << 20
BUCKETS_PER_BATCH_MAX = 512

BUCKETS = pa.schema(
    [
        pa.field("bucket", pa.uint16(), nullable=False),
        pa.field("num_rows", pa.uint32(), nullable=False),
        pa.field(
            "marks",
            pa.list_(
                pa.field(
                    "item",
                    pa.struct(
                        [
                            pa.field("stream", pa.int64(), nullable=False),
                            pa.field("sequence", pa.uint64(), nullable=False),
                        ]
                    ),
                    nullable=False,
                )
            ),
            nullable=False,
        ),
        pa.field("pending", pa.large_binary(), nullable=False),
        pa.field(
            "removed",
            pa.large_list(pa.field("item", pa.uint64(), nullable=False)),
            nullable=False,
        ),
    ]
)

# (n,) records of the layout's statistics -> (n,) whether to save the row.
Choose = Callable[[Array], npt.NDArray[np.bool_]]


@dataclass(frozen=True)
class Columns:
    """The parts of a wide row as columns of a file, beside `key` and `row_class`."""

    schema: pa.Schema
    widths: tuple[int, ...]
    statistics: np.dtype[Any]

    @classmethod
    def of(cls, layout: RowLayout) -> Columns:
        lists = [("weights", layout.dim), ("state", layout.state_floats)]
        fields = [
            pa.field("key", pa.uint64(), nullable=False),
            pa.field("row_class", pa.uint8(), nullable=False),
        ]
        widths = []
        for name, size in lists:
            if size > 0:  # DuckDB has no arrays of length 0
                fields.append(pa.field(name, pa.list_(pa.float32(), size), nullable=False))
                widths.append(4 * size)
        statistics = layout.statistics_type
        for name in statistics.names or ():
            kind = statistics[name]
            fields.append(pa.field(name, pa.from_numpy_dtype(kind), nullable=False))
            widths.append(kind.itemsize)
        return cls(pa.schema(fields), tuple(widths), statistics)

    def statistics_of(self, found: _core.BucketColumns) -> Array:
        """(n,) records."""
        names = self.statistics.names or ()
        records = np.empty(len(found.keys), self.statistics)
        for name, column in zip(names, found.columns[-len(names) :], strict=True):
            records[name] = column.view(self.statistics[name])
        return records


# ---- writing ----


@dataclass(frozen=True)
class PieceWriter:
    """Writes buckets low..high of a table, each as it is at some moment.

    since, removed_since: as of snapshot_columns.  choose: which rows; None: all.
    """

    rows: _core.Table
    columns: Columns
    since: int
    removed_since: int
    choose: Choose | None

    def write(
        self,
        storage: Storage,
        stem: str,
        low: int,
        high: int,
        buckets_per_batch: int,
        progress: Progress,
    ) -> dict[str, Any]:
        """Write `stem`.arrow and `stem`.buckets.arrow; returns the piece for the manifest.

        buckets_per_batch: to begin with; more where these have few rows to be saved.
        """
        num_rows = num_removed = 0
        first = low
        with (
            written(storage, f"{stem}.arrow") as (rows_file, rows_entry),
            written(storage, f"{stem}.buckets.arrow") as (buckets_file, buckets_entry),
            _arrow_file(rows_file, self.columns.schema) as rows,
            _arrow_file(buckets_file, BUCKETS) as buckets,
        ):
            while first <= high:
                count = min(buckets_per_batch, high + 1 - first)
                found = _core.snapshot_columns(
                    self.rows,
                    first,
                    count,
                    self.since,
                    self.removed_since,
                    self.columns.widths,
                )
                batch, counts = self._row_batch(found)
                if batch.num_rows:
                    rows.write_batch(batch)
                buckets.write_batch(_bucket_batch(found, first, counts))
                num_rows += batch.num_rows
                num_removed += len(found.removed)
                progress.add(count)
                first += count
                parts: list[Array] = [found.pending, found.removed, *found.columns]
                if sum(part.nbytes for part in parts) < BATCH_BYTES // 2:
                    buckets_per_batch = min(2 * buckets_per_batch, BUCKETS_PER_BATCH_MAX)
                del found, batch, parts  # before the next is made
        return {
            "low": low,
            "high": high,
            "num_rows": num_rows,
            "num_removed": num_removed,
            "rows": dict(rows_entry),
            "buckets": dict(buckets_entry),
        }

    def _row_batch(self, found: _core.BucketColumns) -> tuple[pa.RecordBatch, Array]:
        schema, counts = self.columns.schema, found.num_rows
        arrays: list[Array] = [found.keys, found.classes, *found.columns]
        if self.choose is not None and len(found.keys):
            mask = self.choose(self.columns.statistics_of(found))
            arrays = [array.reshape(len(mask), -1)[mask] for array in arrays]
            counts = _sums(mask, counts)
        num_rows = int(counts.sum())
        parts = [_column(f.type, num_rows, a) for f, a in zip(schema, arrays, strict=True)]
        return pa.RecordBatch.from_arrays(parts, schema=schema), counts


@contextmanager
def _arrow_file(file: Any, schema: pa.Schema) -> Iterator[Any]:
    with pa.PythonFile(file, mode="w") as sink, pa.ipc.new_file(sink, schema) as writer:
        yield writer


def _sums(mask: npt.NDArray[np.bool_], counts: Array) -> Array:
    """How many of each bucket's rows are chosen."""
    ends = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    chosen = np.concatenate([[0], np.cumsum(mask, dtype=np.int64)])
    sums: Array = np.diff(chosen[ends]).astype(np.uint32)
    return sums


def _column(kind: pa.DataType, num_rows: int, values: Array) -> pa.Array:
    """The memory of the values as a column, without a copy."""
    buffer = pa.py_buffer(values)
    if not pa.types.is_fixed_size_list(kind):
        return pa.Array.from_buffers(kind, num_rows, [None, buffer])
    floats = pa.Array.from_buffers(kind.value_type, num_rows * kind.list_size, [None, buffer])
    return pa.FixedSizeListArray.from_arrays(floats, type=kind)


def _bucket_batch(found: _core.BucketColumns, first: int, counts: Array) -> pa.RecordBatch:
    num_buckets = len(counts)
    marks = pa.StructArray.from_arrays(
        [pa.array(found.streams), pa.array(found.sequences)],
        fields=list(BUCKETS.field("marks").type.value_type),
    )
    return pa.RecordBatch.from_arrays(
        [
            pa.array(np.arange(first, first + num_buckets, dtype=np.uint16)),
            pa.array(np.ascontiguousarray(counts, np.uint32)),
            pa.ListArray.from_arrays(
                pa.array(found.mark_offsets), marks, type=BUCKETS.field("marks").type
            ),
            pa.LargeBinaryArray.from_buffers(
                pa.large_binary(),
                num_buckets,
                [None, pa.py_buffer(found.pending_offsets), pa.py_buffer(found.pending)],
            ),
            pa.LargeListArray.from_arrays(
                pa.array(found.removed_offsets),
                pa.array(found.removed),
                type=BUCKETS.field("removed").type,
            ),
        ],
        schema=BUCKETS,
    )


# ---- reading ----


@dataclass(frozen=True)
class Buckets:
    """The lines of some buckets: (m,) numbers and counts; lists with m + 1 offsets."""

    buckets: npt.NDArray[np.uint16]
    num_rows: npt.NDArray[np.uint32]
    mark_offsets: npt.NDArray[np.int32]
    streams: npt.NDArray[np.int64]
    sequences: npt.NDArray[np.uint64]
    pending_offsets: npt.NDArray[np.int64]
    pending: npt.NDArray[np.uint8]
    removed_offsets: npt.NDArray[np.int64]
    removed: npt.NDArray[np.uint64]


def read_piece(
    storage: Storage, piece: Piece, schema: pa.Schema
) -> Iterator[tuple[Buckets, pa.RecordBatch]]:
    """The buckets of a piece, some at a time, with their rows.

    Raises:
        Corruption: the files are not what the manifest says, or not Arrow; names the file.
        SchemaMismatch: the columns differ from `schema`.
    """
    where = f"{storage.name}/{piece.rows.path}"
    with (
        _reader(storage, piece.rows.path, schema) as rows,
        _reader(storage, piece.buckets.path, BUCKETS) as lines,
    ):
        batches = _non_empty(rows, where)
        expected, num_rows = piece.low, 0
        for number in range(lines.num_record_batches):
            buckets = _buckets(lines.get_batch(number))  # checked whole: offsets lead into memory
            count = int(buckets.num_rows.sum(dtype=np.int64))
            if not np.array_equal(
                buckets.buckets, np.arange(expected, expected + len(buckets.buckets))
            ):
                raise Corruption(f"{where}: expected buckets from {expected} on next")
            batch = next(batches, None) if count else rows_of_none(schema)
            if batch is None or batch.num_rows != count:
                found = 0 if batch is None else batch.num_rows
                raise Corruption(f"{where}: expected {count} rows next, found {found}")
            expected += len(buckets.buckets)
            num_rows += count
            yield buckets, batch
        if expected != piece.high + 1 or num_rows != piece.num_rows or next(batches, None):
            raise Corruption(
                f"{where}: expected {piece.num_rows} rows of buckets {piece.low}..{piece.high},"
                f" found {num_rows} of {piece.low}..{expected - 1}"
            )


def rows_of_none(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([], f.type) for f in schema], schema=schema)


@contextmanager
def _reader(storage: Storage, path: str, schema: pa.Schema) -> Iterator[Any]:
    where = f"{storage.name}/{path}"
    try:
        with storage.open_arrow(path) as source, pa.ipc.open_file(source) as reader:
            if reader.schema != schema:
                raise SchemaMismatch(
                    f"{where}: expected columns {_shown(schema)}, found {_shown(reader.schema)}"
                )
            yield reader
    except FileNotFoundError as error:
        raise Corruption(f"checkpoint: expected file {where}, found none") from error
    except pa.ArrowInvalid as error:
        raise Corruption(f"{where}: expected an Arrow file, found {error}") from error


def _shown(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)


def _non_empty(reader: Any, where: str) -> Iterator[pa.RecordBatch]:
    for number in range(reader.num_record_batches):
        batch = reader.get_batch(number)
        batch.validate()
        if any(column.null_count for column in batch.columns):
            raise Corruption(f"{where}: expected no nulls, found some in batch {number}")
        if batch.num_rows:
            yield batch


def _buckets(batch: pa.RecordBatch) -> Buckets:
    batch.validate(full=True)
    marks, pending, removed = (batch[name] for name in ("marks", "pending", "removed"))
    of_marks = marks.values
    return Buckets(
        buckets=batch["bucket"].to_numpy(),
        num_rows=batch["num_rows"].to_numpy(),
        mark_offsets=marks.offsets.to_numpy(),
        streams=of_marks.field("stream").to_numpy(),
        sequences=of_marks.field("sequence").to_numpy(),
        pending_offsets=np.frombuffer(pending.buffers()[1], np.int64)[: batch.num_rows + 1],
        pending=np.frombuffer(pending.buffers()[2] or b"", np.uint8),
        removed_offsets=removed.offsets.to_numpy(),
        removed=removed.values.to_numpy(),
    )


def cells_of(batch: pa.RecordBatch) -> list[npt.NDArray[np.uint8]]:
    """The bytes of each column behind key and row_class, without a copy."""
    cells = []
    for column in batch.columns[2:]:
        values = column.flatten() if pa.types.is_fixed_size_list(column.type) else column
        cells.append(values.to_numpy().view(np.uint8))
    return cells
