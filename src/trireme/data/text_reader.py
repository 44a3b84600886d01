"""Reads a stream's share of text files and cuts it into batches.

All files laid end to end are cut into S shares of equal bytes; a line belongs to the share in which
its first byte lies. So the shares are balanced however many files there are, every line is in
exactly one of them, and a position is a file's number and a byte offset in it.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing

import numpy as np
from numpy.typing import NDArray

from trireme.data.batch import Batch
from trireme.data.byte_streams import open_bytes, read_full
from trireme.data.schema import Parser
from trireme.data.sources import File, file_starts
from trireme.errors import BadRequest, DataError

_BUFFER_BYTES = 1 << 20  # stays in the processor's cache between reading and parsing

log = logging.getLogger(__name__)


class TextReader:
    """The batches of stream `index` of `num_streams` over the files, from `start` on.

    Invariant: the next line to parse begins at `_offset` of file number `_file`.
    Threads: batches() one at a time; the numbers may be read from any.
    """

    def __init__(
        self,
        files: Sequence[File],
        parser: Parser,
        *,
        index: int,
        num_streams: int,
        start: tuple[int, ...] = (),
    ) -> None:
        self._files = files
        self._parser = parser
        self._index = index
        self._starts = file_starts(files)
        total = self._starts[-1]
        self._begin, self._end = (total * i // num_streams for i in (index, index + 1))
        if start:
            self._file, self._offset = self._checked(start)
        else:
            self._file = min(bisect_right(self._starts, self._begin), len(files)) - 1
            self._offset = _line_start(files[self._file], self._begin - self._starts[self._file])
        self._buffer: NDArray[np.uint8] = np.empty(_BUFFER_BYTES, np.uint8)
        self._first_broken = ""

    @property
    def num_bytes(self) -> int:
        """Bytes of this share, to within a line."""
        return self._end - self._begin

    @property
    def position(self) -> tuple[int, int]:
        """Where the next line to parse begins."""
        return self._file, self._offset

    @property
    def num_broken_lines(self) -> int:
        return self._parser.num_broken_lines

    def bytes_before(self, position: tuple[int, ...]) -> int:
        """Bytes of this share that lie before a position."""
        file, offset = position
        return min(max(self._starts[file] + offset - self._begin, 0), self.num_bytes)

    def batches(self, *, drop_last: bool) -> Iterator[Batch]:
        """Full batches, then what is left over as a short one unless `drop_last`.

        Raises:
            DataError: a broken line (unless skipped), or a file that cannot be read.
        """
        while True:
            yield from self._batches_of_file()
            if self._file + 1 == len(self._files) or self._starts[self._file + 1] >= self._end:
                break
            self._file, self._offset = self._file + 1, 0
        if self._parser.num_examples and not drop_last:
            yield self._take()
        if self.num_broken_lines:
            log.warning(
                "stream %d: skipped broken lines: %d; the first: %s",
                self._index,
                self.num_broken_lines,
                self._first_broken,
            )

    def _batches_of_file(self) -> Iterator[Batch]:
        file = self._files[self._file]
        limit = min(file.num_bytes, self._end - self._starts[self._file])
        if self._offset >= limit:
            return
        with closing(open_bytes(file, self._offset)) as stream:
            filled = 0  # the buffer holds this many bytes of the file from _offset on
            while self._offset < limit:
                size = min(file.num_bytes - self._offset, len(self._buffer))
                read_full(stream, self._buffer[filled:size])
                begin = yield from self._batches_of_buffer(file, size, limit)
                filled = size - begin
                self._buffer[:filled] = self._buffer[begin:size]

    def _batches_of_buffer(self, file: File, size: int, limit: int) -> Generator[Batch, None, int]:
        """Parse the lines in the buffer; returns where in it the rest begins."""
        begin = 0
        while self._offset < limit:
            text = self._buffer[begin:size]
            is_end = self._offset + len(text) == file.num_bytes
            done = self._parser.parse(text, limit - self._offset, is_end)
            self._look_at_broken_line(file)
            begin += done
            self._offset += done
            if not self._parser.is_full:
                break
            yield self._take()
        return begin

    def _take(self) -> Batch:
        batch = self._parser.take()
        batch.stream, batch.position = self._index, self.position
        return batch

    def _look_at_broken_line(self, file: File) -> None:
        broken = self._parser.broken_line
        if broken is None or self._first_broken:
            return
        offset, what = broken
        line = _count_newlines(file, self._offset + offset) + 1
        self._first_broken = f"{file.path} line {line}: {what}"
        if not self._parser.skips_broken:
            raise DataError(f"QueueDataset: {self._first_broken}")

    def _checked(self, start: tuple[int, ...]) -> tuple[int, int]:
        if len(start) != 2 or not 0 <= start[0] < len(self._files):
            raise BadRequest(
                f"QueueDataset.stream: expected a position (file number below {len(self._files)}, "
                f"byte offset), found {start}"
            )
        file, offset = start
        num_bytes = self._files[file].num_bytes
        if not 0 <= offset <= num_bytes or _line_start(self._files[file], offset) != offset:
            raise BadRequest(
                f"QueueDataset.stream: expected a position at the start of a line of "
                f"{self._files[file].path} ({num_bytes} bytes), found offset {offset}; "
                "are these the files it was taken from?"
            )
        return file, offset


def _pieces(file: File, begin: int, end: int) -> Iterator[bytes]:
    """The bytes [begin, end) of a file, piece by piece."""
    with closing(open_bytes(file, begin)) as stream:
        while begin < end:
            buffer: NDArray[np.uint8] = np.empty(min(end - begin, _BUFFER_BYTES), np.uint8)
            begin += read_full(stream, buffer)
            yield buffer.tobytes()


def _line_start(file: File, offset: int) -> int:
    """The first start of a line at `offset` or behind it; the end of the file if there is none."""
    if offset == 0:
        return 0
    begin = offset - 1
    for piece in _pieces(file, begin, file.num_bytes):
        newline = piece.find(b"\n")
        if newline >= 0:
            return begin + newline + 1
        begin += len(piece)
    return file.num_bytes


def _count_newlines(file: File, end: int) -> int:
    return sum(piece.count(b"\n") for piece in _pieces(file, 0, end))
