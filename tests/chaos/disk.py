"""A small disk for the state of one server, which can be full."""

from __future__ import annotations

import contextlib
import errno
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SIZE = "16m"
_PIECE = 1 << 16


class Disk:
    def __init__(self, folder: Path) -> None:
        self._other = folder / "other"

    def fill(self) -> None:
        """To the last byte, with a file of somebody else."""
        with self._other.open("ab", buffering=0) as file:
            for piece in (_PIECE, 1):
                try:
                    while True:
                        file.write(bytes(piece))
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise

    def make_room(self) -> None:
        self._other.unlink()


@contextmanager
def small_disk(folder: Path) -> Iterator[Disk]:
    """A disk mounted at `folder`."""
    folder.mkdir(parents=True)
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder)],
        check=True,
        capture_output=True,
    )
    try:
        yield Disk(folder)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def why_not(folder: Path) -> str:
    """Why no disk can be mounted here; empty if one can."""
    try:
        with small_disk(folder / "disk"):
            pass
    except (OSError, subprocess.CalledProcessError):
        return "nobody but root may mount a file system"
    finally:
        with contextlib.suppress(OSError):
            (folder / "disk").rmdir()
    return ""
