"""Members, incarnations, passes and meetings, as one process after another asks for them."""

from __future__ import annotations

import itertools
import time
import uuid
from typing import Any

import numpy as np
import pytest

from trireme.errors import (
    BadRequest,
    Corruption,
    Fenced,
    NotReady,
    SchemaMismatch,
    TriremeError,
)
from trireme.ps.coordinator import Coordinator
from trireme.rpc import Deferred, Reply, Request


class Asker:
    """Calls a coordinator's handlers as workers would."""

    def __init__(self, num_workers: int = 2) -> None:
        self.coordinator = Coordinator()
        self.handlers = self.coordinator.handlers()
        self.num_workers = num_workers
        self.calls = itertools.count(1)

    def ask(self, method: str, body: dict[str, Any], arrays: list[Any] | None = None) -> Any:
        deadline = time.monotonic() + 10
        return self.handlers[method](
            Request(1, method, body, arrays or [], "test", "test", "", deadline)
        )

    def join(self, worker: int, **other: Any) -> Reply:
        body = {"servers": ["a:1"], "worker": worker, "num_workers": self.num_workers, **other}
        return self.ask("coord.join", {"token": uuid.uuid4().hex, **body})

    def me(self, worker: int, incarnation: int = 1) -> dict[str, int]:
        call = next(self.calls)
        return {"worker": worker, "incarnation": incarnation, "call": call}


@pytest.fixture
def asker() -> Asker:
    made = Asker()
    for worker in (0, 1):
        made.join(worker)
    return made


def answer_of(deferred: Deferred) -> Reply:
    got: list[Reply | TriremeError] = []
    deferred.bind(got.append)
    [answer] = got
    assert isinstance(answer, Reply)
    return answer


def test_nothing_is_known_before_the_first_worker_joins() -> None:
    asker = Asker()
    with pytest.raises(NotReady, match="no worker has joined"):
        asker.ask("coord.map", {})
    with pytest.raises(Corruption, match="expected worker 0 to have joined"):
        asker.ask("coord.begin_pass", asker.me(0))


def test_a_successor_gets_the_next_incarnation_and_fences_its_predecessor(asker: Asker) -> None:
    assert asker.join(0).body["incarnation"] == 2
    with pytest.raises(Fenced, match="incarnation 2 has taken over, found 1"):
        asker.ask("coord.begin_pass", asker.me(0))
    asker.ask("coord.begin_pass", asker.me(0, 2))


@pytest.mark.parametrize(
    ("other", "error", "message"),
    [
        ({"servers": ["b:2"]}, SchemaMismatch, r"servers is \['a:1'\] for this job, worker 0 says"),
        ({"num_workers": 3}, SchemaMismatch, "num_workers is 2 for this job, worker 0 says 3"),
        ({"num_workers": 0}, BadRequest, "expected 0 <= worker < num_workers"),
        ({"servers": []}, BadRequest, "expected at least one server"),
        ({"servers": None}, BadRequest, "expected field 'servers' of type list"),
    ],
)
def test_a_worker_that_disagrees_is_told_both_sides(
    asker: Asker, other: dict[str, Any], error: type[TriremeError], message: str
) -> None:
    with pytest.raises(error, match=message):
        asker.join(0, **other)


def test_a_pass_begins_when_all_have_come_and_the_next_after_the_longest_stream(
    asker: Asker,
) -> None:
    waiting = asker.ask("coord.begin_pass", asker.me(0))
    assert isinstance(waiting, Deferred)
    assert waiting.describe() == "pass 1 (begin) waits for workers [1]"
    begun = asker.ask("coord.begin_pass", asker.me(1))
    assert begun.body["group"] == {"version": 1, "members": [[0, 1, None], [1, 1, None]]}
    assert answer_of(waiting).body == begun.body
    asker.ask("coord.leave", {"step": 11, **asker.me(0)})
    left = asker.ask("coord.leave", {"step": 31, **asker.me(1)})
    assert left.body["group"] == {"version": 3, "members": [[0, 1, 11], [1, 1, 31]]}
    asker.ask("coord.begin_pass", asker.me(0))
    begun = asker.ask("coord.begin_pass", asker.me(1))
    assert begun.body["group"] == {"version": 4, "members": [[0, 31, None], [1, 31, None]]}


def test_leaving_twice_is_leaving_once(asker: Asker) -> None:
    asker.ask("coord.begin_pass", asker.me(0))
    asker.ask("coord.begin_pass", asker.me(1))
    first = asker.ask("coord.leave", {"step": 5, **asker.me(0)})
    again = asker.ask("coord.leave", {"step": 9, **asker.me(0)})
    assert again.body == first.body


def test_a_successor_joins_the_running_pass_at_once(asker: Asker) -> None:
    asker.ask("coord.begin_pass", asker.me(0))
    begun = asker.ask("coord.begin_pass", asker.me(1))
    asker.join(1)
    assert asker.ask("coord.begin_pass", asker.me(1, 2)).body == begun.body


def test_a_meeting_hands_everyone_what_each_brought_also_when_asked_again(asker: Asker) -> None:
    def gather(worker: int, name: str = "1") -> Any:
        body = {"name": name, "purpose": "talk", "body": {"from": worker}, **asker.me(worker)}
        return asker.ask("coord.gather", body, [np.full(worker + 1, worker)])

    waiting = gather(1)
    reply = gather(0)
    assert reply.body["bodies"] == [[{"from": 0}, 1], [{"from": 1}, 1]]
    assert [array.tolist() for array in reply.arrays] == [[0], [1, 1]]
    assert answer_of(waiting) is reply
    assert gather(1) is reply


def test_a_successor_does_not_get_the_answer_of_a_meeting_for_something_else(asker: Asker) -> None:
    for worker in (1, 0):
        body = {"name": "1", "purpose": "save", "body": {}, **asker.me(worker)}
        asker.ask("coord.gather", body, [])
    asker.join(1)
    body = {"name": "1", "purpose": "evaluate", "body": {}, **asker.me(1, 2)}
    with pytest.raises(BadRequest, match="it was for 'save' and is over, worker 1 comes for"):
        asker.ask("coord.gather", body, [])


def test_the_same_process_joins_as_the_same_incarnation(asker: Asker) -> None:
    assert [asker.join(0, token="x").body["incarnation"] for _ in range(2)] == [2, 2]
    assert asker.join(0, token="y").body["incarnation"] == 3
    assert asker.join(0, token="x").body["incarnation"] == 2  # late: it gets no new life
    asker.ask("coord.begin_pass", asker.me(0, 3))


def test_a_call_that_comes_after_a_later_one_changes_nothing(asker: Asker) -> None:
    begin = asker.me(0)
    asker.ask("coord.begin_pass", begin)
    asker.ask("coord.begin_pass", asker.me(1))
    leave = {"step": 5, **asker.me(0)}
    left = asker.ask("coord.leave", leave)
    assert asker.ask("coord.leave", leave).body == left.body
    with pytest.raises(BadRequest, match=r"coord.begin_pass: .* the network delivered it twice"):
        asker.ask("coord.begin_pass", begin)
    asker.ask("coord.leave", {"step": 9, **asker.me(1)})
    asker.ask("coord.begin_pass", asker.me(1))
    again = asker.ask("coord.begin_pass", asker.me(0))
    assert again.body["group"]["members"] == [[0, 9, None], [1, 9, None]]
    with pytest.raises(BadRequest, match=r"coord.leave: .* the network delivered it twice"):
        asker.ask("coord.leave", leave)


def test_a_meeting_for_two_purposes_fails_for_all(asker: Asker) -> None:
    def gather(worker: int, purpose: str) -> Any:
        body = {"name": "1", "purpose": purpose, "body": {}, **asker.me(worker)}
        return asker.ask("coord.gather", body)

    waiting = gather(1, "save")
    with pytest.raises(BadRequest, match=r"workers \[1\] came for 'save', worker 0 for 'evaluate'"):
        gather(0, "evaluate")
    told: list[Reply | TriremeError] = []
    waiting.bind(told.append)
    assert "came for 'save'" in str(told[0])


def test_blocks_are_added_once_and_change_the_map(asker: Asker) -> None:
    one = asker.ask("coord.add_blocks", {"blocks": ["p@0"], **asker.me(0)}).body["map"]
    two = asker.ask("coord.add_blocks", {"blocks": ["p@0"], **asker.me(1)}).body["map"]
    assert one == two
    assert one["version"] == 2
