"""While a step of sync is applied, and while pulls that waited are answered, other requests go on:
rows on SSD wait for a disk. And a staged push has what it needs: its step needs no disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest

import trireme as tr
from tests.conditions import WAIT_S
from trireme import _core
from trireme.optim import values_of_group
from trireme.protocol.membership import Member, PassMembers
from trireme.protocol.routing import BucketMap
from trireme.protocol.wire import Push, TablePush
from trireme.rpc import Deferred, Reply, Request
from trireme.server.requests import RequestHandlers
from trireme.server.row_tier import RowTier
from trireme.server.state import ServerState

DIM, NUM_KEYS, STREAMS = 16, 60_000, 2
RULE = tr.optim.SGD(lr=1.0)


class Served:
    """A server of two streams in sync, most of whose rows are on SSD."""

    def __init__(self, folder: Path) -> None:
        self.tier = RowTier(6 << 20, [folder])
        self.state = ServerState(_core.Pool(1), tier=self.tier)
        self.state.assignment.adopt("", BucketMap.even(("a:1",)), 0)
        table = tr.Table("t", dim=DIM, optimizer=RULE, initializer=tr.initializer.Constant(0.0))
        self.state.create_table(table.schema)
        self.rows = self.state.tables["t"].rows
        self.pool = _core.Pool(1)
        values = _core.RuleValues(lr=1.0)
        for number, keys in enumerate(np.array_split(np.arange(NUM_KEYS, dtype=np.uint64), 60)):
            ones = -np.ones((len(keys), DIM), np.float32)
            self.rows.update(keys, ones, [(7, number + 1)], values, self.pool)
        members = {stream: Member(1, None) for stream in range(STREAMS)}
        request = Request(1, "ps.group", {}, [], "test", "test", "", float("inf"))
        self.state.adopt_members(PassMembers(1, members, staged=True), request)

    def ask(self, method: str, body: dict[str, Any], arrays: Any = ()) -> Any:
        request = Request(1, method, body, list(arrays), "test", "test", "", float("inf"))
        return RequestHandlers(self.state).handlers()[method](request)

    def push(self, stream: int, step: int, keys: np.ndarray) -> None:
        ones = -np.ones((len(keys), DIM), np.float32)
        push = Push(
            stream=stream, sequence=step, incarnation=1, step=step, staged=True, computed_at=0,
            examples=8, position=(), time=0, map_version=self.state.assignment.map().version,
            tables=[TablePush("t", keys, ones, values_of_group(RULE.group(), 1))], blocks=None,
        )  # fmt: skip
        self.ask("ps.push", *push.to_wire())

    def pull(self, stream: int, staged: int, keys: np.ndarray) -> Any:
        body = {
            "map": self.state.assignment.map().version, "tables": ["t"], "classes": [0],
            "blocks": False, "stream": stream, "staged": staged,
        }  # fmt: skip
        return self.ask("ps.pull", body, [keys])

    def use_others(self) -> None:
        """So that rows which nobody needs leave memory."""
        rows = np.empty((1000, DIM), np.float32)
        for _ in range(3):
            for keys in np.array_split(np.arange(10_000, NUM_KEYS, dtype=np.uint64), 50):
                self.rows.fetch(keys, self.pool)
                self.rows.lookup(keys, rows[: len(keys)], self.pool)

    def use(self) -> dict[str, int]:
        use = self.rows.tier
        assert use is not None
        return use


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    served = Served(tmp_path)
    yield served
    served.state.tables.clear()
    served.tier.close()


def answers_of(deferred: Any) -> list[Any]:
    assert isinstance(deferred, Deferred)
    answers: list[Any] = []
    deferred.bind(answers.append)
    return answers


def test_a_step_of_staged_pushes_reads_and_writes_nothing(served: Served) -> None:
    keys = np.arange(3000, dtype=np.uint64)
    new = np.arange(NUM_KEYS, NUM_KEYS + 500, dtype=np.uint64)
    served.push(0, 1, np.sort(np.concatenate([keys[:2000], new])))
    served.push(1, 1, keys[1000:])
    served.use_others()
    waiting = answers_of(served.pull(0, 1, keys[:0]))
    before = served.use()
    served.pull(1, 1, keys[:0])
    after = served.use()
    for name in ("pages_read", "pages_written"):
        assert after[name] == before[name], name
    assert served.state.staging.applied == 1
    assert len(waiting) == 1
    rows = np.empty((3000, DIM), np.float32)
    served.rows.lookup(keys, rows, served.pool)
    np.testing.assert_array_equal(rows[:, 0], [1.5] * 1000 + [2.0] * 1000 + [1.5] * 1000)
    assert served.use()["bytes"] <= served.use()["memory_bytes"]


class Slow:
    """Work that waits for a disk."""

    def __init__(self) -> None:
        self.waits, self.may_go = Event(), Event()

    def before(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def work_later(*args: Any, **kwargs: Any) -> Any:
            self.waits.set()
            assert self.may_go.wait(WAIT_S)
            return work(*args, **kwargs)

        return work_later


def in_thread(work: Callable[..., Any], *args: Any) -> Thread:
    thread = Thread(target=work, args=args, daemon=True)
    thread.start()
    return thread


def assert_goes_on(served: Served) -> None:
    def ask() -> None:
        served.ask("ps.stats", {})
        assert isinstance(served.pull(0, 0, np.arange(5, dtype=np.uint64)), Reply)

    thread = in_thread(ask)
    thread.join(WAIT_S / 2)
    assert not thread.is_alive()


def test_requests_go_on_while_a_step_waits_for_a_disk(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, slow = np.arange(100, dtype=np.uint64), Slow()
    monkeypatch.setattr(served.state, "_update", slow.before(served.state._update))
    for stream in range(STREAMS):
        served.push(stream, 1, keys)
    first = answers_of(served.pull(0, 1, keys))
    second: list[Any] = []
    applies = in_thread(lambda: second.extend(answers_of(served.pull(1, 1, keys))))
    assert slow.waits.wait(WAIT_S)
    assert_goes_on(served)
    again = answers_of(served.pull(0, 1, keys))  # a repeated pull does not apply it once more
    assert served.state.staging.applied == 0
    slow.may_go.set()
    applies.join(WAIT_S)
    assert served.state.staging.applied == 1
    assert (first, [type(a) for a in again], [type(a) for a in second]) == ([], [Reply], [Reply])
    np.testing.assert_array_equal(again[0].arrays[0][:, 0], 2.0)


def test_requests_go_on_while_a_pull_that_waited_is_answered(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, slow = np.arange(100, dtype=np.uint64), Slow()
    for stream in range(STREAMS):
        served.push(stream, 1, keys)
    first = answers_of(served.pull(0, 1, keys))
    table = served.state.tables["t"]
    monkeypatch.setattr(table, "read", slow.before(table.read))
    answers = in_thread(served.pull, 1, 1, keys)
    assert slow.waits.wait(WAIT_S)
    monkeypatch.undo()
    assert_goes_on(served)
    slow.may_go.set()
    answers.join(WAIT_S)
    assert [type(answer) for answer in first] == [Reply]


def test_a_step_that_fails_is_an_error_of_all_who_wait_and_is_applied_by_a_later_pull(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = np.arange(100, dtype=np.uint64)
    for stream in range(STREAMS):
        served.push(stream, 1, keys)

    def fail(*_: Any) -> None:
        raise tr.errors.Unavailable("the disk is gone")

    with monkeypatch.context() as patched:
        patched.setattr(served.state, "_update", fail)
        answers = [answers_of(served.pull(stream, 1, keys)) for stream in range(STREAMS)]
    for [answer] in answers:
        assert isinstance(answer, tr.errors.Unavailable)
    [answer] = answers_of(served.pull(0, 1, keys))
    np.testing.assert_array_equal(answer.arrays[0][:, 0], 2.0)
