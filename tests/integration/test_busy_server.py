"""A server that writes a snapshot answers all that does not wait for the snapshot."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import trireme as tr
from tests.jobs import InProcessServer, in_threads
from trireme.errors import DeadlineExceeded
from trireme.job.durability import Durability, kept
from trireme.protocol.block_messages import map_to_wire
from trireme.protocol.routing import BucketMap
from trireme.rpc import Reply, RpcClient
from trireme.server.log import durable_journal

NUM_CALLERS = 4  # more than a server has threads for requests
SHRINK = {"slices": 1, "slice": 0, "time": 0, "day_over": False}


class BusyServer:
    """Its snapshots begin, and do not end before `may_end` is set."""

    def __init__(self, folder: Path, patched: pytest.MonkeyPatch) -> None:
        self.has_begun, self.may_end = threading.Event(), threading.Event()
        write = durable_journal.write_snapshot

        def write_later(*args: Any) -> int:
            self.has_begun.set()
            assert self.may_end.wait(60)
            return write(*args)

        patched.setattr(durable_journal, "write_snapshot", write_later)
        self._exit = ExitStack()
        self.server = server = InProcessServer()
        durability = Durability(mode="process", folder=folder, log_bytes=1)
        parts = server.state, server.coordinator, server.attendance
        self._exit.enter_context(kept(durability, *parts))
        self._exit.enter_context(server.rpc)
        head, arrays = map_to_wire(BucketMap.even((server.endpoint,)))
        self.call("ps.map", {"map": head, "index": 0, "job": "j", "state": ""}, arrays)
        self.call("ps.create_table", {"schema": tr.Table("t", dim=4).schema.to_wire()})
        assert self.has_begun.wait(60)

    def call(self, method: str, body: dict[str, Any], arrays: Any = (), *, s: float = 30) -> Reply:
        """From a connection of its own."""
        with RpcClient(name="test") as client:
            return client.call(self.server.endpoint, method, body, arrays, timeout_s=s)

    def close(self) -> None:
        self.may_end.set()
        self._exit.close()


@pytest.fixture
def busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BusyServer]:
    server = BusyServer(tmp_path, monkeypatch)
    yield server
    server.close()


@pytest.mark.parametrize(
    ("method", "body"),
    [("policy.shrink", SHRINK), ("import.finish", {"id": "a", "commit": True})],
)
def test_calls_that_wait_for_a_snapshot_leave_threads_for_others(
    busy: BusyServer, method: str, body: dict[str, Any]
) -> None:
    def wait() -> Reply:
        return busy.call(method, body)

    def others() -> Reply:
        with pytest.raises(DeadlineExceeded, match="waits for the snapshot"):
            busy.call(method, body, s=3)
        reply = busy.call("ps.stats", {})
        busy.may_end.set()
        return reply

    *_, stats = in_threads([*[wait] * NUM_CALLERS, others])
    assert stats.body["tables"].keys() == {"t"}
