"""A small file that is replaced whole: whoever reads it finds the old content or the new one."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import msgpack
import xxhash

from trireme.errors import Corruption, writing
from trireme.storage.storage import sync_folder

_HEAD = struct.Struct("<8sIIQ")  # magic, format, zero, checksum of what follows
_MAGIC = b"TRIREDOC"
_FORMAT = 1


class Document:
    """A value of msgpack in a file. is_synced: it shall survive the machine, not the process
    alone. Threads: one at a time.
    """

    def __init__(self, path: Path, *, is_synced: bool) -> None:
        self.path, self._is_synced = path, is_synced

    def write(self, value: Any) -> None:
        """Raises ResourceExhausted: the disk is full; the old content stays."""
        data = msgpack.packb(value)
        head = _HEAD.pack(_MAGIC, _FORMAT, 0, xxhash.xxh3_64_intdigest(data))
        aside = self.path.with_name(f".{self.path.name}")
        with writing(f"log: cannot write {self.path}"):
            with aside.open("wb", buffering=0) as file:
                rest = memoryview(head + data)
                while rest:  # a raw file may take less than it is given
                    rest = rest[file.write(rest) :]
                if self._is_synced:
                    os.fsync(file.fileno())
            aside.rename(self.path)
            if self._is_synced:
                sync_folder(self.path.parent)

    def read(self) -> Any:
        """The value; None where there is no file. Raises Corruption: it is damaged."""
        if not self.path.exists():
            return None
        found = self.path.read_bytes()
        if len(found) < _HEAD.size:
            raise Corruption(
                f"{self.path}: expected {_HEAD.size} bytes or more, found {len(found)}"
            )
        magic, form, _, checksum = _HEAD.unpack_from(found)
        if magic != _MAGIC or form != _FORMAT:
            raise Corruption(
                f"{self.path}: expected {_MAGIC!r} of format {_FORMAT}, found {magic!r} of {form}"
            )
        data = found[_HEAD.size :]
        if xxhash.xxh3_64_intdigest(data) != checksum:
            raise Corruption(f"{self.path}: expected its checksum to match, found other bytes")
        return msgpack.unpackb(data, strict_map_key=False)
