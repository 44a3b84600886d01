"""Pushes that take more of the memory of a table than claims may: no push, and no step of sync,
waits for room that a part of it holds, and fails with half of its rows updated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trireme as tr
from tests.integration.pushed_server import RULE, PushedServer
from tests.seeds import SEED
from trireme.optim import values_of_group
from trireme.protocol.membership import Member, PassMembers
from trireme.protocol.wire import Push, TablePush
from trireme.rpc import Request
from trireme.server.row_tier import RowTier

DIMS = {"user": 16, "hour": 2, "item": 40}
NUM_KEYS = 60_000  # of each feature
TIMEOUT_S = 10.0

Batch = Sequence[np.ndarray[Any, Any]]
"""Keys of each row class."""


class Server(PushedServer):
    """A server with a table of three row classes, most of whose rows are on SSD."""

    def __init__(self, tier: RowTier | None) -> None:
        super().__init__(tier)
        table = tr.Table("ids", dims=DIMS, salt=True, optimizer=RULE)
        self.state.create_table(table.schema)
        self.rows = self.state.tables["ids"].rows
        self.rng = np.random.default_rng(SEED)
        for _ in range(20):
            self.push_batch(self.batch(1500))

    def batch(self, size: int) -> Batch:
        features = range(len(DIMS))
        return [
            self.rng.choice(NUM_KEYS, size, replace=False).astype(np.uint64) + feature * NUM_KEYS
            for feature in features
        ]

    def push_batch(self, batch: Batch, stream: int = 0, step: int = 0) -> None:
        self._num_pushes += 1
        values = values_of_group(RULE.group(), 1)
        parts = [
            TablePush("ids", keys, np.ones((len(keys), dim), np.float32), values, {}, row_class)
            for row_class, (keys, dim) in enumerate(zip(batch, self.rows.dims, strict=True))
        ]
        push = Push(
            stream=stream, sequence=step or self._num_pushes, incarnation=1, step=step,
            staged=step > 0, computed_at=0, examples=8, position=(), time=0,
            map_version=self.state.assignment.map().version, tables=parts, blocks=None,
        )  # fmt: skip
        self.state.push(push, self.request("ps.push", *push.to_wire()))

    def request(self, method: str, body: dict[str, Any], arrays: list[Any]) -> Request:
        return Request(1, method, body, arrays, "test", "test", "", float("inf"))

    def make_step(self, batches: Sequence[Batch]) -> None:
        """Step 1 of sync, of a batch of each of some streams."""
        members = {stream: Member(1, None) for stream in range(1, len(batches) + 1)}
        members_request = self.request("ps.group", {}, [])
        self.state.adopt_members(PassMembers(1, members, staged=True), members_request)
        for stream, batch in zip(members, batches, strict=True):
            self.push_batch(batch, stream, step=1)
        with self.state.journal.pushing():
            for stream in members:
                self.state.staging.declare(stream, 1)
            self.state.staging.apply_complete()

    def content(self) -> dict[str, np.ndarray[Any, Any]]:
        parts = [self.rows.snapshot(bucket) for bucket in range(4096)]
        keys = np.concatenate([part.keys for part in parts])
        rows = np.concatenate([part.rows for part in parts])
        order = np.argsort(keys)
        return {"keys": keys[order], "rows": rows[order]}


@contextmanager
def served(memory: int, folder: Path) -> Iterator[tuple[Server, Server]]:
    """Two servers with the same rows: some on SSD, and all in memory. Asserts that they still have
    the same in the end.
    """
    tier = RowTier(memory << 20, [folder], TIMEOUT_S)
    server, in_memory = Server(tier), Server(None)
    yield server, in_memory
    expected, actual = in_memory.content(), server.content()
    for name, values in expected.items():
        np.testing.assert_array_equal(actual[name], values)
    assert server.tier_of("ids")["rows"] > 0
    server.state.tables.clear()
    del server.rows
    tier.close()


def test_a_push_of_several_row_classes_is_applied_whole_if_a_part_of_it_could_be_claimed(
    tmp_path: Path,
) -> None:
    with served(14, tmp_path) as servers:
        for server in servers:
            server.push_batch(server.batch(17_000))
            server.push_batch(server.batch(10))


@pytest.mark.parametrize(("memory", "sizes"), [(14, (8000, 17_000)), (18, (8000, 8000))])
def test_a_step_is_applied_whole_if_the_pushes_of_some_workers_could_be_claimed(
    tmp_path: Path, memory: int, sizes: Sequence[int]
) -> None:
    with served(memory, tmp_path) as servers:
        for server in servers:
            server.make_step([server.batch(size) for size in sizes])
            assert server.state.staging.applied == 1
