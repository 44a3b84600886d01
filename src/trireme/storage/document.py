"""A small file that is replaced whole: a reader finds the old content or the new one.

What is large in it and never changes has files of its own beside it, which are written once.
"""

import struct
import uuid
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import msgpack
import xxhash

from trireme.errors import Corruption, reading, writing
from trireme.storage.atomic_file import replace_file

_HEAD = struct.Struct("<8sIIQ")  # magic, format, zero, checksum of what follows
_MAGIC = b"TRIREDOC"
_FORMATS = _WHOLE, _WITH_PARTS = (1, 2)

Part: TypeAlias = "partial[Any]"
"""Stands in a value for what it returns, which never changes."""


class Document:
    """A value of msgpack in a file, whose parts have files of their own. is_synced: it survives a
    crash of the machine. Threads: one at a time.
    """

    def __init__(self, path: Path, *, is_synced: bool) -> None:
        self.path, self._is_synced = path, is_synced
        self._parts: dict[Part, Path] = {}  # that this process has written
        self._files = set(path.parent.glob(f"{path.name}.part-*"))

    def write(self, value: Any) -> None:
        """Parts are written the first time only, and removed when the value has them no more.
        Raises ResourceExhausted: the disk is full; the old content stays.
        """
        used: dict[Part, Path] = {}

        def refer(part: Part) -> msgpack.ExtType:
            if part not in self._parts:
                path = self.path.with_name(f"{self.path.name}.part-{uuid.uuid4().hex}")
                self._files.add(path)
                self._replace(path, msgpack.packb(part()), _WHOLE)
                self._parts[part] = path
            used[part] = self._parts[part]
            return msgpack.ExtType(0, used[part].name.encode())

        data = msgpack.packb(value, default=refer)
        self._replace(self.path, data, _WITH_PARTS if used else _WHOLE)
        self._parts = used
        with writing(f"log: cannot remove old parts of {self.path}"):
            for path in self._files - set(used.values()):
                path.unlink(missing_ok=True)
                self._files.remove(path)

    def _replace(self, path: Path, data: bytes, form: int) -> None:
        head = _HEAD.pack(_MAGIC, form, 0, xxhash.xxh3_64_intdigest(data))
        with writing(f"log: cannot write {path}"):
            replace_file(path, head + data, is_synced=self._is_synced)

    def read(self) -> Any:
        """The value, with its parts; None where there is no file. Raises Corruption: it is damaged,
        or a part is missing.
        """
        return self._read(self.path) if self.path.exists() else None

    def _read(self, path: Path) -> Any:
        if not path.exists():
            raise Corruption(f"{self.path}: expected {path} beside it, found none")
        with reading(path):
            content = path.read_bytes()
        expected = f"{path}: expected"
        if len(content) < _HEAD.size:
            raise Corruption(f"{expected} {_HEAD.size} bytes or more, found {len(content)}")
        magic, form, _, checksum = _HEAD.unpack_from(content)
        if magic != _MAGIC or form not in _FORMATS:
            raise Corruption(f"{expected} {_MAGIC!r} of {_FORMATS}, found {magic!r} of {form}")
        data = content[_HEAD.size :]
        if xxhash.xxh3_64_intdigest(data) != checksum:
            raise Corruption(f"{expected} its checksum to match, found other bytes")
        return msgpack.unpackb(
            data,
            strict_map_key=False,
            ext_hook=lambda _, name: self._read(self.path.with_name(name.decode())),
        )
