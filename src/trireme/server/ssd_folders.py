"""The folders of a process on SSD, one in each of --ssd_dir, which end with it."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path

from trireme import _core
from trireme.errors import BadRequest, Unavailable, writing

log = logging.getLogger("trireme.server")

_PREFIX, _LOCK = "trireme-rows-", "lock"


class OwnFolders:
    """Locked as long as the process lives. Those of processes that have ended are removed.

    paths: of the folders. io: how files in them are read, "io_uring" or "threads".
    parents: of the folders. Raises BadRequest: none, one that is no folder, or one twice; the
    errors of `writing`.
    """

    def __init__(self, parents: Sequence[Path]) -> None:
        if not parents:
            raise BadRequest("--ssd_dir: expected a folder, found none")
        if len({parent.resolve() for parent in parents}) < len(parents):
            raise BadRequest(f"--ssd_dir: expected each folder once, found {[*map(str, parents)]}")
        self.paths: list[Path] = []
        self._locks: list[int] = []
        try:
            for parent in parents:
                self.paths.append(self._made(parent))
        except BaseException:
            self.close()
            raise
        self.io = _find_io(self.paths[0])

    def close(self) -> None:
        """Remove them."""
        for folder in self.paths:
            shutil.rmtree(folder, ignore_errors=True)  # what is left is removed at the next start
        for lock in self._locks:
            os.close(lock)
        self.paths, self._locks = [], []

    def _made(self, parent: Path) -> Path:
        if not parent.is_dir():
            raise BadRequest(f"--ssd_dir: expected a folder, found {str(parent)!r}")
        for old in parent.glob(_PREFIX + "*"):
            _remove_if_left(old)
        hidden = parent / f".{_PREFIX}{uuid.uuid4().hex[:12]}"
        with writing(f"--ssd_dir: cannot use {hidden}"):
            hidden.mkdir()
            self._locks.append(_locked(hidden))
            return hidden.rename(parent / hidden.name[1:])  # others that start find it locked


def _remove_if_left(folder: Path) -> None:
    try:
        lock = _locked(folder)
    except OSError:  # its process lives, or another one removes it
        return
    try:
        shutil.rmtree(folder, ignore_errors=True)
        log.info("removed %s, which a process that has ended left behind", folder)
    finally:
        os.close(lock)


def _locked(folder: Path) -> int:
    """Raises OSError: another process has it."""
    lock = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise
    return lock


def _find_io(folder: Path) -> str:
    try:
        _core.SsdDevice(str(folder), "io_uring")
    except Unavailable as error:
        log.info("rows on SSD are read by threads, which costs more CPU: %s", error)
        return "threads"
    return "io_uring"
