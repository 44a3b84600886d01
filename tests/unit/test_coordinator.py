"""Membership, incarnations, passes and meetings of the coordinator, one request after another."""

from __future__ import annotations

import itertools
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trireme.coordinator.coordinator import Coordinator
from trireme.errors import (
    BadRequest,
    Corruption,
    Fenced,
    NotReady,
    ResourceExhausted,
    SchemaMismatch,
    TriremeError,
)
from trireme.protocol.block_messages import ids_to_wire, map_from_wire
from trireme.protocol.routing import BucketMap
from trireme.protocol.wire import Arrays
from trireme.rpc import Deferred, Reply, Request
from trireme.storage.document import Document


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

    def begin(self, worker: int, number: int, incarnation: int = 1, **other: Any) -> Any:
        """Ask to enter a pass."""
        body = {"pass": number, "together": True, "note": [], **other}
        return self.ask("coord.begin_pass", {**body, **self.me(worker, incarnation)})

    def gather(
        self,
        worker: int,
        name: str,
        purpose: str = "talk",
        *,
        number: int = 0,
        incarnation: int = 1,
        body: dict[str, Any] | None = None,
        arrays: list[Any] | None = None,
        to: str = "all",
    ) -> Any:
        """Come to a meeting."""
        place = {"pass": number, "name": name, "purpose": purpose, "body": body or {}, "arrays": to}
        return self.ask("coord.gather", {**place, **self.me(worker, incarnation)}, arrays)

    def script(self, worker: int) -> Any:
        """The position in the script that a new process of this worker gets."""
        return self.join(worker).body["script"]


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
        asker.begin(0, 1)


def test_a_successor_gets_the_next_incarnation_and_fences_its_predecessor(asker: Asker) -> None:
    assert asker.join(0).body["incarnation"] == 2
    with pytest.raises(Fenced, match="incarnation 2 has taken over, found 1"):
        asker.begin(0, 1)
    asker.begin(0, 1, 2)


def test_a_late_worker_is_told_the_compute_workers_that_the_last_start_named() -> None:
    asker = Asker(1)
    asker.join(0, streams=2, compute_workers=[["gpu", "b:1"]])
    asker.join(0, streams=2, compute_workers=[["gpu", "c:1"], ["npu", "d:1"]])
    late = {"servers": ["a:1"], "token": "late", "late": True}
    expected = [["gpu", "c:1"], ["npu", "d:1"]]
    assert asker.ask("coord.join", late).body["compute_workers"] == expected


@pytest.mark.parametrize(
    "wrong", [[["gpu"]], [["gpu", 1]], [["GPU", "b:1"]], [["gpu", ""]], [["gpu", "b:1"]] * 4097]
)
def test_compute_workers_are_pairs_of_a_label_and_an_address(wrong: object) -> None:
    with pytest.raises(BadRequest, match=r"as at most 4096 pairs of a label .*, found \d"):
        Asker(1).join(0, compute_workers=wrong)


@pytest.mark.parametrize(
    ("other", "error", "message"),
    [
        ({"servers": ["b:2"]}, SchemaMismatch, r"servers is \['a:1'\] for this job, worker 0 has"),
        ({"num_workers": 3}, SchemaMismatch, "num_workers is 2 for this job, worker 0 has 3"),
        ({"num_workers": 0}, BadRequest, "expected 0 <= worker < num_workers"),
        ({"servers": []}, BadRequest, "expected at least one server"),
        ({"servers": None}, BadRequest, "expected field 'servers' of type list"),
    ],
)
def test_a_worker_that_disagrees_gets_an_error_with_both_values(
    asker: Asker, other: dict[str, Any], error: type[TriremeError], message: str
) -> None:
    with pytest.raises(error, match=message):
        asker.join(0, **other)


def test_a_pass_begins_when_all_have_come_and_the_next_after_the_longest_stream(
    asker: Asker,
) -> None:
    waiting = asker.begin(0, 1)
    assert isinstance(waiting, Deferred)
    assert waiting.describe() == "pass 1 (begin) waits for workers [1]"
    begun = asker.begin(1, 1)
    assert begun.body["group"] == {"version": 1, "members": [[0, 1, None], [1, 1, None]]}
    assert answer_of(waiting).body == begun.body
    asker.ask("coord.leave", {"step": 11, **asker.me(0)})
    left = asker.ask("coord.leave", {"step": 31, **asker.me(1)})
    assert left.body["group"] == {"version": 3, "members": [[0, 1, 11], [1, 1, 31]]}
    asker.begin(0, 2)
    begun = asker.begin(1, 2)
    assert begun.body["group"] == {"version": 4, "members": [[0, 31, None], [1, 31, None]]}


def test_leaving_twice_is_leaving_once(asker: Asker) -> None:
    asker.begin(0, 1)
    asker.begin(1, 1)
    first = asker.ask("coord.leave", {"step": 5, **asker.me(0)})
    again = asker.ask("coord.leave", {"step": 9, **asker.me(0)})
    assert again.body == first.body


def test_a_successor_joins_the_running_pass_at_once(asker: Asker) -> None:
    asker.begin(0, 1, note=[3])
    begun = asker.begin(1, 1, note=[4, -1])
    asker.join(1)
    again = asker.begin(1, 1, 2, note=[7]).body
    assert again == {**begun.body, "note": [4, -1]}


def test_a_meeting_gives_every_member_all_contributions_also_on_retry(asker: Asker) -> None:
    def gather(worker: int) -> Any:
        arrays = [np.full(worker + 1, worker)]
        return asker.gather(worker, "1", "talk", body={"from": worker}, arrays=arrays)

    waiting = gather(1)
    reply = gather(0)
    assert reply.body["bodies"] == [[{"from": 0}, 1], [{"from": 1}, 1]]
    assert [array.tolist() for array in reply.arrays] == [[0], [1, 1]]
    assert answer_of(waiting) is reply
    assert gather(1) is reply


def test_a_meeting_that_sums_adds_in_the_order_of_the_workers_and_tells_worker_0_alone() -> None:
    asker = Asker(4)
    values = [np.array([1e16, -0.0]), np.array([1.0, 0.0]), np.array([1.0]), np.array([-1e16])]
    values = [np.resize(value, 2) for value in values]
    for worker in range(4):
        asker.join(worker)

    def gather(worker: int, incarnation: int = 1) -> Any:
        arrays = [values[worker], np.array([worker])]
        return asker.gather(worker, "1", incarnation=incarnation, arrays=arrays, to="sum")

    waiting = [gather(worker) for worker in (3, 0, 2, 2)]  # the last again: it counts once
    others = gather(1)
    [(body, num_arrays)] = others.body["bodies"]
    assert (num_arrays, list(others.arrays)) == (0, [])
    assert answer_of(waiting[0]).body == others.body
    first = answer_of(waiting[1])
    in_order = ((values[0] + values[1]) + values[2]) + values[3]
    assert first.body["bodies"] == [[body, 2]]
    assert [*body] == ["workers"]  # who contributed
    assert [array.tobytes() for array in first.arrays] == [
        in_order.tobytes(),
        np.array([6]).tobytes(),
    ]
    asker.join(0)
    again = gather(0, 2)
    assert [array.tolist() for array in again.arrays] == [array.tolist() for array in first.arrays]
    asker.join(2)
    assert gather(2, 2).body == others.body


def test_arrays_for_worker_0_reach_it_alone(asker: Asker) -> None:
    waiting = asker.gather(0, "1", arrays=[np.arange(2)], to="first")
    others = asker.gather(1, "1", body={"from": 1}, arrays=[np.arange(3)], to="first")
    assert (others.body["bodies"], list(others.arrays)) == ([[{}, 0], [{"from": 1}, 0]], [])
    first = answer_of(waiting)
    assert first.body["bodies"] == [[{}, 1], [{"from": 1}, 1]]
    assert [array.tolist() for array in first.arrays] == [[0, 1], [0, 1, 2]]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"arrays": [np.zeros(3)]}, r"found \{\} and .*\(2,\).* worker 0, \{\} and .*\(3,\)"),
        ({"arrays": [np.zeros(2, np.int64)]}, "<f8.*of worker 0.*<i8"),
        ({"arrays": []}, r"expected alike arrays to sum"),
        ({"body": {"buckets": 4}, "arrays": [np.zeros(2)]}, "'buckets': 4"),
        ({"arrays": [np.zeros(2)], "to": "first"}, r"arrays of one kind, found \['first', 'sum'\]"),
        ({"arrays": [np.zeros(2)], "to": "some"}, "expected one of .* found 'some'"),
    ],
)
def test_what_does_not_sum_is_an_error(asker: Asker, other: dict[str, Any], message: str) -> None:
    asker.gather(0, "1", arrays=[np.zeros(2)], to="sum")
    with pytest.raises(BadRequest, match=message):
        asker.gather(1, "1", **{"to": "sum", **other})


def test_only_numbers_that_add_up_are_summed() -> None:
    alone = Asker(1)
    alone.join(0)
    with pytest.raises(BadRequest, match=r"expected float64 or int64 to sum, found \['uint8'\]"):
        alone.gather(0, "1", arrays=[np.zeros(2, np.uint8)], to="sum")


def test_a_successor_does_not_get_the_answer_of_a_meeting_for_something_else(asker: Asker) -> None:
    for worker in (1, 0):
        asker.gather(worker, "1", "save")
    asker.join(1)
    with pytest.raises(BadRequest, match="it was for 'save' and is over, worker 1 comes for"):
        asker.gather(1, "1", "evaluate", incarnation=2)


def test_the_same_process_joins_as_the_same_incarnation(asker: Asker) -> None:
    assert [asker.join(0, token="x").body["incarnation"] for _ in range(2)] == [2, 2]
    assert asker.join(0, token="y").body["incarnation"] == 3
    assert asker.join(0, token="x").body["incarnation"] == 2  # late: it gets no new life
    asker.begin(0, 1, 3)


def test_a_delayed_call_after_a_later_one_changes_nothing(asker: Asker) -> None:
    begin = {"pass": 1, "together": True, "note": [], **asker.me(0)}
    asker.ask("coord.begin_pass", begin)
    asker.begin(1, 1)
    leave = {"step": 5, **asker.me(0)}
    left = asker.ask("coord.leave", leave)
    assert asker.ask("coord.leave", leave).body == left.body
    with pytest.raises(BadRequest, match=r"coord.begin_pass: .* the network delivered it twice"):
        asker.ask("coord.begin_pass", begin)
    asker.ask("coord.leave", {"step": 9, **asker.me(1)})
    asker.begin(1, 2)
    again = asker.begin(0, 2)
    assert again.body["group"]["members"] == [[0, 9, None], [1, 9, None]]
    with pytest.raises(BadRequest, match=r"coord.leave: .* the network delivered it twice"):
        asker.ask("coord.leave", leave)


def test_a_meeting_for_two_purposes_fails_for_all(asker: Asker) -> None:
    waiting = asker.gather(1, "1", "save")
    with pytest.raises(BadRequest, match=r"workers \[1\] came for 'save', workers \[0\] for 'ev"):
        asker.gather(0, "1", "evaluate")
    answers: list[Reply | TriremeError] = []
    waiting.bind(answers.append)
    assert "came for 'save'" in str(answers[0])


def failure(answer: Any) -> str:
    """The message of the error that a request which has waited gets."""
    answers: list[Reply | TriremeError] = []
    answer.bind(answers.append)
    return "".join(str(answer) for answer in answers if isinstance(answer, BadRequest))


def test_a_meeting_fails_for_those_who_wait_for_an_ended_script(asker: Asker) -> None:
    waiting = asker.gather(0, "1", "save")
    asker.ask("coord.end", {"run": 0, **asker.me(1)})
    first, second = failure(waiting), failure(asker.gather(0, "2", "save"))
    assert "meeting 1 of pass 0 (save): expected all workers, found the scripts of [1] at" in first
    assert "of [1] at their ends: every worker makes this call" in second


def test_two_meetings_that_wait_for_workers_of_each_other_fail(asker: Asker) -> None:
    saves, waits = asker.gather(0, "5/1/1", "save"), asker.gather(1, "5", "barrier")
    for message in failure(saves), failure(waits):
        assert "came for 'barrier', workers [0] for 'save'; every worker must do the" in message


def test_blocks_are_added_once_and_change_the_map(asker: Asker) -> None:
    def add(worker: int, *owners: int) -> BucketMap:
        arrays = ids_to_wire(["p@0"]) + [np.array([owner], np.uint16) for owner in owners]
        body = {"are_placed": bool(owners), **asker.me(worker)}
        reply = asker.ask("coord.add_blocks", body, arrays)
        return map_from_wire(reply.body["map"], Arrays(reply.arrays))

    assert [add(worker).version for worker in (0, 1)] == [2, 2]
    assert add(0, 0).blocks == {"p@0": 0}
    with pytest.raises(BadRequest, match="expected owners below 1, found 7"):
        add(0, 7)


# ---- successors ----


def test_a_successor_learns_how_far_its_predecessor_had_come(asker: Asker) -> None:
    first = {"run": 0, "begun": 0, "entered": 0, "has_ended": False, "met": [], "trained": [0, 0]}
    asker.gather(1, "1")
    assert asker.script(0) == {**first, "is_successor": True}
    assert asker.script(1) == {**first, "is_successor": True, "met": ["1"]}
    asker.gather(0, "1", incarnation=2)
    for worker in (0, 1):
        asker.begin(worker, 1, 2)
    asker.gather(0, "2/1", number=1, incarnation=2)
    assert asker.script(0) == {**first, "is_successor": True, "entered": 1, "met": ["2/1"]}


def test_without_going_together_each_worker_begins_passes_by_itself(asker: Asker) -> None:
    for number in (1, 2):
        assert asker.begin(1, number, together=False, note=[number]).body["note"] is None
    with pytest.raises(BadRequest, match="expected pass 2 or the next one of worker 1, found 4"):
        asker.begin(1, 4, together=False)
    assert asker.script(1)["entered"] == 2
    assert asker.begin(1, 2, 2, together=False, note=[9]).body["note"] == [2]
    assert asker.script(0)["entered"] == 0


def test_the_first_contribution_of_a_worker_or_its_successor_counts(asker: Asker) -> None:
    asker.gather(1, "1", body={"figures": 7})
    asker.join(1)
    asker.gather(1, "1", incarnation=2)
    assert asker.gather(0, "1").body["bodies"] == [[{}, 0], [{"figures": 7}, 0]]


def test_meetings_are_kept_within_bounds_and_the_large_ones_of_old_passes_go_first(
    asker: Asker,
) -> None:
    def meet(name: str, number: int, mib: int) -> None:
        for worker in (0, 1):
            asker.gather(worker, name, number=number, arrays=[np.zeros(mib << 19, np.uint8)])

    meet("1", 0, 1)
    meet("2", 0, 40)
    for worker in (0, 1):
        asker.begin(worker, 1)
    for number in range(3, 7):
        meet(str(number), 1, 1)
    meet("7", 1, 20)
    assert asker.script(1)["met"] == ["3", "4", "5", "6", "7"]
    for name, number in (("1", 0), ("3", 1), ("7", 1)):
        assert len(asker.gather(1, name, number=number, incarnation=2).arrays) == 2
    for name in ("2", "9"):
        with pytest.raises(ResourceExhausted, match=rf"{name} of pass 0: it \(talk\) is over"):
            asker.gather(1, name, incarnation=2)
    for number in range(8, 13):
        for worker, incarnation in ((0, 1), (1, 2)):
            arrays = [np.zeros(10 << 19, np.uint8)]
            asker.gather(worker, str(number), number=1, incarnation=incarnation, arrays=arrays)
    assert "7" in asker.script(1)["met"]
    with pytest.raises(ResourceExhausted, match="meeting 7 of pass 1"):
        asker.gather(1, "7", number=1, incarnation=3)


def test_when_all_have_ended_the_next_script_begins(asker: Asker) -> None:
    for worker in (0, 1):
        asker.begin(worker, 1)
    end = {"run": 0, **asker.me(1)}
    asker.ask("coord.end", end)
    script = asker.script(1)
    assert (script["has_ended"], script["is_successor"], script["entered"]) == (True, True, 1)
    asker.ask("coord.end", {"run": 0, **asker.me(0)})
    asker.coordinator.note_goodbye(0)
    assert asker.script(1)["has_ended"]
    asker.coordinator.note_goodbye(1)
    for worker in (0, 1):
        script = asker.script(worker)
        assert (script["run"], script["begun"], script["entered"]) == (1, 1, 1)
        assert (script["has_ended"], script["is_successor"]) == (False, False)
    asker.ask("coord.end", {"run": 0, **asker.me(1, 4)})  # late
    assert not asker.script(1)["has_ended"]


def test_a_coordinator_that_was_started_again_knows_scripts_and_meetings(
    asker: Asker, tmp_path: Path
) -> None:
    asker.coordinator.keep(Document(tmp_path / "kept", is_synced=False).write)
    for worker in (0, 1):
        asker.begin(worker, 1, note=[5])
    asker.gather(0, "1", number=1, arrays=[np.arange(3)])
    gathered = asker.gather(1, "1", number=1)
    asker.gather(1, "2", number=1)  # waits
    other = Asker()
    other.coordinator.install(Document(tmp_path / "kept", is_synced=False).read())
    script = other.script(1)
    assert (script["entered"], script["met"]) == (1, ["1"])
    assert other.begin(1, 1, 2).body["note"] == [5]
    again = other.gather(1, "1", number=1, incarnation=2)
    assert again.body == gathered.body
    assert [array.tolist() for array in again.arrays] == [[0, 1, 2]]


def test_answers_are_written_once_however_many_calls_follow(asker: Asker, tmp_path: Path) -> None:
    document = Document(tmp_path / "kept", is_synced=False)
    asker.coordinator.keep(document.write)
    for name in ("1", "2"):
        for worker in (0, 1):
            asker.gather(worker, name, arrays=[np.full(1 << 17, worker)])
    written = {path: path.stat().st_mtime_ns for path in tmp_path.glob("kept.part-*")}
    assert sum(path.stat().st_size > 1 << 20 for path in written) == 2
    for worker in (0, 1):
        asker.begin(worker, 1)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("kept.part-*")} == written
    assert document.path.stat().st_size < 4096
    other = Asker()
    other.coordinator.install(Document(document.path, is_synced=False).read())
    other.coordinator.keep(Document(document.path, is_synced=False).write)
    for worker in (0, 1):
        other.join(worker)
        answer = other.gather(worker, "2", incarnation=2)
        assert [array.tolist() for array in answer.arrays] == [[0] * (1 << 17), [1] * (1 << 17)]
    assert not written.keys() & set(tmp_path.glob("kept.part-*"))  # one process' files


def test_answers_that_an_older_coordinator_has_kept_are_read(asker: Asker) -> None:
    kept: list[dict[str, Any]] = []
    asker.coordinator.keep(kept.append)
    for worker in (0, 1):
        asker.gather(worker, "1", arrays=[np.arange(3)])
    before = [0, "1", "talk", {"bodies": [[{}, 1]]}, [["<i8", [3]]], [np.arange(3).tobytes()]]
    kept[-1]["meetings"]["over"], kept[-1]["map"] = [before], kept[-1]["map"]()
    other = Asker()
    other.coordinator.install(kept[-1])
    other.join(1)
    [array] = other.gather(1, "1", incarnation=2).arrays
    assert array.tolist() == [0, 1, 2]


# ---- the data of a pass ----


def test_all_workers_of_a_pass_and_their_successors_have_the_same_data() -> None:
    asker = Asker()
    for worker in (0, 1):
        asker.join(worker)
    alone = {"together": False}
    asker.begin(0, 1, data="a of 3 bytes", **alone)
    with pytest.raises(BadRequest, match="begun, a of 3 bytes, found a of 4 bytes at worker 1: "):
        asker.begin(1, 1, data="a of 4 bytes", **alone)
    asker.begin(1, 1, data="a of 3 bytes", **alone)
    asker.join(1)
    with pytest.raises(BadRequest, match="found b of 3 bytes at worker 1: "):
        asker.begin(1, 1, incarnation=2, data="b of 3 bytes", **alone)
    asker.begin(1, 1, incarnation=2, **alone)  # one that does not know
    asker.begin(0, 2, data="b of 3 bytes", **alone)  # the next pass is another one


def test_a_worker_with_data_of_its_own_is_compared_with_its_predecessors_alone() -> None:
    asker = Asker()
    for worker in (0, 1):
        asker.join(worker)
        asker.begin(worker, 1, together=False, is_own=True, data=f"{worker} of 3 bytes")
    asker.join(1)
    with pytest.raises(BadRequest, match="begun, 1 of 3 bytes, found 0 of 3 bytes at worker 1: "):
        asker.begin(1, 1, incarnation=2, together=False, is_own=True, data="0 of 3 bytes")
