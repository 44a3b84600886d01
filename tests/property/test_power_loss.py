"""The log on a simulated disk: what was acknowledged survives kills, power losses, failed syncs and
second faults during recovery, in order and once, and the server always starts again.
"""

from __future__ import annotations

import threading
from pathlib import Path
from random import Random

import pytest

from tests.long import pick
from tests.property.simulated_disk import Disk
from tests.seeds import SEED
from trireme import _core
from trireme.errors import BadRequest, ResourceExhausted
from trireme.server.attendance import Attendance
from trireme.server.log import recovery as recovery_module
from trireme.server.log.log import Log
from trireme.server.log.recovery import Recovery
from trireme.server.log.segment import Record
from trireme.server.log.state_folder import StateFolder
from trireme.server.state import ServerState

STATE = bytes(16)


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
        self.disk.kill()
        self.log.close()
        self.folder.close()


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
        disk.restart()
        if faults and random.random() < 0.2:
            disk.fails_in = random.randint(1, 4)  # in recovery
        if faults and random.random() < 0.4:
            disk.dies_in = random.randint(1, 40)
        try:
            life = Life(disk, seen)
        except (BadRequest, ResourceExhausted):  # of that sync; the next life tries again
            assert faults
            disk.kill()
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
                    life.log.rotate([("log.state", {}, ()), ("log.state_end", {}, ())])
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
            disk = Disk(folder, random, patch)
            run(disk, random, seen)
            disk.close()
