"""Reads a stream's range of Parquet and Arrow IPC (Feather) files and cuts it into batches.

Of a file a stream reads rows in proportion to its range of the bytes: so it opens no files but its
own. A position is a file's number and a row in it.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from time import perf_counter
from typing import ClassVar, TypeVar

import numpy as np
import pyarrow as pa

from trireme.data.arrow_columns import ConvertedRows, convert, join_rows
from trireme.data.arrow_files import next_batch, open_arrow
from trireme.data.batch import Batch
from trireme.data.schema import Field, Schema
from trireme.data.sources import DataFile, FileRange, file_starts
from trireme.errors import BadRequest, DataError

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ArrowTable:
    """Files of named columns: Parquet (.parquet) and Arrow IPC (.arrow, .feather)."""

    holds_types: ClassVar[bool] = True

    def check(self, schema: Schema) -> None:
        """Any field can be a column."""

    def check_names(self, files: Iterable[DataFile]) -> None:
        """Raises DataError: a file whose name ends otherwise."""
        for file in files:
            if not file.path.endswith((".parquet", ".arrow", ".feather")):
                raise DataError(
                    "expected files .parquet, .arrow or .feather (they compress by "
                    f"themselves), found {file.path!r}"
                )


def arrow(fields: Iterable[Field]) -> Schema:
    """The schema of Parquet (.parquet) and Arrow IPC files (.arrow; .feather of version 2).

    A field reads the column of its name; other columns are not read. Dictionaries are decoded.

    Label, Weight, Show, Dense: numbers, or lists of `dim` numbers if dim > 1; null or a number that
    float32 cannot hold is an error. Sparse: integers are keys as they are (64 bits), strings are
    hashed (see trireme.data.strings), and integers too if `hashed`; lists are bags of any size;
    null and "" have no key. InsId, Content: strings or integers; null is "".
    """
    return Schema(fields, format=ArrowTable())


class ArrowReader:
    """The rows of one range of the files, from `start` on.

    Threads: batches() one at a time; other properties and stop() from any.
    """

    def __init__(
        self,
        files: Sequence[DataFile],
        schema: Schema,
        file_range: FileRange,
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
        self._range = file_range
        self._batch_size = batch_size
        self._threads = threads
        self._skips_broken = skip_broken
        self._starts = file_starts(files)
        self._start = self._checked_position(start) if start else None
        self._file, self._row = self._start or (file_range.first, 0)
        self._fraction = 0.0  # of the current file
        self._parts: list[tuple[ConvertedRows, int, int]] = []  # of the next batch
        self._first_broken = ""

    @property
    def num_bytes(self) -> int:
        """Stored bytes of this range, to within a row."""
        return self._range.num_bytes

    @property
    def num_bytes_read(self) -> int:
        """Stored bytes up to the latest batch, if all rows of a file have the same size."""
        in_file = int(self._files[self._file].num_bytes * self._fraction)
        return min(max(self._starts[self._file] + in_file - self._range.begin, 0), self.num_bytes)

    @property
    def position(self) -> tuple[int, int]:
        """File number and number of the next row."""
        return self._file, self._row

    def stop(self) -> None:
        """Do nothing: files do not wait, and a server has its own time limits."""

    def batches(self, *, drop_last: bool) -> Iterator[tuple[Batch, int]]:
        """Full batches, then a short one of the rest unless `drop_last`, each with `num_bytes_read`
        after it. Raises DataError: a column or row that does not fit the schema, or a file that
        cannot be read.
        """
        first = self._start[0] if self._start else self._range.first
        for number in range(first, self._range.last + 1):
            yield from self._batches_of_file(number)
        if self._parts and not drop_last:
            yield self._take()
        if self.num_broken_lines:
            log.warning(
                "stream %d: skipped broken rows: %d; the first: %s",
                self._range.index,
                self.num_broken_lines,
                self._first_broken,
            )

    def _batches_of_file(self, number: int) -> Iterator[tuple[Batch, int]]:
        file = self._files[number]
        with closing(self._timed(lambda: open_arrow(file, self._schema, self._threads))) as table:
            begin, end = self._rows_of_range(number, table.num_rows)
            self._file, self._row = number, begin
            batches = table.record_batches(begin, end)
            row = begin
            while (batch := self._timed(lambda: next_batch(batches, file))) is not None:
                rows = self._converted(file, batch, row)
                row += batch.num_rows
                self._fraction = row / table.num_rows
                yield from self._batches_of_rows(rows, row)
            file.check_unchanged()

    def _batches_of_rows(self, rows: ConvertedRows, end: int) -> Iterator[tuple[Batch, int]]:
        """Full batches; the rest is kept for the next one. `end`: of the rows in the file."""
        begin = 0
        waiting = sum(to - since for _, since, to in self._parts)
        while begin + self._batch_size - waiting <= len(rows):
            until = begin + self._batch_size - waiting
            self._parts.append((rows, begin, until))
            self._row = int(rows.row_numbers[until - 1]) + 1
            yield self._take()
            begin, waiting = until, 0
        if begin < len(rows):
            self._parts.append((rows, begin, len(rows)))
        self._row = end

    def _take(self) -> tuple[Batch, int]:
        started = perf_counter()
        batch = join_rows(self._schema, self._parts)
        self.seconds["parse"] += perf_counter() - started
        self._parts = []
        batch.stream, batch.position = self._range.index, self.position
        return batch, self.num_bytes_read

    def _converted(self, file: DataFile, batch: pa.RecordBatch, first_row: int) -> ConvertedRows:
        started = perf_counter()
        rows, broken_n, first = convert(self._schema, batch, first_row)
        if first is not None:
            if not self._first_broken:
                self._first_broken = f"{file.path} row {first_row + first.row + 1}: {first.what}"
            if not self._skips_broken:
                raise DataError(f"{self._first_broken}\n{self._schema}")
            self.num_broken_lines += int(broken_n.sum())
            right = np.flatnonzero(~broken_n)
            rows, _, _ = convert(self._schema, batch.take(pa.array(right)), first_row)
            rows.row_numbers[:] = first_row + right
        self.seconds["parse"] += perf_counter() - started
        return rows

    def _timed(self, read: Callable[[], T]) -> T:
        started = perf_counter()
        result = read()
        self.seconds["read"] += perf_counter() - started
        return result

    def _rows_of_range(self, number: int, num_rows: int) -> tuple[int, int]:
        """The rows [begin, end) of a file that are in the range and have not been read."""
        size, start = self._files[number].num_bytes, self._starts[number]
        begin, end = (
            num_rows * min(max(at - start, 0), size) // size
            for at in (self._range.begin, self._range.end)
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

    def _checked_position(self, start: tuple[int, ...]) -> tuple[int, int]:
        first, last = self._range.first, self._range.last
        if len(start) != 2 or not first <= start[0] <= last:
            raise BadRequest(
                f"QueueDataset.stream: expected a position (file number {first} to {last}, row) of"
                f" stream {self._range.index}, found {start}"
            )
        return start[0], start[1]
