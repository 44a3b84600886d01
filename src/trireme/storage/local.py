"""Local folders."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from trireme.errors import BadRequest


class LocalStorage:
    """A folder of this machine; see `location.Storage`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def name(self) -> str:
        return str(self.folder)

    def create(self, path: str) -> LocalSink:
        full = self.folder / path
        full.parent.mkdir(parents=True, exist_ok=True)
        return LocalSink(full)

    def open(self, path: str) -> BinaryIO:
        return (self.folder / path).open("rb", buffering=0)

    def open_arrow(self, path: str) -> pa.NativeFile:
        return pa.memory_map(str(self.folder / path))

    def size(self, path: str) -> int | None:
        full = self.folder / path
        return full.stat().st_size if full.is_file() else None

    def below(self, path: str) -> LocalStorage:
        return LocalStorage(self.folder / path)

    def parent(self) -> tuple[LocalStorage, str]:
        return LocalStorage(self.folder.parent), self.folder.name

    def folders(self) -> list[str]:
        if not self.folder.is_dir():
            return []
        return sorted(entry.name for entry in os.scandir(self.folder) if entry.is_dir())

    def remove(self, path: str) -> None:
        full = self.folder / path
        if full.is_dir() and not full.is_symlink():
            shutil.rmtree(full)
        elif full.exists() or full.is_symlink():
            full.unlink()
        else:
            return
        sync_folder(full.parent)


class LocalSink:
    def __init__(self, path: Path) -> None:
        self._file = path.open("xb", buffering=0)

    def write(self, data: Any) -> int:
        return self._file.write(data)

    def sync(self) -> None:
        os.fsync(self._file.fileno())
        self._file.close()

    def abandon(self) -> None:
        self._file.close()


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path, *, files: bool = False) -> None:
    """Make the names in a folder and in all folders below durable; `files`: file contents too."""
    for path in (*folder.rglob("*"), folder):
        if path.is_dir():
            sync_folder(path)
        elif files:
            with path.open("rb") as file:
                os.fsync(file.fileno())


def inside(folder: Path, path: str | Path, hint: str = "") -> Path:
    """`path` within `folder`. Raises BadRequest, with the hint, for a path that leads out of it."""
    joined = (folder / path).resolve()
    if not joined.is_relative_to(folder.resolve()):
        raise BadRequest(
            f"checkpoint: expected a path under {folder}, found {path}"
            + (f"; {hint}" if hint else "")
        )
    return joined
