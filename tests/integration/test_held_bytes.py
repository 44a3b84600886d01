"""What admitted peers make a server hold beyond their requests is within `held_bytes_max`.

Each attack asks for far more than the limit, with valid messages of a peer that has joined, over
real sockets.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import trireme as tr
from tests.jobs import InProcessServer
from trireme.errors import BadRequest, DeadlineExceeded, ResourceExhausted, Unavailable
from trireme.protocol.block_messages import ids_to_wire, map_to_wire
from trireme.protocol.routing import BucketMap
from trireme.rpc import Reply, RpcClient
from trireme.server.server_limits import parse_limits

MIB = 1 << 20
LIMIT = 16 * MIB
NUM_CALLS, CALL_BYTES = 64, 1 * MIB
EXHAUSTED = (
    r"held_bytes_max (is|leaves) \d+.*, found \d+.*; --limits or TRIREME_LIMITS of the server"
)
TABLE = tr.Table("t", dim=4)


class Peer:
    """A client with the job's token, that is worker 0 of 64."""

    def __init__(self, server: InProcessServer) -> None:
        self.server = server
        self.calls = itertools.count(1)
        self.client = RpcClient(name="peer")
        self.call("coord.join", self.joining())
        head, arrays = map_to_wire(BucketMap.even(("a:1",)))
        self.call("ps.map", {"map": head, "index": 0, "job": "j", "state": ""}, arrays)
        self.call("ps.create_table", {"schema": TABLE.schema.to_wire()})
        members = [[stream, 1, None] for stream in range(NUM_CALLS + 1)]
        self.call("ps.group", {"version": 1, "members": members, "staged": True})

    def call(
        self, method: str, body: dict[str, Any], arrays: tuple[Any, ...] = (), timeout_s: float = 20
    ) -> Reply:
        return self.client.call(self.server.endpoint, method, body, arrays, timeout_s=timeout_s)

    def leave_waiting(self, method: str, body: dict[str, Any], arrays: tuple[Any, ...]) -> None:
        """Call, and leave before the answer."""
        for timeout_s in (0.05, 0.5, 5.0):
            try:
                self.call(method, body, arrays, timeout_s=timeout_s)
            except DeadlineExceeded:
                return
            except Unavailable:  # not reached so soon, on a busy machine
                continue
        pytest.fail("expected a call that waits")

    def joining(self, worker: int = 0, token: str = "") -> dict[str, Any]:
        token = token or uuid.uuid4().hex
        return {"servers": ["a:1"], "worker": worker, "num_workers": 64, "token": token}

    def me(self) -> dict[str, int]:
        return {"worker": 0, "incarnation": 1, "call": next(self.calls)}


@pytest.fixture
def peer() -> Iterator[Peer]:
    server = InProcessServer(limits=parse_limits(f"held_bytes_max={LIMIT},table_bytes_max=64MiB"))
    with server.rpc:
        peer = Peer(server)
        yield peer
        peer.client.close()


def data() -> np.ndarray[Any, Any]:
    return np.ones(CALL_BYTES // 4, np.float32)


def gather(peer: Peer, number: int) -> None:
    body = {"pass": 0, "name": f"m{number}", "purpose": "x", "body": {}}
    peer.leave_waiting("coord.gather", {**body, **peer.me()}, (data(),))


def stage(peer: Peer, number: int) -> None:
    keys = np.arange(CALL_BYTES // 24, dtype=np.uint64)
    gradients = np.ones((len(keys), 4), np.float32)
    peer.call("ps.push", push_of(number), (keys, gradients))


def push_of(stream: int) -> dict[str, Any]:
    values = {
        **dict.fromkeys(("lr", "eps"), 0.1),
        **dict.fromkeys(("weight_decay", "l1", "l2", "beta1", "beta2"), 0.0),
        "lower": -1e9,
        "upper": 1e9,
        "step": 1,
    }
    table = {"table": "t", "class": 0, "values": values, "columns": []}
    return {
        "kind": "gradient",
        "stream": stream,
        "sequence": 1,
        "incarnation": 1,
        "step": 1,
        "staged": True,
        "computed_at": 0,
        "examples": 1,
        "position": [],
        "time": 0,
        "map": 1,
        "export": 0,
        "tables": [table],
        "groups": None,
        "absent": [],
        "clip": None,
    }


def pull(peer: Peer, number: int) -> None:
    """A pull that waits for others, in bounded."""
    keys = np.arange(CALL_BYTES // 8, dtype=np.uint64)
    pace = {"step": 3 + number, "bound": 1, "done": 0}
    body = {
        "tables": ["t"],
        "classes": [0],
        "blocks": False,
        "time": 0,
        "map": 1,
        "stream": 0,
        "staged": 0,
        "pace": pace,
        "norm": None,
    }
    peer.leave_waiting("ps.pull", body, (keys,))


def name_blocks(peer: Peer, number: int) -> None:
    ids = [f"{number}-{i}-{'x' * 200}@0" for i in range(3000)]
    body = {"are_placed": False, **peer.me()}
    peer.call("coord.add_blocks", body, tuple(ids_to_wire(ids)))


def state_facts(peer: Peer, number: int) -> None:
    body = {"fact": f"f{number}", "value": "x" * (CALL_BYTES // 2)}
    peer.call("coord.agree", {**body, **peer.me()})


@pytest.mark.parametrize("attack", [gather, stage, pull, name_blocks, state_facts])
def test_a_peer_cannot_make_a_server_hold_more_than_the_limit(
    peer: Peer, attack: Callable[[Peer, int], None]
) -> None:
    def attack_often() -> None:
        for number in range(NUM_CALLS):
            attack(peer, number)

    with pytest.raises(ResourceExhausted, match=EXHAUSTED):
        attack_often()
    assert peer.server.state.held.num_bytes <= LIMIT


def test_what_is_applied_is_held_no_more(peer: Peer) -> None:
    before = peer.server.state.held.num_bytes
    peer.call("ps.group", {"version": 2, "members": [[0, 1, None]], "staged": True})
    for step in (1, 2):
        push = {**push_of(0), "sequence": step, "step": step}
        peer.call("ps.push", push, (np.ones(1, np.uint64), np.ones((1, 4), np.float32)))
        assert peer.server.state.held.num_bytes > before
        body = {"tables": [], "classes": [], "blocks": False, "map": 1, "stream": 0}
        peer.call("ps.pull", {**body, "staged": step, "pace": None, "norm": None})
        assert peer.server.state.held.num_bytes == before


def test_a_push_that_comes_twice_counts_as_the_one_that_is_held(peer: Peer) -> None:
    stage(peer, 0)
    before = peer.server.state.held.num_bytes
    none = (np.empty(0, np.uint64), np.empty((0, 4), np.float32))
    peer.call("ps.push", push_of(0), none)
    assert peer.server.state.held.num_bytes == before


def test_the_marks_of_streams_count_as_bytes_of_tables(peer: Peer) -> None:
    def attack() -> None:
        for stream in range(1024):
            none = (np.empty(0, np.uint64), np.empty((0, 4), np.float32))
            peer.call("ps.push", {**push_of(stream), "staged": False}, none)
        for number in range(100):
            schema = tr.Table(f"t{number}", dim=4).schema
            peer.call("ps.create_table", {"schema": schema.to_wire()})

    with pytest.raises(ResourceExhausted, match="table_bytes_max is 67108864"):
        attack()


@pytest.mark.parametrize(
    ("method", "body"),
    [
        ("coord.published", {"id": "x" * 65, "mode": "full", "version": 1, "chain": {}}),
        ("coord.published", {"id": "x", "mode": "full", "version": 1, "chain": {"x" * 65: 1}}),
        ("coord.published", {"id": "x" * 65, "mode": "inference", "version": 1, "follows": ""}),
        (
            "coord.decide",
            {
                "id": "x",
                "commit": True,
                "loaded": {
                    "id": "x" * 65,
                    "version": 1,
                    "whole": True,
                    "chain": {},
                    "mode": "full",
                },
            },
        ),
        ("checkpoint.start", {"job": "x" * 257, "action": "count", "path": "a", "options": {}}),
    ],
)
def test_names_of_saves_are_bounded(peer: Peer, method: str, body: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match=r"of at most|chain: expected versions by id"):
        peer.call(method, body)


@pytest.mark.parametrize("size", [65, MIB // 2])
def test_names_of_processes_are_bounded(peer: Peer, size: int) -> None:
    with pytest.raises(BadRequest, match=f"field 'token' of at most 64 characters, .* of {size}"):
        peer.call("coord.join", peer.joining(1, "x" * size))
