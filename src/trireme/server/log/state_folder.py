"""A server's state folder: its files, and the lock that makes it one process' own.

The file of the lock also notes the newest segment, so that a start notices if that one is missing.
"""

import fcntl
import os
import re
import shutil
import struct
from collections.abc import Iterable
from pathlib import Path

import xxhash

from trireme.errors import BadRequest, Corruption, reading, writing
from trireme.storage.local import make_folder, sync_folder

LOCK = "lock"
COORDINATOR = "coordinator"
_ENDED = "ended"  # while the state of a job that is over is removed
_SEGMENT = re.compile(r"log-(\d{8})")
_SNAPSHOT = re.compile(r"snapshot-(\d{8})")


def holds_state(path: Path) -> bool:
    """Whether a server that is started with this folder continues a job."""
    if (path / _ENDED).exists() or not path.is_dir():
        return False
    return (path / COORDINATOR).exists() or any(
        pattern.fullmatch(entry.name)
        for entry in path.iterdir()
        for pattern in (_SEGMENT, _SNAPSHOT)
    )


class StateFolder:
    """A folder that is locked for other processes until `close`. Raises BadRequest: not a folder,
    or another process uses it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with writing(f"log: cannot use {path}"):
            make_folder(path.absolute())
            self._lock = os.open(path / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise BadRequest(
                f"log: expected {path} to be this server's alone, found another process that uses"
                " it; give each server another --state_dir"
            ) from error
        if (path / _ENDED).exists():
            self.empty()

    def segments(self) -> dict[int, Path]:
        return self._numbered(_SEGMENT)

    def snapshots(self) -> dict[int, Path]:
        """Complete snapshots by the number of the segment that begins with each, ascending."""
        return self._numbered(_SNAPSHOT)

    def _numbered(self, pattern: re.Pattern[str]) -> dict[int, Path]:
        matches = ((pattern.fullmatch(entry.name), entry) for entry in self.path.iterdir())
        return dict(sorted((int(match[1]), entry) for match, entry in matches if match))

    def note(self, number: int) -> None:
        """Note durably that this segment is there, before anything in it is acknowledged. Its name
        must be durable already. Raises ResourceExhausted, BadRequest: the disk is full or broken.
        """
        packed = struct.pack("<Q", number)
        with writing(f"log: cannot write {self.path / LOCK}"):
            # One sector of the disk: it has the old note or this one.
            os.pwrite(self._lock, packed + struct.pack("<Q", xxhash.xxh3_64_intdigest(packed)), 0)
            os.fsync(self._lock)

    def noted(self) -> int:
        """The newest segment that was there; 0: none was noted. Raises Corruption: damaged."""
        with reading(self.path / LOCK):
            content = os.pread(self._lock, 16, 0)
        if not any(content):  # the first note may not have reached the disk
            return 0
        if content[8:] != struct.pack("<Q", xxhash.xxh3_64_intdigest(content[:8])):
            raise Corruption(
                f"{self.path / LOCK}: expected the number of a segment and its checksum, found"
                f" {content.hex()}; remove this file if all segments are in the folder"
            )
        return int.from_bytes(content[:8], "little")

    def snapshot(self, number: int) -> Path:
        return self.path / f"snapshot-{number:08d}"

    def sweep(self, first: int) -> None:
        """Remove all that is older than the snapshot of segment `first`. If interrupted, the next
        call removes the rest.
        """
        old = [path for number, path in self.segments().items() if number < first]
        old += [path for number, path in self.snapshots().items() if number < first]
        self._remove(old)

    def remove_unfinished(self) -> None:
        """Remove files that an earlier process was writing. This one must not write any yet: the
        coordinator replaces its file at any time.
        """
        self._remove([path for path in self.path.iterdir() if path.name.startswith(".")])

    def _remove(self, paths: Iterable[Path]) -> None:
        with writing(f"log: cannot remove old files in {self.path}"):
            for path in paths:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            sync_folder(self.path)

    def empty(self) -> None:
        """Remove all state: the job is over. If interrupted, opening the folder does the rest.
        Raises ResourceExhausted, BadRequest: the disk is full or broken.
        """
        ended = self.path / _ENDED
        with writing(f"log: cannot remove the state in {self.path}"):
            ended.touch()
            sync_folder(self.path)
            self.note(0)
            parts = self.path.glob(f"{COORDINATOR}*")
            self._remove([*parts, *self.snapshots().values(), *self.segments().values()])
            ended.unlink()

    def close(self) -> None:
        os.close(self._lock)
