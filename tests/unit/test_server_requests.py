"""What a server refuses is refused whole: a typed error, and no table or block has changed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import trireme as tr
from trireme import _core
from trireme.errors import BadRequest, ResourceExhausted
from trireme.optim import values_of_group
from trireme.protocol.block_messages import specs_to_wire
from trireme.protocol.block_spec import BlockSpec
from trireme.protocol.job_limits import STREAMS_MAX
from trireme.protocol.routing import BucketMap
from trireme.protocol.wire import POSITION_MAX, BlocksPush, Push, TablePush
from trireme.rpc import Reply, Request
from trireme.server.requests import RequestHandlers
from trireme.server.state import ServerState

RULE = tr.optim.Adam(lr=0.1)
GROUP = {"lr": 0.1, "betas": [0.9, 0.999]}


class Served:
    """A server with tables t and u and one block under Adam."""

    def __init__(self) -> None:
        self.state = ServerState(_core.Pool(1))
        self.state.assignment.adopt("", BucketMap.even(("a:1",)).with_blocks(["w@0"]), 0)
        for name in ("t", "u"):
            self.state.create_table(tr.Table(name, dim=2, optimizer=RULE).schema)
        self.create_block(BlockSpec("w", 0, 4, 0))

    def create_block(self, spec: BlockSpec, groups: Sequence[Any] = (GROUP,)) -> None:
        shapes, arrays = specs_to_wire([spec])
        version = self.state.assignment.map().version
        body = {"map": version, "optimizer": "Adam", "groups": list(groups), "shapes": shapes}
        self.ask("ps.create_blocks", body, [*arrays, np.zeros(4, np.float32)])

    def ask(self, method: str, body: dict[str, Any], arrays: list[Any]) -> Any:
        request = Request(1, method, body, arrays, "test", "test", "", time.monotonic() + 10)
        return RequestHandlers(self.state).handlers()[method](request)

    def push(self) -> tuple[dict[str, Any], list[Any]]:
        """A good one."""
        values = values_of_group(RULE.group(), 1)
        keys, gradients = np.array([7], np.uint64), np.ones((1, 2), np.float32)
        push = Push(
            stream=0, sequence=1, incarnation=1, step=0, staged=False, computed_at=0, examples=1,
            position=(3, 4), time=0, map_version=self.state.assignment.map().version,
            tables=[TablePush(name, keys, gradients, values) for name in ("t", "u")],
            blocks=BlocksPush([GROUP], np.ones(4, np.float32), []),
        )  # fmt: skip
        return push.to_wire()

    def contents(self) -> tuple[Any, ...]:
        rows = [self.state.tables[name].rows.rows for name in ("t", "u")]
        return (*rows, self.state.blocks.read(["w@0"]).tolist(), self.state.streams.num_pushes)


@pytest.fixture
def served() -> Served:
    return Served()


def values_of(body: dict[str, Any]) -> dict[str, Any]:
    """Of the second table of the push."""
    values: dict[str, Any] = body["tables"][1]["values"]
    return values


SPOILED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no step": (lambda b: values_of(b).update(step=0), "step"),
    "a negative rate": (lambda b: values_of(b).update(eps=-1.0), "eps"),
    "a step beyond 64 bits": (lambda b: values_of(b).update(step=2**63), "'step' of type int"),
    "a table that is no map": (lambda b: b.update(tables=[1]), "a map with field 'table', found 1"),
    "words for a position": (lambda b: b.update(position=["x"]), "'position' as a list of int"),
    "a long position": (
        lambda b: b.update(position=[1] * (POSITION_MAX + 1)),
        "with at most 16 entries",
    ),
    "a sequence beyond 64 bits": (lambda b: b.update(sequence=2**63), "'sequence' of type int"),
    "too many groups": (lambda b: b.update(groups=[GROUP, GROUP]), "values of 1 groups, found 2"),
    "groups that are no maps": (lambda b: b.update(groups=[1]), "'groups' as a list of dict"),
    "an unknown value": (lambda b: b.update(groups=[{"mu": 0.1}]), "Adam knows no mu"),
    "one beta": (
        lambda b: b.update(groups=[{"betas": 0.9}]),
        "expected betas like",
    ),
    "no rate": (lambda b: b.update(groups=[{"lr": None}]), "expected lr like 0.1, found None"),
    "absent blocks by number": (lambda b: b.update(absent=[1]), "'absent' as a list of str"),
}


@pytest.mark.parametrize(("spoil", "message"), SPOILED.values(), ids=SPOILED.keys())
def test_a_push_that_is_refused_changes_nothing(
    served: Served, spoil: Callable[[dict[str, Any]], Any], message: str
) -> None:
    before = served.contents()
    body, arrays = served.push()
    spoil(body)
    with pytest.raises(BadRequest, match=message):
        served.ask("ps.push", body, arrays)
    assert served.contents() == before
    served.ask("ps.push", *served.push())
    assert served.contents() != before
    assert served.contents()[:2] == (1, 1)


@pytest.mark.parametrize("member", [1, [0], [0, 1, "end"], ["0", 1, None]])
def test_a_group_with_another_member_than_expected_is_refused(served: Served, member: Any) -> None:
    with pytest.raises(BadRequest, match="members"):
        served.ask("ps.group", {"version": 1, "members": [member]}, [])


def test_blocks_of_a_group_that_is_not_there_do_not_spoil_later_ones(served: Served) -> None:
    with pytest.raises(BadRequest, match="expected a group below 1"):
        served.create_block(BlockSpec("v", 0, 4, 7))
    served.create_block(BlockSpec("v", 0, 4, 0))
    assert served.state.blocks.size_of(["v@0"]) == 4


def test_a_push_that_is_repeated_counts_once(served: Served) -> None:
    served.ask("ps.push", *served.push())
    state, staleness = served.contents(), dict(served.state.streams.staleness)
    served.ask("ps.push", *served.push())
    assert served.contents() == state
    assert dict(served.state.streams.staleness) == staleness == {0: 1}


def test_the_last_stream_may_push_and_one_beyond_it_may_not(served: Served) -> None:
    body, arrays = served.push()
    with pytest.raises(BadRequest, match="expected 0 <= stream < 4096"):
        served.ask("ps.push", {**body, "stream": STREAMS_MAX}, arrays)
    served.ask("ps.push", {**body, "stream": STREAMS_MAX - 1}, arrays)
    assert served.contents()[:2] == (1, 1)


def test_blocks_with_groups_that_are_no_maps_are_refused(served: Served) -> None:
    with pytest.raises(BadRequest, match="'groups' as a list of dict"):
        served.create_block(BlockSpec("v", 0, 4, 0), [1])


def test_a_pull_whose_reply_would_be_too_large_takes_no_memory(served: Served) -> None:
    keys = np.arange(1000, dtype=np.uint64)
    body = {
        "tables": ["t"], "classes": [0], "blocks": True, "time": 0, "stream": 0, "staged": 0,
        "map": served.state.assignment.map().version,
    }  # fmt: skip
    request = Request(1, "ps.pull", body, [keys], "test", "test", "", time.monotonic() + 10)
    pull = RequestHandlers(served.state).handlers()["ps.pull"]
    size = 4 * (2 * 1000 + 4)  # of the rows and the block
    with pytest.raises(ResourceExhausted, match=f"at most {size - 1} bytes, .* found {size}"):
        pull(replace(request, reply_bytes_max=size - 1))
    assert isinstance(pull(replace(request, reply_bytes_max=size)), Reply)
