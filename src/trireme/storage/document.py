"""A small file that is replaced whole: a reader finds the old content or the new one."""

import struct
from pathlib import Path
from typing import Any

import msgpack
import xxhash

from trireme.errors import Corruption, writing
from trireme.storage.atomic_file import replace_file

_HEAD = struct.Struct("<8sIIQ")  # magic, format, zero, checksum of what follows
_MAGIC = b"TRIREDOC"
_FORMAT = 1


class Document:
    """A value of msgpack in a file. is_synced: it survives a crash of the machine. Threads: one at
    a time.
    """

    def __init__(self, path: Path, *, is_synced: bool) -> None:
        self.path, self._is_synced = path, is_synced

    def write(self, value: Any) -> None:
        """Raises ResourceExhausted: the disk is full; the old content stays."""
        data = msgpack.packb(value)
        head = _HEAD.pack(_MAGIC, _FORMAT, 0, xxhash.xxh3_64_intdigest(data))
        with writing(f"log: cannot write {self.path}"):
            replace_file(self.path, head + data, is_synced=self._is_synced)

    def read(self) -> Any:
        """The value; None where there is no file. Raises Corruption: it is damaged."""
        if not self.path.exists():
            return None
        content = self.path.read_bytes()
        expected = f"{self.path}: expected"
        if len(content) < _HEAD.size:
            raise Corruption(f"{expected} {_HEAD.size} bytes or more, found {len(content)}")
        magic, form, _, checksum = _HEAD.unpack_from(content)
        if magic != _MAGIC or form != _FORMAT:
            raise Corruption(
                f"{expected} {_MAGIC!r} of format {_FORMAT}, found {magic!r} of {form}"
            )
        data = content[_HEAD.size :]
        if xxhash.xxh3_64_intdigest(data) != checksum:
            raise Corruption(f"{expected} its checksum to match, found other bytes")
        return msgpack.unpackb(data, strict_map_key=False)
