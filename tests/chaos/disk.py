"""The disks of one server, which can fill up: of its state, and of its rows. Small mounted disks
where root may mount them, else a limit on the size of the process's files.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

SIZE, LARGE_SIZE = "16m", "1g"  # with rows on SSD, in files of 64 MiB; and their log


class Disk(Protocol):
    def fill(self) -> None:
        """To the last byte."""

    def make_room(self) -> None:
        """For the next process of the server."""


class SmallDisk:
    """The disk that is mounted at `folder`, of this size. It is filled by becoming small at once,
    for the job goes on meanwhile; another file takes what is left.
    """

    def __init__(self, folder: Path, size: str) -> None:
        self._folder, self._size = folder, size
        self._other = folder / "other"

    def fill(self) -> None:
        disk = os.statvfs(self._folder)
        num_bytes = (disk.f_blocks - disk.f_bfree + 1) * disk.f_frsize
        try:
            self._resize(str(num_bytes))
        except subprocess.CalledProcessError:  # files have grown meanwhile
            self.fill()
            return
        with self._other.open("ab", buffering=0) as file:
            for piece in (1 << 10, 1):
                try:
                    while True:
                        file.write(bytes(piece))
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise

    def make_room(self) -> None:
        self._resize(self._size)
        self._other.unlink()

    def _resize(self, size: str) -> None:
        options = f"remount,size={size}"
        subprocess.run(["mount", "-o", options, str(self._folder)], check=True, capture_output=True)


class LimitedFiles:
    """Of the process `pid()`, which writes no byte more to any file."""

    def __init__(self, pid: Callable[[], int]) -> None:
        self._pid = pid

    def fill(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # it is down, and the next has no limit
            resource.prlimit(self._pid(), resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))

    def make_room(self) -> None:
        """The limit ends with the process."""


@contextmanager
def small_disk(folder: Path, size: str = SIZE) -> Iterator[SmallDisk]:
    """A disk mounted at `folder`."""
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    subprocess.run(mount, check=True, capture_output=True)
    try:
        yield SmallDisk(folder, size)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def can_mount(folder: Path) -> bool:
    try:
        with small_disk(folder / "disk"):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False
