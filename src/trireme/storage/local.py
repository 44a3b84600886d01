"""Local folders."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from trireme.errors import is_file, looking


class LocalStorage:
    """A folder of this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def name(self) -> str:
        """The folder or location, for messages."""
        return str(self.folder)

    def create(self, path: str) -> LocalSink:
        """A new file; missing folders between it and this one are made. Raises FileNotFoundError:
        this one is missing, as the folder of a save that has been given up and removed.
        """
        full = self.folder / path
        below = itertools.takewhile(lambda folder: folder != self.folder, full.parents)
        for folder in reversed(list(below)):
            folder.mkdir(exist_ok=True)
        return LocalSink(full)

    def put_new(self, path: str, data: bytes) -> None:
        """A new file with this content, durable. Raises OSError: there is one already."""
        sink = self.create(path)
        try:
            sink.write(data)
            sink.sync()
        finally:
            sink.abandon()

    def open(self, path: str) -> BinaryIO:
        """A file from its beginning; FileNotFoundError where there is none."""
        return (self.folder / path).open("rb", buffering=0)

    def open_arrow(self, path: str) -> pa.NativeFile:
        """The same for Arrow, which maps local files into memory."""
        return pa.memory_map(str(self.folder / path))

    def size(self, path: str) -> int | None:
        """The file's bytes; None: there is no such file."""
        full = self.folder / path
        return full.stat().st_size if is_file(full) else None

    def below(self, path: str) -> LocalStorage:
        """The folder at that path."""
        return LocalStorage(self.folder / path)

    def parent(self) -> tuple[LocalStorage, str]:
        """The parent folder, and the name of this one in it."""
        return LocalStorage(self.folder.parent), self.folder.name

    def folders(self) -> list[str]:
        """Names of the folders directly below."""
        with looking(self.folder):
            if not self.folder.exists():
                return []
            return sorted(entry.name for entry in os.scandir(self.folder) if entry.is_dir())

    def remove(self, path: str) -> None:
        """Remove a file, durably, or a folder with all its content; nothing if it is missing."""
        full = self.folder / path
        if not os.path.lexists(full):
            return
        shutil.rmtree(full) if full.is_dir() and not full.is_symlink() else full.unlink()
        sync_folder(full.parent)


class LocalSink:
    """A file being written by one thread."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb", buffering=0)

    def write(self, data: Any) -> None:
        rest = memoryview(data)
        while rest:  # a raw file may take less than it is given
            rest = rest[self._file.write(rest) :]

    def sync(self) -> None:
        """Make it durable and close it. Without this call nothing of it may last."""
        os.fsync(self._file.fileno())
        self._file.close()

    def abandon(self) -> None:
        """Close it. Does nothing after sync(), or a second time."""
        self._file.close()


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, durably. One that is there may have been made by a process
    that was killed before it was durable. Raises OSError.
    """
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
    if os.access(folder.parent, os.W_OK):  # otherwise its owner has made it
        sync_folder(folder.parent)


@contextmanager
def made_folder(folder: Path) -> Iterator[None]:
    """As `make_folder`. What it has made goes if the block fails, and nobody else uses it."""
    made = [one for one in (folder, *folder.parents) if not one.exists()]
    try:
        make_folder(folder)
        yield
    except BaseException:
        with suppress(OSError):  # it is not empty
            for one in made:
                one.rmdir()
        raise


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
