"""Files of the log: segments of records. docs/format/log.md specifies the bytes.

A record is a message of the wire: a header in msgpack, and arrays as they are. Checksums tell a
file that was cut off from one that was damaged.
"""

import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from trireme.errors import BadRequest, Corruption, reading
from trireme.rpc import Limits, frames
from trireme.rpc.frames import Array

FORMAT = 7
_MAGIC = b"TRIRELOG"
_HEAD = struct.Struct("<8sIIQ16sQ")  # magic, format, flags, number, state, checksum
_RECORD = struct.Struct("<QQQQ")  # bytes behind, their checksum, kept, checksum of these
_KEPT_ALWAYS = 1  # flag: what was acknowledged is on the disk, not only with the kernel
_PADDING = bytes(8)
_BUFFERS_MAX = 1024  # of one call, IOV_MAX of Linux
_PARTS_MAX = 1 << 20
_SCANNED = 1 << 20  # words at a time
_REWRITTEN = 1 << 24  # bytes at a time
_NO_LIMITS = Limits(
    message_bytes_max=1 << 60, header_bytes_max=1 << 40, arrays_max=1 << 30, total_bytes_max=1 << 60
)

Record = tuple[str, dict[str, Any], Sequence[Array]]
"""Method, body, arrays."""


def file_name(number: int) -> str:
    return f"log-{number:08d}"


def _hash(data: Any, seed: int = 0) -> int:
    return xxhash.xxh3_64_intdigest(data, seed)


class DiskUnknown(Exception):
    """It is unknown what is on the disk, and why: what a failure leaves could not be removed."""


@contextmanager
def known(action: str) -> Iterator[None]:
    """Raises DiskUnknown for an OSError of what must not fail."""
    try:
        yield
    except OSError as error:
        raise DiskUnknown(f"cannot {action}: {error.strerror}") from error


class Segment:
    """A segment being written. Threads: one at a time, except in `pack`."""

    def __init__(self, folder: Path, number: int, state: bytes, *, is_synced: bool) -> None:
        """Create the file. Raises OSError. state: 16 bytes that all segments of a folder share."""
        self.number = number
        self.path = folder / file_name(number)
        self._fd = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        self.end = 0
        flags = _KEPT_ALWAYS if is_synced else 0
        head = _HEAD.pack(_MAGIC, FORMAT, flags, number, state, 0)[:-8]
        try:
            self._write([head + struct.pack("<Q", _hash(head))])
            if is_synced:  # so that a power loss never takes the head of records that it leaves
                self.sync()
        except BaseException:
            self.abandon()
            raise

    @staticmethod
    def pack(record: Record) -> tuple[int, int, list[Any]]:
        """The body of a record: number of bytes, checksum, and buffers."""
        method, body, arrays = record
        parts = frames.pack({"t": frames.CALL, "m": method, "b": body}, arrays)
        lengths = [len(part) for part in parts]
        buffers: list[Any] = [struct.pack(f"<{1 + len(parts)}Q", len(parts), *lengths)]
        for part, length in zip(parts, lengths, strict=True):
            if length:
                buffers.append(part)
            if length % 8:
                buffers.append(_PADDING[length % 8 :])
        checksum = xxhash.xxh3_64()
        for buffer in buffers:
            checksum.update(buffer)
        return sum(len(buffer) for buffer in buffers), checksum.intdigest(), buffers

    def append(self, packed: tuple[int, int, list[Any]], kept: int) -> None:
        """Write a whole record, or leave the file as it was; its first `kept` bytes are known to be
        on the disk. Raises OSError.
        """
        num_bytes, checksum, buffers = packed
        head = struct.pack("<QQQ", num_bytes, checksum, kept)
        self._write([head + struct.pack("<Q", _hash(head, self.end)), *buffers])

    def note_kept(self, kept: int) -> None:
        """Write that the first `kept` bytes are on the disk: a record without a body. If it is
        there, what it names is too; if it is not, nothing is lost. Raises OSError.
        """
        self.append((0, _hash(b""), []), kept)

    def _write(self, buffers: list[Any]) -> None:
        at = self.end
        try:
            for first in range(0, len(buffers), _BUFFERS_MAX):
                at = self._write_some(buffers[first : first + _BUFFERS_MAX], at)
        except OSError:
            with known(f"cut off a part of a record in {self.path}"):
                os.ftruncate(self._fd, self.end)
            raise
        self.end = at

    def _write_some(self, buffers: list[Any], at: int) -> int:
        end = at + sum(len(buffer) for buffer in buffers)
        at += os.pwritev(self._fd, buffers, at)
        while at < end:  # a partial write: perhaps the disk is nearly full
            rest = b"".join(buffers)[at - end :]
            at += os.pwrite(self._fd, rest, at)
        return end

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def close(self) -> None:
        os.close(self._fd)

    def abandon(self) -> None:
        """Delete the file."""
        with known(f"remove {self.path}"):
            self.path.unlink()
        self.close()


@dataclass(frozen=True)
class SegmentHead:
    number: int
    state: bytes
    is_synced: bool


class SegmentReader:
    """Reads a segment from its beginning.

    head: None if the file ends within its head, or is all zeros: a machine went down when it was
    new. end: of the last whole record read so far. kept: bytes that this record says were synced.
    """

    def __init__(self, path: Path) -> None:
        """Raises Corruption: not a segment, or one of another format or name."""
        self.path = path
        self.end = self.kept = 0
        with reading(path), path.open("rb") as file:
            self.size, buffer = os.fstat(file.fileno()).st_size, bytearray(_REWRITTEN)
            while file.readinto(buffer):
                pass  # what cannot be read is an error here; in the map it ends the process
            self._map = memoryview(
                mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) if self.size else b""
            )
        self.head = self._read_head()

    def _read_head(self) -> SegmentHead | None:
        if self.size < _HEAD.size or not any(self._map[: self.size]):
            return None
        magic, version, flags, number, state, checksum = _HEAD.unpack_from(self._map)
        if magic != _MAGIC:
            raise Corruption(f"{self.path}: expected a segment of a log, found {magic!r}")
        if version != FORMAT:
            raise Corruption(
                f"{self.path}: expected format {FORMAT}, found {version}: written by another"
                " version of Trireme"
            )
        if checksum != _hash(self._map[: _HEAD.size - 8]) or self.path.name != file_name(number):
            raise Corruption(f"{self.path}: its first {_HEAD.size} bytes are damaged")
        self.end = _HEAD.size
        return SegmentHead(number, state, bool(flags & _KEPT_ALWAYS))

    def records(self) -> Iterator[tuple[int, Record]]:
        """Offset and content of each whole record. Bytes after the last one were never acknowledged
        and may be cut off. Raises Corruption: damaged bytes before that; names file and offset.
        """
        while self.head is not None and self.size - self.end >= _RECORD.size:
            at = self.end
            num_bytes, checksum, kept = self._head_at(at) or (-1, 0, 0)
            if num_bytes > self.size - at - _RECORD.size:
                break
            body = self._map[at + _RECORD.size : at + _RECORD.size + max(num_bytes, 0)]
            if num_bytes < 0 or checksum != _hash(body):
                self._check_is_tail()
                break
            record = self._record(body, at) if num_bytes else None
            self.end, self.kept = at + _RECORD.size + num_bytes, kept
            if record is not None:
                yield at, record

    def make_durable(self, *, is_trusted: bool) -> None:
        """Cut off what is after `end`, and sync. `is_trusted`: its records, which may not have
        been synced, will be relied on. Raises OSError.

        After a sync that failed, Linux takes pages for clean that are not on the disk. So what is
        not known to be there is written again.
        """
        with self.path.open("r+b", buffering=0) as file:
            os.ftruncate(file.fileno(), self.end)
            at = self.kept if is_trusted else self.end
            while at < self.end:
                piece = os.pread(file.fileno(), min(_REWRITTEN, self.end - at), at)
                at += os.pwrite(file.fileno(), piece, at)
            os.fsync(file.fileno())

    def _head_at(self, at: int) -> tuple[int, int, int] | None:
        """Number of bytes, checksum, and kept bytes; None: no record begins there."""
        num_bytes, checksum, kept, head_checksum = _RECORD.unpack_from(self._map, at)
        is_record = head_checksum == _hash(self._map[at : at + 24], at)
        return (num_bytes, checksum, kept) if is_record else None

    def _check_is_tail(self) -> None:
        """Raise Corruption unless the bytes after `end` may be the end of the log. A killed process
        leaves whole records and at most one that is cut off. A machine that went down may leave
        anything after the bytes that it had synced; later records note how many these were, and
        one without a body follows every sync.
        """
        if self.head is None or not self.head.is_synced or self._kept() > self.end:
            raise Corruption(
                f"{self.path}: the record at offset {self.end} is damaged: expected its checksum to"
                " match, found other bytes; continue from a checkpoint with an empty state folder"
            )

    def _kept(self) -> int:
        """The largest number of kept bytes that a record after `end` notes."""
        kept = 0
        for low in range(self.end // 8, self.size // 8, _SCANNED):
            high = min(low + _SCANNED + 2, self.size // 8)
            words = np.frombuffer(self._map[8 * low : 8 * high], "<u8")
            offsets = 8 * (low + np.arange(max(len(words) - 2, 0), dtype=np.uint64))
            may_be = (words[:-2] < self.size) & (words[2:] <= offsets)
            for at in offsets[may_be].tolist():
                if self.size - at >= _RECORD.size and (head := self._head_at(at)) is not None:
                    kept = max(kept, head[2])
        return kept

    def _record(self, body: memoryview, at: int) -> Record:
        try:
            (num_parts,) = struct.unpack_from("<Q", body)
            if not 1 <= num_parts <= _PARTS_MAX:
                raise BadRequest(f"expected parts, found {num_parts}")
            lengths = struct.unpack_from(f"<{num_parts}Q", body, 8)
            parts, start = [], 8 + 8 * num_parts
            for length in lengths:
                parts.append(body[start : start + length])
                start += (length + 7) // 8 * 8
            header, arrays = frames.unpack(parts, _NO_LIMITS)
            return str(header["m"]), frames.map_field(header, "b"), arrays
        except (BadRequest, KeyError, struct.error) as error:
            raise Corruption(f"{self.path}: the record at offset {at}: {error}") from error
