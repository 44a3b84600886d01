"""The disks of one server, which can fill up: of its state, and of its rows. Small mounted disks
where root may mount them, else a limit on the size of the process's files.
"""

from __future__ import annotations

import contextlib
import errno
import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

SIZE, LARGE_SIZE = "16m", "1g"  # with rows on SSD, in files of 64 MiB; and their log
_PIECE = 1 << 20


class Disk(Protocol):
    def fill(self) -> None:
        """To the last byte."""

    def make_room(self) -> None:
        """For the next process of the server."""


class SmallDisk:
    """The disk that holds `folder`, filled by another file."""

    def __init__(self, folder: Path) -> None:
        self._other = folder / "other"

    def fill(self) -> None:
        with self._other.open("ab", buffering=0) as file:
            for piece in (_PIECE, 1 << 10, 1):
                try:
                    while True:
                        file.write(bytes(piece))
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise

    def make_room(self) -> None:
        self._other.unlink()


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
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def can_mount(folder: Path) -> bool:
    try:
        with small_disk(folder / "disk"):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False
