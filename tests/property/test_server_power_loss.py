"""A whole server on a simulated disk: its log, snapshots and coordinator. What was acknowledged
survives kills at any moment, power losses and failed syncs, once, and it always starts again.
"""

from __future__ import annotations

import contextlib
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

import msgpack
import numpy as np
import pytest

import trireme as tr
from tests.long import pick
from tests.property.simulated_disk import Disk
from tests.seeds import SEED
from trireme import _core
from trireme.coordinator.coordinator import READ_ONLY, Coordinator
from trireme.errors import BadRequest, ResourceExhausted, TriremeError
from trireme.job.durability import Durability, kept
from trireme.job.handlers import handlers_of
from trireme.optim import values_of_group
from trireme.protocol.block_messages import map_to_wire, specs_to_wire
from trireme.protocol.block_spec import BlockSpec
from trireme.protocol.routing import BucketMap
from trireme.protocol.wire import BlocksPush, Push, TablePush
from trireme.rpc import Deferred, Reply, Request
from trireme.server.attendance import Attendance
from trireme.server.log.state_folder import COORDINATOR
from trireme.server.state import ServerState
from trireme.storage.document import Document

NUM_KEYS, STREAMS, WORKERS = 40, (0, 1), (0, 1)
TABLE = tr.Table(
    "t", dim=1, optimizer=tr.optim.SGD(lr=1.0), initializer=tr.initializer.Constant(0.0), seed=1
)
SPEC = BlockSpec("w", 0, 3, 0)
MAP = BucketMap.even(("a:1",)).with_blocks([SPEC.id])
DISK_ERRORS = (BadRequest, ResourceExhausted)


def packed_whole(state: Any) -> bytes:
    """The coordinator's state, with the parts that have files of their own."""
    packed: bytes = msgpack.packb(state, default=lambda part: part())
    return packed


def keys_of(stream: int, sequence: int) -> Any:
    keys = np.random.default_rng([stream, sequence]).choice(NUM_KEYS, 5, replace=False)
    return keys.astype(np.uint64)


def push_of(stream: int, sequence: int) -> Push:
    """It adds 1 to some rows, and to the block."""
    keys = keys_of(stream, sequence)
    values = values_of_group(TABLE.optimizer.group(), 1)
    rows = TablePush("t", keys, np.full((len(keys), 1), -1, np.float32), values, {})
    return Push(
        stream=stream, sequence=sequence, incarnation=1, step=0, staged=False, computed_at=0,
        examples=1, position=(sequence,), time=0, map_version=MAP.version, tables=[rows],
        blocks=BlocksPush([{"lr": 1.0}], np.full(SPEC.size, -1, np.float32), []), kind="gradient",
    )  # fmt: skip


class Promises:
    """What a server has acknowledged, over all of its lives.

    states: of the coordinator: those that it may have after a restart. The first is acknowledged.
    """

    def __init__(self) -> None:
        self.is_set_up = False
        self.acknowledged = dict.fromkeys(STREAMS, 0)
        self.sent = dict.fromkeys(STREAMS, 0)
        self.states: list[bytes | None] = [None]
        self.versions = 0  # of saves


class Life:
    """One process of the server. It keeps what it trusts: all that it recovers is acknowledged."""

    def __init__(self, disk: Disk, promises: Promises, log_bytes: int) -> None:
        self.disk, self.promises = disk, promises
        self.state, self.coordinator = ServerState(_core.Pool(1)), Coordinator()
        attendance, folder = Attendance(), disk.folder / "jobs" / "state"
        durability = Durability(mode="machine", folder=folder, log_bytes=log_bytes)
        self.exit = ExitStack()
        self.exit.enter_context(kept(durability, self.state, self.coordinator, attendance))
        self.handlers = handlers_of(self.state, self.coordinator, attendance.handlers(), folder)
        self.check(Document(folder / COORDINATOR, is_synced=True).read())

    def check(self, saved: Any) -> None:
        promises = self.promises
        last = {stream: entry for stream, entry, _ in self.state.applied_streams()}
        last = {stream: last.get(stream, 0) for stream in STREAMS}
        for stream in STREAMS:
            assert promises.acknowledged[stream] <= last[stream] <= promises.sent[stream], stream
        expected = np.zeros(NUM_KEYS, np.float32)
        for stream in STREAMS:
            for sequence in range(1, last[stream] + 1):
                expected[keys_of(stream, sequence).astype(int)] += 1
        if promises.is_set_up or self.state.tables:
            table, keys = self.state.tables["t"], np.arange(NUM_KEYS, dtype=np.uint64)
            rows, _ = table.read(0, keys, 0, self.state.pool)
            assert rows.ravel().tolist() == expected.tolist()
        if promises.is_set_up:
            block = self.state.blocks.read([SPEC.id])
            assert block.tolist() == [sum(last.values())] * SPEC.size
        packed = None if saved is None else msgpack.packb(saved)
        assert packed in promises.states
        promises.states, promises.acknowledged, promises.sent = [packed], last, {**last}

    def ask(self, method: str, body: dict[str, Any], arrays: Any = ()) -> Reply | Deferred:
        request = Request(1, method, body, [*arrays], "test", "test", "", time.monotonic() + 10)
        answer = self.handlers[method](request)
        assert answer is not None
        return answer

    def set_up(self) -> None:
        """Raises an error of the disk."""
        for worker in WORKERS:
            self.coordinate(
                "coord.join",
                {
                    "servers": ["a:1"],
                    "worker": worker,
                    "num_workers": 2,
                    "token": f"first {worker}",
                },
            )
        zeros = np.zeros(SPEC.size, np.float32)
        (head, columns), (shapes, specs) = map_to_wire(MAP), specs_to_wire([SPEC])
        blocks = {"map": MAP.version, "optimizer": "SGD", "groups": [{"lr": 1.0}]}
        for method, body, arrays in (
            ("ps.map", {"map": head, "index": 0, "job": "j", "state": ""}, list(columns)),
            ("ps.create_table", {"schema": TABLE.schema.to_wire()}, []),
            ("ps.create_blocks", {**blocks, "shapes": shapes}, [*specs, zeros]),
        ):
            self.ask(method, body, arrays)
        self.state.journal.wait_kept()
        self.promises.is_set_up = True

    def push(self, stream: int) -> None:
        sequence = {s: last for s, last, _ in self.state.applied_streams()}.get(stream, 0) + 1
        self.promises.sent[stream] = sequence
        body, arrays = push_of(stream, sequence).to_wire()
        answer = self.ask("ps.push", body, arrays)
        assert isinstance(answer, Deferred)

        def receive(answer: Any) -> None:
            if isinstance(answer, Reply):
                self.promises.acknowledged[stream] = sequence

        answer.bind(receive)

    def snapshot(self) -> None:
        with self.state.journal.replacing():
            pass

    def wait(self) -> None:
        """Until everything is kept, or the log has failed."""
        done = threading.Event()
        self.state.journal.when_kept(lambda _: done.set())
        assert done.wait(20)

    # ---- calls to the coordinator ----

    def coordinate(self, method: str, body: dict[str, Any]) -> Reply | None:
        """Call it; the state that an answer relies on is kept."""
        answers: list[Any] = []
        answer = self.ask(method, body)
        if isinstance(answer, Deferred):
            answer.bind(answers.append)
        else:
            answers.append(answer)
        if not answers:
            return None
        if isinstance(answers[0], TriremeError):
            raise answers[0]
        del self.promises.states[:-1]
        if method not in READ_ONLY:
            assert self.promises.states[0] == packed_whole(self.coordinator._state())
        return answers[0]

    def coordinate_somehow(self, random: Random) -> None:
        worker = random.choice(WORKERS)
        records = self.coordinator._workers.records
        if worker not in records:
            return
        record = records[worker]
        me = {"worker": worker, "incarnation": record.incarnation, "call": record.call + 1}
        kind = random.randrange(8)
        if kind == 0:
            token = {"token": f"{worker} {random.random()}"}
            join = {"servers": ["a:1"], "worker": worker, "num_workers": 2, **token}
            self.coordinate("coord.join", join)
        elif kind == 1:
            mode = {"mode": "full"}
            answer = self.coordinate("coord.export", mode)
            assert answer is not None
            assert answer.body["version"] > self.promises.versions
            self.promises.versions = answer.body["version"]
        elif kind == 2:
            version = self.promises.versions
            published = {"id": f"{version:032x}", "mode": "full", "version": version, "chain": {}}
            self.coordinate("coord.published", published)
        elif kind == 3:
            self.coordinate("coord.chain", {})
        elif kind in (4, 5):
            together = record.passes % 2 == 0
            begin = {**me, "pass": record.passes + 1, "together": together, "note": [record.passes]}
            self.coordinate("coord.begin_pass", begin)
        else:
            name = {"pass": record.passes, "name": f"at {record.passes}", "purpose": "test"}
            self.coordinate("coord.gather", {**me, **name, "body": {"from": worker}})

    def live(self, random: Random, share: float) -> None:
        """share: of its calls that go to the coordinator."""
        if random.random() < 0.05:
            self.disk.fails_in = random.randint(1, 20)
        for _ in range(random.randint(0, 12)):
            with contextlib.suppress(*DISK_ERRORS):
                if not self.promises.is_set_up:
                    self.set_up()
                elif random.random() < share:
                    self.coordinate_somehow(random)
                elif random.random() < 0.25:
                    self.snapshot()
                else:
                    self.push(random.choice(STREAMS))
            if random.random() < 0.2:
                self.wait()
        if random.random() < 0.5:
            self.wait()

    def end(self) -> None:
        self.disk.kill()
        self.exit.close()


def run(disk: Disk, random: Random, share: float) -> None:
    """A history of some lives, and a last recovery without faults."""
    promises = Promises()
    written = Document.write

    def write(document: Document, value: Any) -> None:
        if document.path.name == COORDINATOR:
            promises.states.append(packed_whole(value))
        written(document, value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Document, "write", write)
        for has_faults in [True] * random.randint(1, 5) + [False]:
            disk.restart()
            if has_faults and random.random() < 0.6:
                disk.dies_in = random.randint(1, random.choice((20, 150)))  # early: in recovery
            elif has_faults and random.random() < 0.5:
                disk.renames_left = random.randint(1, 8)
            if has_faults and random.random() < 0.1:
                disk.fails_in = random.randint(1, 8)  # in recovery
            try:
                life = Life(disk, promises, random.choice((1 << 40, 2000)))
            except DISK_ERRORS:  # the next life tries again
                assert has_faults
            else:
                if has_faults:
                    life.live(random, share)
                life.end()
            disk.kill()
            if random.random() < 0.5:
                disk.lose_power()


PARTS = {"snapshots": 0.1, "coordinator": 0.8}


@pytest.mark.parametrize("of_coordinator", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("part", pick(short=[0], long=list(range(25))))
def test_what_a_server_acknowledged_survives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int, of_coordinator: float
) -> None:
    num_histories = pick(short=10, long=100)
    for number in range(part * num_histories, (part + 1) * num_histories):
        random = Random(f"{SEED} {number}")
        print(f"seed {SEED}: history {number}")
        (folder := tmp_path / str(number)).mkdir()
        with monkeypatch.context() as patch:
            disk = Disk(folder, random, patch)
            run(disk, random, of_coordinator)
            disk.close()
