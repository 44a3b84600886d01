"""Reads a stream's range of text files and cuts it into batches.

A position is a file's number and the offset of a line in its text.
"""

import functools
import logging
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from trireme.data.batch import Batch
from trireme.data.byte_streams import ByteStream, StreamsAhead, open_bytes, read_full
from trireme.data.pipe import Pipe
from trireme.data.schema import Schema
from trireme.data.sources import DataFile, FileRange, file_starts
from trireme.data.text_parser import HEAD_BYTES, TextParser
from trireme.errors import BadRequest, DataError

_BUFFER_BYTES = 1 << 20  # stays in the processor's cache between reading and parsing
_NEWLINE = 10

log = logging.getLogger(__name__)


class TextReader:
    """The batches of one range of the files, from `start` on.

    Args:
        pipe: gives the text of a file, from its beginning, instead of the file itself; closed by
            batches().
        files_ahead: files read at once, each by a thread of its own. Local files that are plain
            text are read directly: the system reads them ahead.

    Invariant: the next line to parse begins at `_offset` of the text of file number `_file`, and
    the buffer holds the text from there on.
    Threads: batches() one at a time; other properties and stop() from any.
    """

    def __init__(
        self,
        files: Sequence[DataFile],
        schema: Schema,
        parser: TextParser,
        file_range: FileRange,
        *,
        pipe: Pipe | None = None,
        files_ahead: int = 1,
        start: tuple[int, ...] = (),
    ) -> None:
        self.seconds = {"read": 0.0, "parse": 0.0}
        self._files = files
        self._schema = schema
        self._parser = parser
        self._range = file_range
        self._starts = file_starts(files)
        if start:
            self._file, self._offset = self._checked_position(start)
        else:
            self._file = file_range.first
            self._offset = file_range.begin - self._starts[self._file]
            if self._offset:
                self._offset = _line_start(files[self._file], self._offset)
        # Nothing may be left of the first file; of one that cannot be cut this is not known.
        self._first_file = self._file + (file_range.can_seek and self._offset >= self._limit)
        self._pipe = pipe
        self._is_direct = file_range.can_seek and all(file.is_local for file in files)
        numbers = range(self._first_file, file_range.last + 1)
        first_offset = self._offset if self._first_file == self._file else 0
        self._streams = StreamsAhead(
            (
                functools.partial(self._open, files[n], first_offset if n == numbers[0] else 0)
                for n in numbers
            ),
            ahead=files_ahead,
        )
        self._stream: ByteStream | None = None
        # Always room for more than a line, so that the parser makes progress.
        num_bytes = max(_BUFFER_BYTES, parser.core.max_line_bytes + HEAD_BYTES)
        self._buffer: NDArray[np.uint8] = np.empty(num_bytes, np.uint8)
        self._num_lines = 0  # before _offset; counted only where the text cannot be read again
        self._first_broken = ""
        self._is_finished = False

    @property
    def num_bytes(self) -> int:
        """Stored bytes of this range, to within a line."""
        return self._range.num_bytes

    @property
    def position(self) -> tuple[int, int]:
        """File number and offset of the next line to parse."""
        return self._file, self._offset

    @property
    def num_bytes_read(self) -> int:
        """Stored bytes of this range before the position; where files cannot be cut, those that
        have been read.
        """
        if self._is_finished:
            return self.num_bytes
        in_file = self._offset
        if not self._range.can_seek:
            in_file = 0 if self._stream is None else self._stream.num_bytes_in
        in_file = min(in_file, self._files[self._file].num_bytes)
        return min(max(self._starts[self._file] + in_file - self._range.begin, 0), self.num_bytes)

    @property
    def num_broken_lines(self) -> int:
        return int(self._parser.core.num_broken_lines)

    def stop(self) -> None:
        """Make batches() end or raise soon."""
        self._streams.stop()

    def batches(self, *, drop_last: bool) -> Iterator[tuple[Batch, int]]:
        """Full batches, then a short one of the rest unless `drop_last`, each with `num_bytes_read`
        after it. Raises DataError: a broken line (unless skipped), or a file that cannot be read.
        """
        with ExitStack() as stack:
            if self._pipe is not None:
                stack.enter_context(self._pipe)
            stack.enter_context(closing(self._streams))
            for number in range(self._first_file, self._range.last + 1):
                if number > self._file:
                    self._file, self._offset, self._num_lines = number, 0, 0
                yield from self._batches_of_file(self._files[number])
            self._is_finished = True
            if self._parser.core.num_examples and not drop_last:
                yield self._take()
        if self.num_broken_lines:
            log.warning(
                "stream %d: skipped broken lines: %d; the first: %s",
                self._range.index,
                self.num_broken_lines,
                self._first_broken,
            )

    @property
    def _limit(self) -> int:
        """Lines of the current file that begin at this offset or later are not in the range."""
        if not self._range.can_seek:
            return sys.maxsize
        return min(self._files[self._file].num_bytes, self._range.end - self._starts[self._file])

    def _batches_of_file(self, file: DataFile) -> Iterator[tuple[Batch, int]]:
        limit = self._limit
        with self._opened(file) as (stream, filled):
            is_end = False
            while self._offset < limit and not is_end:
                filled += self._read(stream, self._buffer[filled:])
                is_end = filled < len(self._buffer)
                if self._range.can_seek:
                    is_end = self._offset + filled == file.num_bytes
                done = yield from self._batches_of_buffer(file, filled, limit, is_end)
                if self._offset > limit and self._buffer[done - 1] != _NEWLINE:
                    self._offset = _line_start(file, self._offset)  # after a line that is too long
                filled -= done
                self._buffer[:filled] = self._buffer[done : done + filled]
            file.check_unchanged()

    def _batches_of_buffer(
        self, file: DataFile, size: int, limit: int, is_end: bool
    ) -> Generator[tuple[Batch, int], None, int]:
        """Parse the lines in the buffer; returns how many of its bytes have been parsed."""
        begin = 0
        while self._offset < limit:
            text = self._buffer[begin:size]
            started = perf_counter()
            done = self._parser.parse(text, limit - self._offset, is_end)
            self.seconds["parse"] += perf_counter() - started
            self._note_broken_line(file, text)
            begin += done
            self._advance(text[:done])
            if not self._parser.core.is_full:
                break
            yield self._take()
        return begin

    def _take(self) -> tuple[Batch, int]:
        batch = self._parser.take()
        batch.stream, batch.position = self._range.index, self.position
        return batch, self.num_bytes_read

    def _read(self, stream: ByteStream, buffer: NDArray[np.uint8]) -> int:
        started = perf_counter()
        num_bytes = read_full(stream, buffer)
        self.seconds["read"] += perf_counter() - started
        return num_bytes

    def _advance(self, text: NDArray[np.uint8]) -> None:
        self._offset += len(text)
        if not self._range.can_seek:
            self._num_lines += int(np.count_nonzero(text == _NEWLINE))

    def _note_broken_line(self, file: DataFile, text: NDArray[np.uint8]) -> None:
        broken = self._parser.broken_line
        if broken is None or self._first_broken:
            return
        begin, what = broken
        self._first_broken = f"{self._location(file, text[:begin])}: {what}"
        if not self._parser.skips_broken:
            raise DataError(f"{self._first_broken}\n{self._schema}")

    def _location(self, file: DataFile, text: NDArray[np.uint8]) -> str:
        """File and number, from 1, of the line behind `text`, which begins at _offset."""
        if self._range.can_seek:
            blocks = _blocks(file, 0, self._offset + len(text))
            number = sum(block.count(b"\n") for block in blocks) + 1
        else:
            number = self._num_lines + int(np.count_nonzero(text == _NEWLINE)) + 1
        line = f"{file.path} line {number}"
        return f"{line} of what {self._pipe.command!r} makes of it" if self._pipe else line

    @contextmanager
    def _opened(self, file: DataFile) -> Iterator[tuple[ByteStream, int]]:
        """The text of a file, whose head the parser has seen, and how many of its bytes from
        _offset on are in the buffer.
        """
        if not self._is_direct:
            self._stream = self._streams.next()
            yield self._stream, self._start_file(file, self._stream)
            return
        with closing(self._open(file, self._offset)) as stream:
            yield stream, self._start_file(file, stream)

    def _open(self, file: DataFile, offset: int) -> ByteStream:
        if self._pipe is not None:
            return self._pipe.open(file)
        return open_bytes(file, offset if self._range.can_seek else 0)

    def _start_file(self, file: DataFile, stream: ByteStream) -> int:
        """Give the parser the head of the file and skip to _offset, or behind the header; returns
        how many bytes from there on are in the buffer.
        """
        if self._range.can_seek and self._offset:
            begin, filled = self._offset, 0
            head = _head(file)
        else:
            begin, filled = 0, self._read(stream, self._buffer[:HEAD_BYTES])
            head = self._buffer[:filled]
        try:
            header_bytes = self._parser.start_file(head)
        except DataError as error:
            raise DataError(f"{file.path}: {error}\n{self._schema}") from error
        wanted = max(self._offset, header_bytes)
        self._offset = begin
        return self._skip_to(file, stream, filled, wanted)

    def _skip_to(self, file: DataFile, stream: ByteStream, filled: int, wanted: int) -> int:
        """Skip to offset `wanted`; returns how much of the buffer is left."""
        while True:
            skipped = self._buffer[: min(wanted - self._offset, filled)]
            self._advance(skipped)
            if self._offset == wanted:
                break
            filled = self._read(stream, self._buffer)
            if filled == 0:
                raise _not_at_line(file, wanted, f"{self._offset} bytes of text")
        is_at_line = len(skipped) == 0 or skipped[-1] == _NEWLINE
        filled -= len(skipped)
        self._buffer[:filled] = self._buffer[len(skipped) : len(skipped) + filled]
        if not is_at_line and (filled or self._read(stream, self._buffer[:1])):
            raise _not_at_line(file, wanted, "it lies within a line")
        return filled

    def _checked_position(self, start: tuple[int, ...]) -> tuple[int, int]:
        first, last = self._range.first, self._range.last
        if len(start) != 2 or not first <= start[0] <= last:
            raise BadRequest(
                f"QueueDataset.stream: expected a position (file number {first} to {last}, byte "
                f"offset) of stream {self._range.index}, found {start}"
            )
        number, offset = start
        file = self._files[number]
        is_inside = offset >= 0 and (not self._range.can_seek or offset <= file.num_bytes)
        if not is_inside or (self._range.can_seek and _line_start(file, offset) != offset):
            raise _not_at_line(file, offset, f"{file.num_bytes} bytes")
        return number, offset


def _not_at_line(file: DataFile, offset: int, size: str) -> BadRequest:
    return BadRequest(
        f"QueueDataset.stream: expected a position at the start of a line of {file.path} ({size}), "
        f"found offset {offset}; are these the files it was taken from?"
    )


def _head(file: DataFile) -> NDArray[np.uint8]:
    buffer: NDArray[np.uint8] = np.empty(min(HEAD_BYTES, file.num_bytes), np.uint8)
    with closing(open_bytes(file)) as stream:
        return buffer[: read_full(stream, buffer)]


def _blocks(file: DataFile, begin: int, end: int) -> Iterator[bytes]:
    """The bytes [begin, end) of a file, in blocks."""
    with closing(open_bytes(file, begin)) as stream:
        while begin < end:
            buffer: NDArray[np.uint8] = np.empty(min(end - begin, _BUFFER_BYTES), np.uint8)
            begin += read_full(stream, buffer)
            yield buffer.tobytes()


def _line_start(file: DataFile, offset: int) -> int:
    """The first start of a line at or after `offset`; the end of the file if there is none."""
    if offset == 0:
        return 0
    begin = offset - 1
    for block in _blocks(file, begin, file.num_bytes):
        newline = block.find(b"\n")
        if newline >= 0:
            return begin + newline + 1
        begin += len(block)
    return file.num_bytes
