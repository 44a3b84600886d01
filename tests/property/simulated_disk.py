"""A folder tree on a disk that loses power."""

from __future__ import annotations

import errno
import io
import os
import pathlib
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest

SECTOR = 512
Tree = dict[str, "bytes | Tree"]

_CHANGING_PATHS = ("mkdir", "rmdir", "unlink", "remove", "rename", "replace")
_CHANGING_FILES = ("pwrite", "pwritev", "ftruncate")
_SYNCING = ("fsync", "fdatasync")


@dataclass
class Node:
    """A file or a folder. fd: keeps its inode number its own, also after its removal."""

    number: int  # in the order of creation, so that a seed repeats its history
    fd: int
    on_disk: bytes = b""  # a file's content
    clean: bytes = b""  # what the next sync of a file takes for written
    rewritten: set[int] = field(default_factory=set)  # sectors that it writes, changed or not
    names: dict[str, int] = field(default_factory=dict)  # a folder's, on the disk: inodes
    seen: dict[str, set[int | None]] = field(default_factory=dict)  # what they were since then

    @property
    def is_folder(self) -> bool:
        return stat.S_ISDIR(os.fstat(self.fd).st_mode)

    def cached(self) -> bytes:
        return os.pread(self.fd, os.fstat(self.fd).st_size, 0)


class Disk:
    """What a folder, with all below it, is after a loss of power. The files are the page cache.

    A write reaches the disk when its file is synced; until then each of its sectors may be there or
    not. A sync that fails leaves them so, but marks them clean, as Linux does: the next sync does
    not write them. A name, new or removed, lasts when its folder is synced; until then it may be as
    it was at any moment since. A process that has died changes nothing any more: its calls fail.

    dies_in: the number of the change or sync at which the process dies; 0: it lives on.
    renames_left: after so many renames it dies too; 0: it lives on. What is not synced between a
        rename and the next sync is lost only then.
    fails_in: the number of the sync that fails; 0: none.
    """

    def __init__(self, folder: Path, random: Random, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.random = folder, random
        self.dies_in = self.renames_left = self.fails_in = 0
        self.is_off = False
        self._lock = threading.RLock()
        self._is_real = False  # the calls of the simulation itself
        self._nodes: dict[int, Node] = {}
        self._root = self._node(folder)
        for name in _CHANGING_PATHS:
            self._patch(patch, os, name, self._changing_path)
        for name in _CHANGING_FILES:
            self._patch(patch, os, name, self._changing_file)
        for name in _SYNCING:
            self._patch(patch, os, name, self._syncing)
        self._patch(patch, io, "open", self._opening)
        patch.setattr(os, "open", self._opening_descriptor(os.open))

    @staticmethod
    def _patch(
        patch: pytest.MonkeyPatch, module: Any, name: str, changed: Callable[[Any], Any]
    ) -> None:
        function = changed(getattr(module, name))
        patch.setattr(module, name, function)
        accessor = getattr(pathlib, "_normal_accessor", None)  # of Python 3.10
        if hasattr(accessor, name):
            patch.setattr(accessor, name, function)

    def close(self) -> None:
        for node in self._nodes.values():
            os.close(node.fd)
        self._nodes.clear()

    def kill(self) -> None:
        self.is_off = True

    def restart(self) -> None:
        """The next process begins."""
        self.is_off = False
        self.dies_in = self.renames_left = self.fails_in = 0

    # ---- the calls of the process ----

    def _is_inside(self, path: Any, dir_fd: int | None = None) -> bool:
        if self._is_real or isinstance(path, int):
            return False
        where = Path(f"/proc/self/fd/{dir_fd}").readlink() if dir_fd is not None else Path.cwd()
        return (where / os.fsdecode(path)).is_relative_to(self.folder)

    def _changing_path(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def change(path: Any, *args: Any, **options: Any) -> Any:
            folder = options.get("dir_fd", options.get("src_dir_fd"))
            if not self._is_inside(path, folder):
                return real(path, *args, **options)
            with self._event():
                result = real(path, *args, **options)
                if real.__name__ in ("rename", "replace"):
                    self.is_off = self.is_off or self.renames_left == 1
                    self.renames_left = max(0, self.renames_left - 1)
                return result

        return change

    def _changing_file(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def change(fd: int, *args: Any) -> Any:
            node = self._node_of(fd)
            if node is None:
                return real(fd, *args)
            with self._event():
                result = real(fd, *args)
                if real.__name__ != "ftruncate":
                    at = args[1]
                    node.rewritten.update(range(at // SECTOR, (at + result - 1) // SECTOR + 1))
                return result

        return change

    def _opening_descriptor(self, real: Callable[..., int]) -> Callable[..., int]:
        def open_descriptor(path: Any, flags: int, *args: Any, **options: Any) -> int:
            if not flags & os.O_CREAT or not self._is_inside(path, options.get("dir_fd")):
                return real(path, flags, *args, **options)
            with self._event():
                return real(path, flags, *args, **options)

        return open_descriptor

    def _opening(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def open_file(path: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            if mode.startswith("r") or not self._is_inside(path):
                return real(path, mode, *args, **options)
            with self._event():
                file = real(path, mode, *args, **options)
                if (node := self._nodes.get(os.fstat(file.fileno()).st_ino)) is not None:
                    node.clean = b""  # what is written after the truncation is new
                return file

        return open_file

    def _syncing(self, real: Callable[[int], None]) -> Callable[[int], None]:
        def sync(fd: int) -> None:
            if (node := self._node_of(fd)) is None:
                real(fd)
                return
            with self._event():
                fails = self.fails_in == 1
                self.fails_in = max(0, self.fails_in - 1)
                if node.is_folder:
                    self._sync_folder(node, fails=fails)
                else:
                    self._sync_file(node, fails=fails)
                if fails:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))

        return sync

    def _node_of(self, fd: int) -> Node | None:
        """None: a file of others."""
        with self._lock:
            if self._is_real:
                return None
            status, folder = os.fstat(fd), os.fstat(self._root.fd)
            if status.st_ino not in self._nodes:
                self._observe(self._root, self.folder)
            return self._nodes.get(status.st_ino) if status.st_dev == folder.st_dev else None

    @contextmanager
    def _event(self) -> Iterator[None]:
        with self._lock:
            self._observe(self._root, self.folder)
            self.is_off = self.is_off or self.dies_in == 1
            self.dies_in = max(0, self.dies_in - 1)
            if self.is_off:
                raise OSError(errno.EIO, "the process is dead")
            yield

    def _observe(self, node: Node, folder: Path) -> None:
        """Note the names of this moment."""
        entries = {entry.name: entry for entry in os.scandir(folder)}
        for name, entry in entries.items():
            inode = entry.inode()
            child = self._nodes.get(inode) or self._node(Path(entry.path))
            if node.names.get(name) != inode:
                node.seen.setdefault(name, set()).add(inode)
            if entry.is_dir(follow_symlinks=False):
                self._observe(child, Path(entry.path))
        for name in {*node.names, *node.seen} - entries.keys():
            node.seen.setdefault(name, set()).add(None)

    def _node(self, path: Path) -> Node:
        is_real, self._is_real = self._is_real, True
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._is_real = is_real
        node = self._nodes[os.fstat(fd).st_ino] = Node(len(self._nodes), fd)
        return node

    def _sync_folder(self, node: Node, *, fails: bool) -> None:
        if not fails:
            entries = os.scandir(node.fd)
            node.names, node.seen = {entry.name: entry.inode() for entry in entries}, {}

    def _sync_file(self, node: Node, *, fails: bool) -> None:
        cached = node.cached()
        if not fails:
            dirty = _different(node.clean, cached) | node.rewritten
            node.on_disk = _merged(node.on_disk, cached, dirty)[: len(cached)]
        node.clean, node.rewritten = cached, set()

    # ---- the loss of power ----

    def lose_power(self) -> None:
        """The tree becomes what is left; all of that is on the disk."""
        with self._lock:
            self._is_real = True
            self._observe(self._root, self.folder)
            tree = self._left(self._root, set())
            self.close()
            for entry in os.scandir(self.folder):
                shutil.rmtree(entry.path) if entry.is_dir() else Path(entry.path).unlink()
            self._root = self._restore(self.folder, tree)
            self._is_real = False

    def _left(self, node: Node, used: set[int]) -> Tree:
        """used: folders that have a place already; one has only one."""
        tree: Tree = {}
        current = {entry.name: entry.inode() for entry in os.scandir(node.fd)}
        for name in sorted({*node.names, *node.seen}):
            options = {node.names.get(name), *node.seen.get(name, ())}
            inode = self._pick(options, current.get(name))
            if inode is None or inode in used:
                continue
            child = self._nodes[inode]
            if child.is_folder:
                used.add(inode)
            tree[name] = self._left(child, used) if child.is_folder else self._content(child)
        return tree

    def _pick(self, options: set[int | None], current: int | None) -> int | None:
        if current in options and self.random.random() < 0.4:
            return current
        order = sorted(options, key=lambda inode: self._nodes[inode].number if inode else -1)
        return self.random.choice(order)

    def _content(self, node: Node) -> bytes:
        cached = node.cached()
        changed = sorted(_different(node.on_disk, cached))
        share = self.random.choice((0.0, 0.5, 1.0))
        written = {sector for sector in changed if self.random.random() < share}
        content = _merged(node.on_disk, cached, written)
        if self.random.random() < 0.3:  # its size is on the disk, and not what was written
            content = content[: len(cached)].ljust(len(cached), b"\0")
        return content

    def _restore(self, path: Path, content: bytes | Tree) -> Node:
        if isinstance(content, bytes):
            path.write_bytes(content)
            node = self._node(path)
            node.on_disk = node.clean = content
            return node
        path.mkdir(exist_ok=True)
        node = self._node(path)
        for name, child in content.items():
            inode = os.fstat(self._restore(path / name, child).fd).st_ino
            node.names[name] = inode
        return node


def _different(old: bytes, new: bytes) -> set[int]:
    """The sectors of `new` that are others in `old`."""
    return {
        at // SECTOR
        for at in range(0, len(new), SECTOR)
        if old[at : at + SECTOR] != new[at : at + SECTOR]
    }


def _merged(old: bytes, new: bytes, sectors: set[int]) -> bytes:
    """The content on a disk that had `old` when these sectors of `new` have been written."""
    merged = bytearray(old)
    for sector in sectors:
        at, piece = sector * SECTOR, new[sector * SECTOR :][:SECTOR]
        merged.extend(bytes(max(0, at + len(piece) - len(merged))))
        merged[at : at + len(piece)] = piece
    return bytes(merged)
