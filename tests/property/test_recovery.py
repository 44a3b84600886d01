"""Random requests to a server that restarts now and then, with and without snapshots, and to one
that does not: both hold the same bytes.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

import trireme as tr
from tests.long import pick
from tests.seeds import SEED, named_in_failure
from tests.tables import snapshot
from trireme import _core
from trireme.coordinator.coordinator import Coordinator
from trireme.job.durability import Durability, kept
from trireme.job.handlers import handlers_of
from trireme.optim import values_of_group
from trireme.protocol.block_messages import map_to_wire, specs_to_wire
from trireme.protocol.block_spec import BlockSpec
from trireme.protocol.routing import BucketMap
from trireme.protocol.wire import BlocksPush, Push, TablePush
from trireme.rpc import Reply, Request
from trireme.server.attendance import Attendance
from trireme.server.log.recovery import RecordName
from trireme.server.state import ServerState

NUM_KEYS, DAY = 300, 86_400
NUM_REQUESTS = pick(short=60, long=2000)
TABLES = {
    "plain": tr.Table("plain", dim=3, optimizer=tr.optim.Adam(lr=0.1), seed=5),
    "scored": tr.Table(
        "scored",
        dim=2,
        optimizer=tr.optim.Adagrad(lr=0.1),
        policy=tr.policy.ScorePolicy(
            delete_after_unseen_days=2, show_click=tr.policy.ShowClick("show", "click")
        ),
        admit=tr.policy.CountFilter(2),
        dtype="bfloat16",
    ),
}
SPECS = [BlockSpec("w", 0, 8, 0), BlockSpec("v", 0, 5, 1)]
GROUPS = [{"lr": 0.1, "betas": [0.9, 0.999]}, {"lr": 0.2, "betas": [0.9, 0.99]}]


class Served:
    """A server without a network; `folder` None: one that keeps nothing."""

    def __init__(self, folder: Path | None) -> None:
        self.folder, self.skips = folder, frozenset[RecordName]()
        self.open()

    def open(self) -> None:
        self._exit = ExitStack()
        self.state, coordinator, attendance = (
            ServerState(_core.Pool(1)),
            Coordinator(),
            Attendance(),
        )
        durability = Durability()
        if self.folder is not None:
            durability = Durability(
                mode="process", folder=self.folder, log_bytes=1 << 40, skips=self.skips
            )
        self._exit.enter_context(kept(durability, self.state, coordinator, attendance))
        self.handlers = handlers_of(
            self.state, coordinator, attendance.handlers(), self.folder or Path("/")
        )

    def restart(self) -> None:
        if self.folder is not None:
            self._exit.close()
            self.open()

    def snapshot(self) -> None:
        with self.state.journal.replacing():
            pass

    def ask(self, method: str, body: dict[str, Any], arrays: list[Any] | None = None) -> None:
        request = Request(1, method, body, arrays or [], "test", "test", "", time.monotonic() + 10)
        answer = self.handlers[method](request)
        assert answer is None or isinstance(answer, Reply)

    def content(self) -> dict[str, Any]:
        state = self.state
        return {
            **{name: snapshot(table.rows) for name, table in state.tables.items()},
            "removed": [
                state.tables["scored"].rows.snapshot(bucket, 2).removed.tolist()
                for bucket in range(0, 4096, 64)
            ],
            "blocks": {
                spec.id: (
                    {n: t.tolist() for n, t in state.blocks.state_of(spec.id).items()},
                    state.blocks.marks_of(spec.id),
                )
                for spec in state.blocks.specs()
            },
            "streams": state.applied_streams(),
            "applied": state.staging.applied,
            "paces": state.pacing.state(),
            "staleness": dict(state.streams.staleness),
            "version": [table.rows.version for table in state.tables.values()],
            "pushes": state.streams.num_pushes,
        }

    def close(self) -> None:
        self._exit.close()


class Requests:
    """Random requests of two streams, the same to every server."""

    def __init__(self, random: Random, mode: str) -> None:
        self.random, self.rng = random, np.random.default_rng(random.getrandbits(32))
        self.mode = mode
        self.sequences = {0: 0, 1: 0}
        self.step = 0
        self.time = 10 * DAY
        self.version = 1

    def first(self) -> list[tuple[str, dict[str, Any], list[Any]]]:
        bucket_map = BucketMap.even(("a:1",)).with_blocks([spec.id for spec in SPECS])
        self.map = bucket_map.version
        join = {"servers": ["a:1"], "worker": 0, "num_workers": 1, "token": "a"}
        head, arrays = map_to_wire(bucket_map)
        requests: list[tuple[str, dict[str, Any], list[Any]]] = [
            ("coord.join", join, []),
            ("ps.map", {"map": head, "index": 0, "job": "j", "state": ""}, list(arrays)),
        ]
        for table in TABLES.values():
            requests.append(("ps.create_table", {"schema": table.schema.to_wire()}, []))
        shapes, specs = specs_to_wire(SPECS)
        blocks = {"map": self.map, "optimizer": "Adam", "groups": GROUPS, "shapes": shapes}
        requests.append(("ps.create_blocks", blocks, [*specs, np.ones(13, np.float32)]))
        members = [[0, 1, None], [1, 1, None]]
        if self.mode in ("sync", "bounded"):
            group = {"version": 1, "members": members, "staged": self.mode == "sync"}
            requests.append(("ps.group", group, []))
        return requests

    def next(self) -> list[tuple[str, dict[str, Any], list[Any]]]:
        kind = self.random.random()
        self.time += self.random.randrange(DAY // 10)
        if kind < 0.05:
            body = {"slices": 1, "slice": 0, "time": self.time, "day_over": kind < 0.02}
            return [("policy.shrink", body, [])]
        if kind < 0.07:
            keys = self.rng.choice(NUM_KEYS, 20, replace=False).astype(np.uint64)
            return [("ps.remove", {"table": self.random.choice([*TABLES])}, [keys])]
        if kind < 0.1:
            self.version += 1
            return []
        if self.mode != "sync":
            stream = self.random.randrange(2)
            step = self.sequences[stream] + 1 if self.mode == "bounded" else 0
            return [self.push(stream, step)]
        self.step += 1
        pushes = [self.push(stream, self.step) for stream in (0, 1)]
        return [*pushes, ("declare", {"step": self.step}, [])]

    def push(self, stream: int, step: int) -> tuple[str, dict[str, Any], list[Any]]:
        self.sequences[stream] += 1
        tables = []
        for name, table in TABLES.items():
            keys = self.rng.choice(NUM_KEYS, self.random.randrange(40), replace=False)
            columns = {}
            if name == "scored":
                columns["show_click"] = self.rng.random((len(keys), 2), np.float32)
                columns["feature"] = self.rng.integers(0, 9, len(keys), np.uint32)
                columns["count"] = np.ones(len(keys), np.uint32)
            gradients = self.rng.normal(size=(len(keys), table.dim)).astype(np.float32)
            values = values_of_group(table.optimizer.group(), max(step, 1))
            tables.append(TablePush(name, keys.astype(np.uint64), gradients, values, columns))
        gradient = self.rng.normal(size=13).astype(np.float32)
        absent = [SPECS[1].id] if self.random.random() < 0.3 else []
        push = Push(
            stream=stream, sequence=self.sequences[stream], incarnation=1, step=step,
            staged=self.mode == "sync", computed_at=0, examples=8,
            position=(self.sequences[stream],),
            time=self.time, map_version=self.map, tables=tables,
            blocks=BlocksPush(GROUPS, gradient, absent),
            kind="delta" if self.mode == "geo" else "gradient",
        )  # fmt: skip
        return "ps.push", *push.to_wire()


@pytest.mark.parametrize("mode", ["async", "sync", "bounded", "geo"])
def test_a_restarted_server_holds_the_same_bytes(tmp_path: Path, mode: str) -> None:
    random = Random(f"{SEED} recovery {mode}")
    number = 0
    with named_in_failure(lambda: f"request {number}"):
        requests = Requests(random, mode)
        servers = [Served(None), Served(tmp_path)]
        for request in requests.first():
            for server in servers:
                server.ask(*request)
        for number in range(NUM_REQUESTS):  # noqa: B007 a failure names it
            for method, body, arrays in requests.next():
                for server in servers:
                    happens = random.random()
                    if happens < 0.1:
                        server.restart()
                    elif happens < 0.15:
                        server.snapshot()
                    if method == "declare":  # with their next pull, which is repeated if need be
                        for stream in (1, 0):
                            server.state.staging.declare(stream, body["step"])
                        server.state.apply_steps()
                    else:
                        server.ask(method, body, arrays)
            for server in servers:
                server.state.raise_version(requests.version)
        servers[1].restart()
        actual, expected = (server.content() for server in reversed(servers))
        for name in expected:
            assert actual[name] == expected[name], name
        for server in servers:
            server.close()
