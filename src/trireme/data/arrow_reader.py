"""Parquet files and Arrow IPC (Feather) files, read piece by piece.

A stream's share of a file is a range of rows, in proportion to its share of the bytes: streams need
to open no files but their own. A position is a file's number and a row in it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import accumulate, pairwise
from time import perf_counter
from typing import Protocol, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet

from trireme.data.arrow_columns import Rows, convert, to_batch, why_not
from trireme.data.batch import Batch
from trireme.data.byte_streams import open_stored
from trireme.data.schema import Field, Schema
from trireme.data.shares import Share
from trireme.data.sources import File, file_starts, reason
from trireme.errors import BadRequest, DataError

T = TypeVar("T")

_ROWS = 8192  # decoded and converted at a time
_BUFFER_BYTES = 1 << 18  # of each column of a Parquet file

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ArrowTable:
    """Files of columns by name: Parquet (.parquet) and Arrow IPC (.arrow, .feather)."""

    def check(self, schema: Schema) -> None:
        """Any field can be a column."""

    def check_names(self, files: Iterable[File]) -> None:
        """Raises DataError: a file of another kind, by the end of its name."""
        for file in files:
            if not file.path.endswith((".parquet", ".arrow", ".feather")):
                raise DataError(
                    "QueueDataset: expected files .parquet, .arrow or .feather (they compress by "
                    f"themselves), found {file.path!r}"
                )


def arrow(fields: Iterable[Field]) -> Schema:
    """The schema of Parquet (.parquet) and Arrow IPC files (.arrow; .feather of version 2).

    A field is the column of its name; columns that no field names are not read. Dictionaries read
    as the values they stand for.

    Label, Weight, Show, Dense: numbers, of a dim above 1 lists of so many; null or a number that
    float32 cannot hold is an error. Sparse: integers are keys as they are (64 bits), strings are
    hashed (see trireme.data.strings), and integers too if `hashed`; lists are bags of any size;
    null and "" have no key. InsId, Content: strings or integers; null is "".
    """
    return Schema(fields, format=ArrowTable())


class ArrowReader:
    """The rows of one share of the files, from `start` on; a Reader of queue_dataset.

    Threads: batches() one at a time; the numbers may be read from any; stop() from any.
    """

    def __init__(
        self,
        files: Sequence[File],
        schema: Schema,
        share: Share,
        *,
        batch_size: int,
        threads: int,
        skip_broken: bool,
        start: tuple[int, ...] = (),
    ) -> None:
        self.seconds = {"read": 0.0, "parse": 0.0}
        self.num_broken_lines = 0
        self._files = files
        self._schema = schema
        self._share = share
        self._batch_size = batch_size
        self._threads = threads
        self._skips_broken = skip_broken
        self._starts = file_starts(files)
        self._start = self._checked(start) if start else None
        self._file, self._row = self._start or (share.first, 0)
        self._fraction = 0.0  # of the file at work
        self._parts: list[tuple[Rows, int, int]] = []  # of the batch at work
        self._first_broken = ""

    @property
    def num_bytes(self) -> int:
        """Stored bytes of this share, to within a row."""
        return self._share.num_bytes

    @property
    def num_bytes_read(self) -> int:
        """Those up to the latest batch, as if all rows of a file had the same size."""
        in_file = int(self._files[self._file].num_bytes * self._fraction)
        return min(max(self._starts[self._file] + in_file - self._share.begin, 0), self.num_bytes)

    @property
    def position(self) -> tuple[int, int]:
        """The next row to take."""
        return self._file, self._row

    def stop(self) -> None:
        """Files do not wait; a server has its own time limits."""

    def batches(self, *, drop_last: bool) -> Iterator[tuple[Batch, int]]:
        """Full batches, then what is left over as a short one unless `drop_last`, each with
        `num_bytes_read` behind it.

        Raises:
            DataError: a column or row that does not fit the schema, or a file that cannot be read.
        """
        first = self._start[0] if self._start else self._share.first
        for number in range(first, self._share.last + 1):
            yield from self._batches_of_file(number)
        if self._parts and not drop_last:
            yield self._take()
        if self.num_broken_lines:
            log.warning(
                "stream %d: skipped broken rows: %d; the first: %s",
                self._share.index,
                self.num_broken_lines,
                self._first_broken,
            )

    def _batches_of_file(self, number: int) -> Iterator[tuple[Batch, int]]:
        file = self._files[number]
        with closing(self._timed(lambda: _open_table(file, self._schema, self._threads))) as table:
            begin, end = self._rows_of_share(number, table.num_rows)
            self._file, self._row = number, begin
            batches = table.record_batches(begin, end)
            row = begin
            while (batch := self._timed(lambda: _next(batches, file))) is not None:
                rows = self._converted(file, batch, row)
                row += batch.num_rows
                self._fraction = row / table.num_rows
                yield from self._batches_of_rows(rows, row)

    def _batches_of_rows(self, rows: Rows, end: int) -> Iterator[tuple[Batch, int]]:
        """Full batches; what is left over waits for more. `end`: of the rows in the file."""
        begin = 0
        waiting = sum(to - since for _, since, to in self._parts)
        while begin + self._batch_size - waiting <= len(rows):
            until = begin + self._batch_size - waiting
            self._parts.append((rows, begin, until))
            self._row = int(rows.places[until - 1]) + 1
            yield self._take()
            begin, waiting = until, 0
        if begin < len(rows):
            self._parts.append((rows, begin, len(rows)))
        self._row = end

    def _take(self) -> tuple[Batch, int]:
        started = perf_counter()
        batch = to_batch(self._schema, self._parts)
        self.seconds["parse"] += perf_counter() - started
        self._parts = []
        batch.stream, batch.position = self._share.index, self.position
        return batch, self.num_bytes_read

    def _converted(self, file: File, batch: pa.RecordBatch, first_row: int) -> Rows:
        started = perf_counter()
        rows, broken_n, first = convert(self._schema, batch, first_row)
        if first is not None:
            if not self._first_broken:
                self._first_broken = f"{file.path} row {first_row + first.row + 1}: {first.what}"
            if not self._skips_broken:
                raise DataError(f"QueueDataset: {self._first_broken}\n{self._schema}")
            self.num_broken_lines += int(broken_n.sum())
            right = np.flatnonzero(~broken_n)
            rows, _, _ = convert(self._schema, batch.take(pa.array(right)), first_row)
            rows.places[:] = first_row + right
        self.seconds["parse"] += perf_counter() - started
        return rows

    def _timed(self, read: Callable[[], T]) -> T:
        started = perf_counter()
        result = read()
        self.seconds["read"] += perf_counter() - started
        return result

    def _rows_of_share(self, number: int, num_rows: int) -> tuple[int, int]:
        """The rows [begin, end) of a file that are of this share and not behind us."""
        size, start = self._files[number].num_bytes, self._starts[number]
        begin, end = (
            num_rows * min(max(at - start, 0), size) // size
            for at in (self._share.begin, self._share.end)
        )
        if self._start is None or self._start[0] != number:
            return begin, end
        if not begin <= self._start[1] <= end:
            raise BadRequest(
                f"QueueDataset.stream: expected a position at row {begin} to {end} of "
                f"{self._files[number].path}, found {self._start[1]}; are these the files it was "
                "taken from?"
            )
        return self._start[1], end

    def _checked(self, start: tuple[int, ...]) -> tuple[int, int]:
        first, last = self._share.first, self._share.last
        if len(start) != 2 or not first <= start[0] <= last:
            raise BadRequest(
                f"QueueDataset.stream: expected a position (file number {first} to {last}, row) of"
                f" stream {self._share.index}, found {start}"
            )
        return start[0], start[1]


class _Table(Protocol):
    """An open file; record_batches yields its rows [begin, end) in pieces of bounded size."""

    num_rows: int

    def record_batches(self, begin: int, end: int) -> Iterator[pa.RecordBatch]: ...

    def close(self) -> None: ...


class _Parquet:
    def __init__(self, stored: pa.NativeFile, schema: Schema, path: str, threads: int) -> None:
        self._stored = stored
        self._file = pa.parquet.ParquetFile(
            stored, buffer_size=_BUFFER_BYTES, page_checksum_verification=True
        )
        _check_columns(schema, self._file.schema_arrow, path)
        self._names = list(schema.names)
        self._uses_threads = threads > 1
        self.num_rows: int = self._file.metadata.num_rows

    def record_batches(self, begin: int, end: int) -> Iterator[pa.RecordBatch]:
        metadata = self._file.metadata
        sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        for group, first in enumerate(accumulate(sizes[:-1], initial=0)):
            since, until = max(begin - first, 0), min(end - first, sizes[group])
            if since < until:
                batches = self._file.iter_batches(
                    _ROWS, row_groups=[group], columns=self._names, use_threads=self._uses_threads
                )
                yield from _cut(batches, since, until)

    def close(self) -> None:
        self._file.close()
        self._stored.close()


class _Ipc:
    def __init__(self, stored: pa.NativeFile, schema: Schema, path: str) -> None:
        self._stored = stored
        whole = pa.ipc.open_file(stored)
        _check_columns(schema, whole.schema, path)
        columns = [whole.schema.get_field_index(name) for name in schema.names]
        self._file = pa.ipc.open_file(
            stored, options=pa.ipc.IpcReadOptions(included_fields=columns)
        )
        narrow = pa.ipc.open_file(
            stored, options=pa.ipc.IpcReadOptions(included_fields=columns[:1])
        )
        sizes = [narrow.get_batch(i).num_rows for i in range(narrow.num_record_batches)]
        self._bounds = list(accumulate(sizes, initial=0))
        self.num_rows: int = self._bounds[-1]

    def record_batches(self, begin: int, end: int) -> Iterator[pa.RecordBatch]:
        for number, (first, behind) in enumerate(pairwise(self._bounds)):
            since, until = max(begin - first, 0), min(end, behind) - first
            if since < until:
                batch = self._file.get_batch(number)
                pieces = (batch.slice(i, _ROWS) for i in range(0, batch.num_rows, _ROWS))
                yield from _cut(pieces, since, until)

    def close(self) -> None:
        self._stored.close()


def _cut(batches: Iterable[pa.RecordBatch], begin: int, end: int) -> Iterator[pa.RecordBatch]:
    """The rows [begin, end) of batches one behind the other."""
    first = 0
    for batch in batches:
        since, until = max(begin - first, 0), min(end - first, batch.num_rows)
        if since < until:
            yield batch.slice(since, until - since)
        first += batch.num_rows
        if first >= end:
            break


def _open_table(file: File, schema: Schema, threads: int) -> _Table:
    stored = open_stored(file)
    try:
        if file.path.endswith(".parquet"):
            return _Parquet(stored, schema, file.path, threads)
        return _Ipc(stored, schema, file.path)
    except BaseException as error:
        stored.close()
        if isinstance(error, (pa.ArrowException, OSError)):
            raise _cannot_read(file, error) from error
        raise


def _next(batches: Iterator[pa.RecordBatch], file: File) -> pa.RecordBatch | None:
    try:
        return next(batches, None)
    except (pa.ArrowException, OSError) as error:
        raise _cannot_read(file, error) from error


def _cannot_read(file: File, error: Exception) -> DataError:
    return DataError(f"QueueDataset: cannot read {file.path}: {reason(error)}")


def _check_columns(schema: Schema, found: pa.Schema, path: str) -> None:
    """Raises DataError that shows the schema and the columns of the file, if they do not fit."""
    wrong = []
    for field in schema.fields:
        kinds = [column.type for column in found if column.name == field.name]
        if len(kinds) != 1:
            wrong.append(f"{field.name!r}: expected one column, found {len(kinds)}")
        elif (expected := why_not(field, kinds[0])) is not None:
            wrong.append(f"{field.name!r}: expected {expected}, found {kinds[0]}")
    if wrong:
        columns = ", ".join(f"{column.name}: {column.type}" for column in found)
        raise DataError(
            f"QueueDataset: {path}: {'; '.join(wrong)}\n{schema}\nthe file has: {columns}"
        )
