"""The log on a simulated disk: what was acknowledged survives kills, power losses, failed syncs and
second faults during recovery, in order and once, and the server always starts again.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.long import pick
from tests.seeds import SEED
from trireme import _core
from trireme.errors import BadRequest, ResourceExhausted
from trireme.server.attendance import Attendance
from trireme.server.log import recovery as recovery_module
from trireme.server.log.log import Log
from trireme.server.log.recovery import Recovery
from trireme.server.log.segment import Record
from trireme.server.log.state_folder import LOCK, StateFolder
from trireme.server.state import ServerState

SECTOR = 512
STATE = bytes(16)


class Disk:
    """What a folder's files would be after a loss of power. The files are the page cache.

    A write reaches the disk when its file is synced; until then each of its sectors may be there or
    not. A sync that fails leaves them so, but marks them clean, as Linux does: the next sync does
    not write them. A name lasts when the folder is synced.
    """

    def __init__(self, folder: Path, random: Random, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.random = folder, random
        self.contents: dict[int, bytes] = {}  # by inode
        self.dirty: dict[int, set[int]] = {}  # sectors that the next sync writes
        self.unknown: dict[int, set[int]] = {}  # sectors that may be there or not
        self.names: dict[str, int] = {}
        self.fails_in = 0  # the number of the next sync that fails; 0: none
        self.is_off = False
        self._lock = threading.RLock()
        self._real = {n: getattr(os, n) for n in ("pwritev", "pwrite", "fsync", "fdatasync")}
        patch.setattr(os, "pwritev", self._write("pwritev"))
        patch.setattr(os, "pwrite", self._write("pwrite"))
        patch.setattr(os, "fsync", self._sync("fsync"))
        patch.setattr(os, "fdatasync", self._sync("fdatasync"))

    def _is_here(self, fd: int) -> bool:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        return self.folder in (path, path.parent)

    def _write(self, name: str) -> Callable[..., int]:
        def write(fd: int, data: Any, at: int) -> int:
            with self._lock:
                if self._is_here(fd) and self.is_off:
                    raise OSError(errno.EIO, "the process is dead")
                num_bytes: int = self._real[name](fd, data, at)
                if self._is_here(fd):
                    sectors = range(at // SECTOR, (at + num_bytes - 1) // SECTOR + 1)
                    for kind in (self.dirty, self.unknown):
                        kind.setdefault(os.fstat(fd).st_ino, set()).update(sectors)
                return num_bytes

        return write

    def _sync(self, name: str) -> Callable[[int], None]:
        def sync(fd: int) -> None:
            with self._lock:
                if not self._is_here(fd):
                    self._real[name](fd)
                    return
                inode, fails = os.fstat(fd).st_ino, self.fails_in == 1
                self.fails_in = max(0, self.fails_in - 1)
                if self.is_off or fails:
                    self.dirty[inode] = set()
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                if Path(os.readlink(f"/proc/self/fd/{fd}")) == self.folder:
                    entries = list(os.scandir(self.folder))
                    self.names = {e.name: e.inode() for e in entries if e.name != LOCK}
                    return
                dirty = self.dirty.pop(inode, set())
                self.unknown.get(inode, set()).difference_update(dirty)
                cached = Path(f"/proc/self/fd/{fd}").read_bytes()
                self.contents[inode] = self._merged(inode, cached, dirty)[: len(cached)]

        return sync

    def _merged(self, inode: int, cached: bytes, sectors: set[int]) -> bytes:
        """The content on the disk when these sectors have been written."""
        merged = bytearray(self.contents.get(inode, b""))
        for sector in sectors:
            at, piece = sector * SECTOR, cached[sector * SECTOR :][:SECTOR]
            merged.extend(bytes(max(0, at + len(piece) - len(merged))))
            merged[at : at + len(piece)] = piece
        return bytes(merged)

    def lose_power(self) -> None:
        cached = {e.name: e for e in os.scandir(self.folder) if e.name != LOCK}
        after: dict[str, bytes] = {}
        for name in {*self.names, *cached}:
            entry = cached.get(name)
            is_durable = self.names.get(name) == (entry and entry.inode())
            if entry is None or not (is_durable or self.random.random() < 0.5):
                if entry is None and self.random.random() < 0.5:  # its removal was not synced
                    after[name] = self.contents.get(self.names[name], b"")
                continue
            inode, whole = entry.inode(), Path(entry.path).read_bytes()
            unknown = sorted(self.unknown.get(inode, ()))
            after[name] = self._merged(
                inode, whole, {s for s in unknown if self.random.random() < 0.5}
            )
            if self.random.random() < 0.3:  # its size is on the disk, and not what was written
                after[name] = after[name].ljust(len(whole), b"\0")
        for name in cached:
            (self.folder / name).unlink()
        self.contents, self.dirty, self.unknown, self.names = {}, {}, {}, {}
        for name, content in after.items():
            (self.folder / name).write_bytes(content)
            inode = (self.folder / name).stat().st_ino
            self.contents[inode], self.names[name] = content, inode


class Life:
    """One process: it recovers, then appends numbered records until it dies."""

    def __init__(self, disk: Disk, seen: list[int]) -> None:
        self.disk, self.seen = disk, seen
        self.folder = StateFolder(disk.folder)
        try:
            recovery = Recovery(
                self.folder, ServerState(_core.Pool(1)), Attendance(), is_synced=True
            )
            recovery.run()
            number = recovery.next_number
            self.log = Log(disk.folder, number, STATE, is_synced=True)
        except BaseException:
            self.folder.close()
            raise
        self.appended = len(seen)
        self.acknowledged = 0

    def append(self) -> None:
        number = self.appended + 1
        self.log.append(("log.version", {"n": number, "pad": b"x" * (number * 97 % 1500)}, ()))
        self.appended = number

        def acknowledge(error: Exception | None) -> None:
            if error is None:
                self.acknowledged = max(self.acknowledged, number)

        self.log.when_kept(acknowledge)

    def wait(self) -> None:
        """Until all that was appended is kept, or the log has failed."""
        done = threading.Event()
        self.log.when_kept(lambda _: done.set())
        assert done.wait(20)

    def die(self) -> None:
        self.disk.is_off = True
        self.log.close()
        self.folder.close()
        self.disk.is_off = False


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The records that a recovery replays."""
    numbers = list[int]()

    def note(server: ServerState, attendance: Attendance, record: Record) -> None:
        del server, attendance
        if record[0] != "log.state":
            numbers.append(record[1]["n"])

    monkeypatch.setattr(recovery_module, "replay", note)
    return numbers


def run(disk: Disk, random: Random, seen: list[int]) -> None:
    """A history of some lives, and a last recovery without faults."""
    acknowledged, appended = 0, 0
    for faults in [True] * random.randint(1, 5) + [False]:
        seen.clear()
        if faults and random.random() < 0.2:
            disk.fails_in = random.randint(1, 4)  # in recovery
        try:
            life = Life(disk, seen)
        except (BadRequest, ResourceExhausted):  # of that sync; the next life tries again
            if random.random() < 0.5:
                disk.lose_power()
            continue
        finally:
            disk.fails_in = 0
        assert seen == list(range(1, len(seen) + 1))
        assert acknowledged <= len(seen) <= appended
        for _ in range(random.randint(0, 12) if faults else 0):
            if random.random() < 0.05:
                disk.fails_in = random.randint(1, 4)
            try:
                if random.random() < 0.2:
                    life.log.rotate([("log.state", {}, ())])
                else:
                    life.append()
            except (BadRequest, ResourceExhausted):  # of that sync, or one that has ended the log
                pass
            if random.random() < 0.3:
                life.wait()
        if random.random() < 0.5:
            life.wait()
        life.die()
        acknowledged, appended = max(acknowledged, life.acknowledged), life.appended
        if random.random() < 0.5:
            disk.lose_power()
            appended = max(appended, len(seen))


@pytest.mark.parametrize("part", pick(short=[0], long=list(range(10))))
def test_what_was_acknowledged_survives(
    tmp_path: Path, seen: list[int], monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    num_histories = pick(short=60, long=1000)
    for number in range(part * num_histories, (part + 1) * num_histories):
        random = Random(f"{SEED} {number}")
        print(f"seed {SEED}: history {number}")
        (folder := tmp_path / str(number)).mkdir()
        with monkeypatch.context() as patch:
            run(Disk(folder, random, patch), random, seen)
