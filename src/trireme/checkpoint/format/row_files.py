"""The row files of a checkpoint: Arrow IPC, a file with a column per part of a row, and beside it a
file with a line per bucket. docs/format/checkpoint.md specifies both; row_writer.py writes them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trireme import _core
from trireme.checkpoint.format.arrow_arrays import to_numpy
from trireme.checkpoint.format.manifest import RowFiles
from trireme.errors import Corruption, SchemaMismatch
from trireme.protocol.routing import buckets_of
from trireme.protocol.wire import Array
from trireme.rows.core_table import make_core_table
from trireme.rows.wide_rows import RowLayout
from trireme.storage.storage import Storage
from trireme.table import TableSchema


def _required(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind, nullable=False)


MARKS = pa.list_(
    _required(
        "item", pa.struct([_required("stream", pa.int64()), _required("sequence", pa.uint64())])
    )
)
REMOVED = pa.large_list(_required("item", pa.uint64()))
BUCKET_LINES = pa.schema(
    [
        _required("bucket", pa.uint16()),
        _required("num_rows", pa.uint32()),
        _required("marks", MARKS),
        _required("pending", pa.large_binary()),
        _required("removed", REMOVED),
    ]
)
PLACES = pa.schema([_required("bucket", pa.uint16()), _required("places", pa.large_binary())])
"""Of a snapshot that leaves rows on SSD: where those of each bucket are, in bytes of the core."""


Places = tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]
"""(m + 1,) offsets and bytes of m buckets."""
_NO_PLACES: Places = (np.zeros(0, np.int64), np.zeros(0, np.uint8))


@dataclass(frozen=True)
class RowColumns:
    """The parts of a wide row as columns of a file, behind key and row class; `widths` in bytes."""

    schema: pa.Schema
    widths: tuple[int, ...]
    statistics: np.dtype[Any]

    @classmethod
    def of(cls, layout: RowLayout) -> RowColumns:
        fields = [_required("key", pa.uint64()), _required("row_class", pa.uint8())]
        widths = []
        for name, size in (("weights", layout.dim), ("state", layout.state_floats)):
            if size > 0:  # DuckDB has no arrays of length 0
                fields.append(_required(name, pa.list_(pa.float32(), size)))
                widths.append(4 * size)
        statistics = layout.statistics_type
        for name in statistics.names or ():
            fields.append(_required(name, pa.from_numpy_dtype(statistics[name])))
            widths.append(statistics[name].itemsize)
        return cls(pa.schema(fields), tuple(widths), statistics)

    @classmethod
    def of_schema(cls, schema: TableSchema, rows: _core.Table | None = None) -> RowColumns:
        """rows: any table of this schema, if there is one."""
        return cls.of(RowLayout.of(schema, make_core_table(schema) if rows is None else rows))

    def restore(
        self,
        rows: _core.Table,
        lines: BucketLines,
        batch: pa.RecordBatch,
        *,
        wanted: npt.NDArray[np.bool_],
        removed_at: int,
        removed_since: int,
        apply: bool,
        places: Places | None = None,
        claims: Sequence[_core.Claim] = (),
    ) -> None:
        """Put the wanted buckets of a file into a table, see `_core.restore_columns`. places: of
        these buckets' rows on SSD.
        """
        place_offsets, place_bytes = places or _NO_PLACES
        columns = [
            c.flatten() if pa.types.is_fixed_size_list(c.type) else c for c in batch.columns[2:]
        ]
        _core.restore_columns(
            rows,
            **vars(lines),
            keys=to_numpy(batch["key"]),
            classes=to_numpy(batch["row_class"]),
            columns=[to_numpy(column).view(np.uint8) for column in columns],
            widths=list(self.widths),
            wanted=wanted,
            removed_at=removed_at,
            removed_since=removed_since,
            apply=apply,
            place_offsets=place_offsets,
            places=place_bytes,
            claims=claims,
        )

    def statistics_of(self, snapshot: _core.BucketColumns) -> Array:
        """(n,) records."""
        names = self.statistics.names or ()
        records = np.empty(len(snapshot.keys), self.statistics)
        for name, column in zip(names, snapshot.columns[-len(names) :], strict=True):
            records[name] = column.view(self.statistics[name])
        return records


@dataclass(frozen=True)
class BucketLines:
    """The lines of m buckets: (m,) numbers and counts; lists with m + 1 offsets. The names are
    those of `_core.restore_columns`.
    """

    buckets: npt.NDArray[np.uint16]
    num_rows: npt.NDArray[np.uint32]
    mark_offsets: npt.NDArray[np.int32]
    streams: npt.NDArray[np.int64]
    sequences: npt.NDArray[np.uint64]
    pending_offsets: npt.NDArray[np.int64]
    pending: npt.NDArray[np.uint8]
    removed_offsets: npt.NDArray[np.int64]
    removed: npt.NDArray[np.uint64]

    def without(self, keys: Array) -> BucketLines:
        """The lines without removed keys that have come back. All are restored with one version of
        removal, so a later delta may list more keys than necessary; a key with an unchanged row
        must not be among them, or the delta would lose the row.
        """
        stays = ~np.isin(self.removed, keys)
        if stays.all():
            return self
        ends = np.concatenate([[0], np.cumsum(stays, dtype=np.int64)])
        offsets, removed = ends[self.removed_offsets], self.removed[stays]
        return replace(self, removed_offsets=offsets, removed=removed)


def read_rows(
    storage: Storage, files: RowFiles, schema: pa.Schema
) -> Iterator[tuple[BucketLines, pa.RecordBatch]]:
    """The buckets of two row files, some at a time, with their rows.

    Raises Corruption: the files are not what the manifest says, or not Arrow; names the file.
    SchemaMismatch: the columns differ from `schema`.
    """
    where = f"{storage.name}/{files.rows.path}"
    with (
        _reader(storage, files.rows.path, schema) as rows,
        _reader(storage, files.buckets.path, BUCKET_LINES) as lines,
    ):
        batches = _non_empty(rows, where)
        no_rows = pa.RecordBatch.from_arrays([pa.nulls(0, f.type) for f in schema], schema=schema)
        expected, num_rows = files.low, 0
        for line_batch in lines:
            buckets = _bucket_lines(line_batch)
            count = int(buckets.num_rows.sum(dtype=np.int64))
            if not np.array_equal(
                buckets.buckets, np.arange(expected, expected + len(buckets.buckets))
            ):
                first = ", ".join(map(str, buckets.buckets[:3]))
                raise Corruption(f"{where}: expected buckets from {expected} on, found {first}")
            batch = next(batches, None) if count else no_rows
            if batch is None or batch.num_rows != count:
                num_read = 0 if batch is None else batch.num_rows
                raise Corruption(f"{where}: expected {count} rows next, found {num_read}")
            expected += len(buckets.buckets)
            num_rows += count
            yield buckets, batch
        if expected != files.high + 1 or num_rows != files.num_rows or next(batches, None):
            raise Corruption(
                f"{where}: expected {files.num_rows} rows of buckets {files.low}..{files.high},"
                f" found {num_rows} of {files.low}..{expected - 1}"
            )


def read_checked_rows(
    storage: Storage, files: RowFiles, schema: pa.Schema
) -> Iterator[tuple[BucketLines, pa.RecordBatch]]:
    """As `read_rows`; also raises Corruption for rows of other buckets."""
    for buckets, batch in read_rows(storage, files, schema):
        actual = buckets_of(to_numpy(batch["key"]))
        if not np.array_equal(actual, np.repeat(buckets.buckets, buckets.num_rows)):
            raise Corruption(
                f"{storage.name}/{files.rows.path}: expected keys in the order of their buckets"
            )
        yield buckets, batch


def read_places(storage: Storage, path: str) -> Iterator[Places]:
    """The places of the buckets that `read_rows` of the same piece yields, as many at a time.
    Raises Corruption: not such a file.
    """
    with _reader(storage, path, PLACES) as batches:
        for batch in batches:
            batch.validate(full=True)
            _, offsets, content = batch["places"].buffers()
            yield (
                np.frombuffer(offsets, np.int64)[: batch.num_rows + 1],
                np.frombuffer(content or b"", np.uint8),
            )


@contextmanager
def _reader(storage: Storage, path: str, schema: pa.Schema) -> Iterator[Iterator[pa.RecordBatch]]:
    """The batches of a file."""
    where = f"{storage.name}/{path}"
    try:
        with storage.open_arrow(path) as source, pa.ipc.open_file(source) as reader:
            if reader.schema != schema:
                raise SchemaMismatch(
                    f"{where}: expected columns {_shown(schema)}, found {_shown(reader.schema)}"
                )
            yield batches_of(source, reader, where)
    except FileNotFoundError as error:
        raise Corruption(f"checkpoint: expected file {where}, found none") from error
    except pa.ArrowInvalid as error:
        raise Corruption(f"{where}: expected an Arrow file, found {error}") from error


def _shown(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)


def _non_empty(batches: Iterator[pa.RecordBatch], where: str) -> Iterator[pa.RecordBatch]:
    for number, batch in enumerate(batches):
        batch.validate()
        if any(column.null_count for column in batch.columns):
            raise Corruption(f"{where}: expected no nulls, found some in batch {number}")
        if batch.num_rows:
            yield batch


def _bucket_lines(batch: pa.RecordBatch) -> BucketLines:
    batch.validate(full=True)  # wrong offsets would lead out of the batch's memory
    marks, pending, removed = (batch[name] for name in ("marks", "pending", "removed"))
    return BucketLines(
        buckets=to_numpy(batch["bucket"]),
        num_rows=to_numpy(batch["num_rows"]),
        mark_offsets=to_numpy(marks.offsets),
        streams=to_numpy(marks.values.field("stream")),
        sequences=to_numpy(marks.values.field("sequence")),
        pending_offsets=np.frombuffer(pending.buffers()[1], np.int64)[: batch.num_rows + 1],
        pending=np.frombuffer(pending.buffers()[2] or b"", np.uint8),
        removed_offsets=to_numpy(removed.offsets),
        removed=to_numpy(removed.values),
    )


_TAIL = struct.Struct("<i6s")  # length of the footer, "ARROW1"
_BLOCK = struct.Struct("<qi4xq")  # offset, bytes of the metadata, bytes of the body
_FOOTER_BATCHES, _MESSAGE_HEADER, _BATCH_COMPRESSION = 3, 2, 3  # fields by number


def batches_of(source: pa.NativeFile, reader: Any, where: str) -> Iterator[pa.RecordBatch]:
    """The batches of an open file, which need not be trusted. Raises Corruption before one with
    compressed buffers is read.

    A compressed buffer of a few bytes may claim gigabytes, which Arrow takes before anything can be
    checked. Our files have none. pyarrow does not show the field that tells: it is read from the
    metadata (format/File.fbs and Message.fbs of Arrow, as flatbuffers lay them out).
    """
    try:
        blocks = _blocks(source) if reader.num_record_batches else []
        for number in range(reader.num_record_batches):
            offset, num_bytes, _ = blocks[number]
            if _is_compressed(source.read_at(num_bytes, offset)):
                raise Corruption(
                    f"{where}: expected buffers as they are, found compressed ones in batch"
                    f" {number}"
                )
            yield reader.get_batch(number)
    except (struct.error, IndexError) as error:
        raise Corruption(f"{where}: expected an Arrow file, found {error}") from error


def _blocks(source: pa.NativeFile) -> list[tuple[int, int, int]]:
    """Where each batch is."""
    end = source.size() - _TAIL.size
    num_bytes, _ = _TAIL.unpack(source.read_at(_TAIL.size, end))
    footer = source.read_at(num_bytes, end - num_bytes)
    at = _pointed(footer, _field(footer, _pointed(footer, 0), _FOOTER_BATCHES))
    first, count = at + 4, _number("<I", footer, at)
    return list(_BLOCK.iter_unpack(footer[first : first + count * _BLOCK.size]))


def _is_compressed(metadata: bytes) -> bool:
    start = 8 if metadata[:4] == b"\xff\xff\xff\xff" else 4  # behind the length
    message = metadata[start:]
    batch = _pointed(message, _field(message, _pointed(message, 0), _MESSAGE_HEADER))
    return _field(message, batch, _BATCH_COMPRESSION) > 0


def _field(data: bytes, table: int, number: int) -> int:
    """Where a field of a table is; 0: the table lacks it."""
    fields = table - _number("<i", data, table)
    at = 4 + 2 * number
    if at >= _number("<H", data, fields):
        return 0
    offset = _number("<H", data, fields + at)
    return table + offset if offset else 0


def _pointed(data: bytes, at: int) -> int:
    return at + _number("<I", data, at)


def _number(form: str, data: bytes, at: int) -> int:
    if at < 0:  # it would count from the end
        raise IndexError(f"a position of {at}")
    return int(struct.unpack_from(form, data, at)[0])
