"""Files with their length and checksum, as manifests have them: {"path", "bytes", DIGEST: hex}."""

import hashlib
import io
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import xxhash

from trireme.errors import Corruption, reading
from trireme.storage.local import LocalSink, LocalStorage
from trireme.storage.remote import RemoteSink
from trireme.storage.storage import Storage

FILE_THREADS = max(2, min(8, os.cpu_count() or 1))
"""How many threads of a process read or write files at a time."""

READ_BYTES = MAPPED_BLOCK_BYTES = 4 << 20
DIGESTS: Mapping[str, Callable[[], Any]] = {"xxh3_128": xxhash.xxh3_128, "sha256": hashlib.sha256}

Entry = dict[str, Any]


class CheckedFile(io.RawIOBase):
    """A file being written, with its length and checksum."""

    def __init__(self, sink: LocalSink | RemoteSink, digest: str, block_bytes: int) -> None:
        super().__init__()
        self._sink, self._block_bytes = sink, block_bytes
        self._digest = DIGESTS[digest]()
        self._held = bytearray()
        self.num_bytes = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if self._block_bytes:
            self._held += view
            self._write_held(len(self._held) // self._block_bytes * self._block_bytes)
        else:
            self._sink.write(view)
        self._digest.update(view)
        self.num_bytes += view.nbytes
        return view.nbytes

    def _write_held(self, num_bytes: int) -> None:
        if num_bytes:
            with memoryview(self._held) as held:
                self._sink.write(held[:num_bytes])
            del self._held[:num_bytes]

    def complete(self) -> str:
        """Make it durable; returns its checksum."""
        self._write_held(len(self._held))
        self._sink.sync()
        return str(self._digest.hexdigest())


@contextmanager
def written(
    storage: Storage, path: str, *, digest: str = "xxh3_128", block_bytes: int = 0
) -> Iterator[tuple[CheckedFile, Entry]]:
    """Write a file. The map gets path, bytes and checksum (a name in DIGESTS) when the block ends
    without an error. block_bytes: write in whole blocks of this many bytes; 0: as the data comes.
    """
    entry: Entry = {}
    sink = storage.create(path)
    try:
        file = CheckedFile(sink, digest, block_bytes)
        yield file, entry
        checksum = file.complete()
        entry.update({"path": path, "bytes": file.num_bytes, digest: checksum})
    finally:
        sink.abandon()


def written_for_mapping(
    folder: Path, path: str
) -> AbstractContextManager[tuple[CheckedFile, Entry]]:
    """Write a file that will be mapped into memory for lookups; its checksum is SHA-256. A file
    system that caches these large blocks in pages of their size can map it in huge pages, which
    makes random lookups far faster.
    """
    storage = LocalStorage(folder)
    return written(storage, path, digest="sha256", block_bytes=MAPPED_BLOCK_BYTES)


def check_file(
    storage: Storage,
    path: str,
    num_bytes: int,
    xxh3_128: str,
    note: Callable[[int], object] | None = None,
) -> None:
    """Read a file and compare its length and checksum with those of a manifest. note: called with
    the number of bytes of each part that has been read. Raises Corruption: it is missing, or
    differs.
    """
    where = f"{storage.name}/{path}"
    if (size := storage.size(path)) is None:
        raise Corruption(f"checkpoint {storage.name}: expected file {path}, found none")
    if size != num_bytes:
        raise Corruption(f"{where}: expected {num_bytes} bytes, found {size}")
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(min(READ_BYTES, max(size, 1))))
    with reading(where), storage.open(path) as file:
        while count := file.readinto(buffer):  # type: ignore[attr-defined]  # of binary files
            digest.update(buffer[:count])
            if note is not None:
                note(count)
    if digest.hexdigest() != xxh3_128:
        raise Corruption(f"{where}: expected XXH3 {xxh3_128}, found {digest.hexdigest()}")
