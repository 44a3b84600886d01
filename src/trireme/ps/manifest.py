"""A checkpoint is a folder that a manifest describes completely.

    manifest.json                 format, tables with schemas and files, blocks, streams, checksums
    rows/T/LO-HI.arrow            rows of table number T in buckets LO..HI, an Arrow IPC file:
                                  key, row_class, weights, state, statistics
    blocks/server-N.safetensors   blocks with optimizer state: "<block id>/weights",
                                  "<block id>/<state name>"
    module.safetensors            buffers of worker 0's module (BatchNorm and the like), if any

It is written under another name beside its place, synced, and renamed: a folder with a manifest is
complete.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trireme.errors import BadRequest, Corruption, writing

FORMAT = 1
MANIFEST = "manifest.json"
READ_BYTES = 1 << 20


class CheckedFile(io.RawIOBase):
    """A file being written, with its SHA-256."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("xb")
        self._hash = hashlib.sha256()
        self.num_bytes = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._file.write(view)
        self._hash.update(view)
        self.num_bytes += view.nbytes
        return view.nbytes

    def sync(self) -> dict[str, Any]:
        """Make it durable; returns {"bytes", "sha256"} for the manifest."""
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


def verify_file(folder: Path, entry: Mapping[str, Any]) -> Path:
    """The path of a file of the manifest, after its length and checksum have been checked.

    Raises:
        Corruption: it is missing or its bytes differ.
    """
    path = inside(folder, str(entry["path"]))
    if not path.is_file():
        raise Corruption(f"checkpoint {folder}: expected file {entry['path']}, found none")
    size = path.stat().st_size
    if size != entry["bytes"]:
        raise Corruption(f"{path}: expected {entry['bytes']} bytes, found {size}")
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(READ_BYTES):
            digest.update(chunk)
    if digest.hexdigest() != entry["sha256"]:
        raise Corruption(f"{path}: expected SHA-256 {entry['sha256']}, found {digest.hexdigest()}")
    return path


def inside(folder: Path, path: str | Path, hint: str = "") -> Path:
    """`path` within `folder`. Raises BadRequest, with the hint, for a path that leads out of it."""
    joined = (folder / path).resolve()
    if not joined.is_relative_to(folder.resolve()):
        raise BadRequest(
            f"checkpoint: expected a path under {folder}, found {path}"
            + (f"; {hint}" if hint else "")
        )
    return joined


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint.

    Raises:
        BadRequest: there is no checkpoint. Corruption: the manifest is damaged or of another
    format.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise BadRequest(f"checkpoint: expected {path}, found none: not a complete checkpoint")
    try:
        manifest = json.loads(path.read_text())
    except ValueError as error:
        raise Corruption(f"{path}: expected JSON, found {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        found = manifest.get("format") if isinstance(manifest, dict) else manifest
        raise Corruption(f"{path}: expected format {FORMAT}, found {found!r}")
    for field in ("tables", "blocks", "streams", "servers", "files", "extra"):
        if field not in manifest:
            raise Corruption(f"{path}: expected field {field!r}, found none")
    return manifest


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


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write the manifest last: a folder that has one is complete."""
    with written(folder / MANIFEST) as (file, _):
        file.write(json.dumps({"format": FORMAT, **manifest}, indent=1).encode())
