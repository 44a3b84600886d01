"""The bytes of files, local or remote (fsspec), decompressed and read ahead."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from io import FileIO
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from trireme.bounded_queue import ReadAhead
from trireme.data.sources import DataFile, FileChanged, filesystem, reason
from trireme.errors import DataError, Internal

BLOCK_BYTES = 1 << 18  # read ahead at a time
_BYTES_AHEAD = 128 << 20  # of all files together: a file of some ten MiB fits whole
_REMOTE_BLOCK_BYTES = 8 << 20  # of one request to a server


class ByteStream(Protocol):
    """Bytes in order, once.

    num_bytes_in: bytes of the stored file read so far, for progress alone; at most its size.

    Threads: readinto and close from one thread at a time; stop from any.
    """

    @property
    def num_bytes_in(self) -> int: ...

    def readinto(self, buffer: NDArray[np.uint8]) -> int:
        """Write up to len(buffer) >= 1 of the next bytes; returns how many, 0 only at the end.
        Raises DataError: the file cannot be read, or has changed; names it.
        """

    def stop(self) -> None:
        """Make a readinto() that waits in another thread return or raise soon."""

    def close(self) -> None:
        """Release everything. Twice does nothing."""


def open_bytes(file: DataFile, offset: int = 0) -> ByteStream:
    """The bytes of a file from `offset` on; of a compressed file its text, from the beginning.
    Raises DataError: it cannot be read, or has changed; names it.
    """
    if file.codec is None:
        return _PlainStream(file, offset)
    if offset:
        raise Internal(f"open_bytes: expected offset 0 in a compressed file, found {offset}")
    return _DecodedStream(file, file.codec)


def open_stored(file: DataFile) -> pa.NativeFile:
    """The stored bytes of a file, for Arrow, which reads local files without the GIL. Raises
    DataError: it cannot be read, or has changed; names it.
    """
    remote = None if file.is_local else open_raw(file)
    try:
        stored = pa.PythonFile(remote, "r") if remote is not None else pa.OSFile(file.path)
        size = stored.size()
    except Exception as error:
        raise cannot_read(file, error) from error
    file.check_unchanged(stored)
    if size != file.num_bytes:
        stored.close()
        raise FileChanged(
            f"expected {file.num_bytes} bytes in {file.path}, found {size}: it has changed"
        )
    return stored


def read_full(stream: ByteStream, buffer: NDArray[np.uint8]) -> int:
    """Read until the buffer is full or the stream ends; returns how many bytes."""
    filled = 0
    while filled < len(buffer):
        num_bytes = stream.readinto(buffer[filled:])
        if num_bytes == 0:
            break
        filled += num_bytes
    return filled


class _PlainStream:
    """As many bytes as the file had when the dataset was made."""

    def __init__(self, file: DataFile, offset: int) -> None:
        self.num_bytes_in = offset
        self._file, self._raw = file, open_raw(file)
        self._raw.seek(offset)

    def readinto(self, buffer: NDArray[np.uint8]) -> int:
        wanted = min(len(buffer), self._file.num_bytes - self.num_bytes_in)
        if wanted == 0:
            return 0
        try:
            num_bytes = int(self._raw.readinto(buffer[:wanted].data))
        except Exception as error:
            raise cannot_read(self._file, error) from error
        if num_bytes == 0:
            raise FileChanged(
                f"expected {self._file.num_bytes} bytes in {self._file.path}, "
                f"found {self.num_bytes_in}: it has become shorter"
            )
        self.num_bytes_in += num_bytes
        return num_bytes

    def stop(self) -> None:
        """Do nothing: files do not wait, and a server has its own time limits."""

    def close(self) -> None:
        self._raw.close()


class _DecodedStream:
    """The text of a compressed file, which may be a concatenation of compressed parts."""

    def __init__(self, file: DataFile, codec: str) -> None:
        self.num_bytes_in = 0
        self._file = file
        self._num_bytes_out = 0
        self._raw = open_stored(file)
        self._decoded = pa.CompressedInputStream(self._raw, codec)  # works without the GIL

    def readinto(self, buffer: NDArray[np.uint8]) -> int:
        try:
            num_bytes = int(self._decoded.readinto(buffer))
            self.num_bytes_in = self._raw.tell()
        except Exception as error:
            raise DataError(
                f"cannot decompress {self._file.path} behind "
                f"{self._num_bytes_out} bytes of text: {reason(error)}"
            ) from error
        self._num_bytes_out += num_bytes
        if self._num_bytes_out == 0:
            raise DataError(f"expected data, found none in {self._file.path}")
        return num_bytes

    def stop(self) -> None:
        """See _PlainStream.stop."""

    def close(self) -> None:
        self._decoded.close()
        self._raw.close()


class AheadStream:
    """A stream that a thread of its own opens and reads, a bounded number of bytes ahead."""

    def __init__(
        self, opener: Callable[[], ByteStream], *, bytes_ahead: int = _BYTES_AHEAD
    ) -> None:
        self.num_bytes_in = 0
        self._source = _BlockSource(opener)
        self._ahead = ReadAhead(
            self._source.blocks(),
            depth=max(bytes_ahead // BLOCK_BYTES, 2),
            name="trireme-bytes",
            stop=self._source.stop,
        )
        self._block: NDArray[np.uint8] = np.empty(0, np.uint8)

    def readinto(self, buffer: NDArray[np.uint8]) -> int:
        if len(self._block) == 0:
            try:
                self._block, self.num_bytes_in = next(self._ahead)
            except StopIteration:
                self.num_bytes_in = self._source.num_bytes_in_all()
                return 0
        num_bytes = min(len(buffer), len(self._block))
        buffer[:num_bytes] = self._block[:num_bytes]
        self._block = self._block[num_bytes:]
        return num_bytes

    def stop(self) -> None:
        self._source.stop()

    def close(self) -> None:
        self._ahead.close()


class StreamsAhead:
    """Streams one after the other, `ahead` of them open at once, each with a thread of its own.

    They share a bound on the bytes read ahead. So `ahead` files are decompressed, or go through a
    command, at the same time if the part of the bound for one of them holds most of a file.

    Threads: next and close from one thread at a time; stop from any.
    """

    def __init__(self, openers: Iterable[Callable[[], ByteStream]], *, ahead: int) -> None:
        self._openers = iter(openers)
        self._ahead = ahead
        self._lock = threading.RLock()  # stop() may run while next() does: in a finalizer
        self._streams: deque[AheadStream] = deque()  # guarded by _lock, as is the next
        self._is_stopped = False

    def next(self) -> AheadStream:
        """The next stream; the one before is closed."""
        if self._streams:
            self._streams[0].close()
        with self._lock:
            if self._streams:
                self._streams.popleft()
            while len(self._streams) < self._ahead and not self._is_stopped:
                opener = next(self._openers, None)
                if opener is None:
                    break
                self._streams.append(AheadStream(opener, bytes_ahead=_BYTES_AHEAD // self._ahead))
            if not self._streams or self._is_stopped:
                raise Internal("StreamsAhead.next: expected another stream, found the end")
            return self._streams[0]

    def stop(self) -> None:
        """Make reads that wait end."""
        with self._lock:
            self._is_stopped = True
            for stream in self._streams:
                stream.stop()

    def close(self) -> None:
        self.stop()
        for stream in self._streams:
            stream.close()


class _BlockSource:
    """The iterator that the thread of an AheadStream runs, and how to stop it."""

    def __init__(self, opener: Callable[[], ByteStream]) -> None:
        self._opener = opener
        self._stream: ByteStream | None = None
        self._num_bytes_in_all: int | None = None  # known at the end of the stream
        self._is_stopped = False

    def blocks(self) -> Iterator[tuple[NDArray[np.uint8], int]]:
        """Blocks of bytes, each with `num_bytes_in` after it."""
        self._stream = stream = self._opener()
        try:
            while not self._is_stopped:
                block: NDArray[np.uint8] = np.empty(BLOCK_BYTES, np.uint8)
                num_bytes = stream.readinto(block)
                if num_bytes == 0:
                    self._num_bytes_in_all = stream.num_bytes_in
                    break
                yield block[:num_bytes], stream.num_bytes_in
        finally:
            stream.close()

    def num_bytes_in_all(self) -> int:
        """`num_bytes_in` of the whole stream. Raises Internal if it was stopped before its end."""
        if self._num_bytes_in_all is None:
            raise Internal("AheadStream.readinto: expected an open stream, found it stopped")
        return self._num_bytes_in_all

    def stop(self) -> None:
        self._is_stopped = True
        if self._stream is not None:
            self._stream.stop()


def open_raw(file: DataFile) -> Any:
    """The stored bytes of a file as a file object. Raises DataError: it cannot be read, or has
    changed; names it.
    """
    try:
        if file.storage_options is None:
            raw: Any = FileIO(file.path)
        else:
            files, path = filesystem(file.path, file.storage_options)
            files.invalidate_cache()  # which may know it from when the dataset was made
            file.check_tag(files.info(path))
            raw = files.open(path, "rb", block_size=_REMOTE_BLOCK_BYTES)
    except Exception as error:
        raise cannot_read(file, error) from error
    file.check_unchanged(raw)
    return raw


def cannot_read(file: DataFile, error: Exception) -> DataError:
    return DataError(f"cannot read {file.path}: {reason(error)}")
