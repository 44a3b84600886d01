"""Folders of exports: written aside, synced and renamed, so that they are complete or absent."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trireme.errors import BadRequest, writing

WRITE_BYTES = 4 << 20


class CheckedFile(io.RawIOBase):
    """A file being written, with its SHA-256.

    It is written in whole blocks of WRITE_BYTES. A system that keeps what is written in pages as
    large as the writes then maps it in huge pages, which makes random lookups far faster.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("xb")
        self._hash = hashlib.sha256()
        self._held = bytearray()
        self.num_bytes = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._hash.update(view)
        self.num_bytes += view.nbytes
        self._held += view
        self._write_held(len(self._held) // WRITE_BYTES * WRITE_BYTES)
        return view.nbytes

    def _write_held(self, num_bytes: int) -> None:
        if num_bytes:
            with memoryview(self._held) as held:
                self._file.write(held[:num_bytes])
            del self._held[:num_bytes]

    def sync(self) -> dict[str, Any]:
        """Make it durable; returns {"bytes", "sha256"} for the manifest."""
        self._write_held(len(self._held))
        self._file.flush()
        os.fsync(self._file.fileno())
        return {"bytes": self.num_bytes, "sha256": self._hash.hexdigest()}

    def close(self) -> None:
        self._file.close()
        super().close()


@contextmanager
def written(path: Path) -> Iterator[tuple[CheckedFile, dict[str, Any]]]:
    """Write a file; the map holds its bytes and checksum once the block has ended well."""
    entry = dict[str, Any]()
    with CheckedFile(path) as file:
        yield file, entry
        entry.update(file.sync())


def inside(folder: Path, path: str | Path, hint: str = "") -> Path:
    """`path` within `folder`. Raises BadRequest, with the hint, for a path that leads out of it."""
    joined = (folder / path).resolve()
    if not joined.is_relative_to(folder.resolve()):
        raise BadRequest(
            f"checkpoint: expected a path under {folder}, found {path}"
            + (f"; {hint}" if hint else "")
        )
    return joined


@contextmanager
def published(path: Path) -> Iterator[Path]:
    """A folder to write a checkpoint into; it appears as `path` when the block ends without an
    error.

    Raises:
        BadRequest: `path` exists or cannot be written. ResourceExhausted: the disk is full.
    """
    if path.exists():
        raise BadRequest(f"checkpoint: expected a new folder, found {path} existing; name another")
    partial = path.parent / f".{path.name}.{uuid.uuid4().hex}.partial"
    try:
        with writing(f"checkpoint: cannot write {path}"):
            partial.mkdir(parents=True)
            yield partial
            for folder in (*(p for p in partial.rglob("*") if p.is_dir()), partial):
                sync_folder(folder)
            partial.rename(path)
            sync_folder(path.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
