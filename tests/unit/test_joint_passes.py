"""Where the workers of a pass on devices meet, and who may end it, one request after another."""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_coordinator import Asker
from trireme.coordinator.coordinator import Coordinator
from trireme.errors import BadRequest, Fenced, TriremeError, Unavailable
from trireme.rpc import Deferred
from trireme.rpc.messages import Answer
from trireme.storage.document import Document


class Passes(Asker):
    def __init__(self) -> None:
        super().__init__(2)
        self.join(0)
        self.join(1)

    def enter(self, worker: int, number: int = 1, incarnation: int = 1) -> None:
        self.begin(worker, number, incarnation, together=False)

    def meet(
        self, worker: int, number: int = 1, token: str = "", incarnation: int = 1, **body: Any
    ) -> Any:
        message = {"pass": number, "token": token or f"{worker} {incarnation}", "body": body}
        return self.ask("coord.meet_in_pass", {**message, **self.me(worker, incarnation)})

    def end(self, id: str, worker: int = 0, number: int = 1, incarnation: int = 1) -> bool:
        body = {"id": id, "pass": number, "num_steps": 7, "together": True}
        reply = self.ask("coord.end_device_pass", {**body, **self.me(worker, incarnation)})
        return bool(reply.body["commit"])

    def meet_both(self) -> None:
        for worker in (0, 1):
            self.enter(worker)
            self.meet(worker)


def answer_of(deferred: Any) -> Answer:
    """What a call that had to wait is answered; queue.Empty: nothing yet."""
    assert isinstance(deferred, Deferred)
    answers: queue.Queue[Answer] = queue.Queue()
    deferred.bind(answers.put)
    return answers.get_nowait()


@pytest.fixture
def job() -> Passes:
    return Passes()


def test_all_workers_get_the_bodies_of_all_when_the_last_has_come(job: Passes) -> None:
    job.enter(0)
    first = job.meet(0, place=["a", 1])
    job.enter(1)
    second = job.meet(1, place=[])
    expected = [{"place": ["a", 1]}, {"place": []}]
    assert answer_of(first).body["bodies"] == expected
    assert answer_of(second).body["bodies"] == expected
    assert job.meet(0, place=["a", 1]).body["bodies"] == expected  # its answer was lost


def test_a_successor_takes_the_place_of_a_process_that_waits(job: Passes) -> None:
    job.enter(0)
    old = job.meet(0, place=["old", 1])
    job.join(0)
    job.enter(0, incarnation=2)
    job.enter(1)
    other = job.meet(1)
    assert isinstance(answer_of(old), Fenced)
    job.meet(0, incarnation=2, place=["new", 2])
    assert answer_of(other).body["bodies"][0] == {"place": ["new", 2]}


def test_workers_in_different_passes_are_told(job: Passes) -> None:
    job.enter(0)
    first = job.meet(0)
    job.enter(1)
    job.enter(1, 2)
    second = job.meet(1, 2)
    for deferred in (first, second):
        error = answer_of(deferred)
        assert isinstance(error, BadRequest)
        assert "{0: 1, 1: 2}" in str(error)
    with pytest.raises(BadRequest, match="expected pass 1 of worker 0, found 2"):
        job.meet(0, 2)


def test_one_decision_ends_the_pass_for_all_workers(job: Passes) -> None:
    job.meet_both()
    assert job.end("first")
    assert job.end("first")  # the answer was lost
    assert not job.end("second")
    for worker in (0, 1):
        assert job.script(worker)["trained"] == [1, 7]


def test_a_pass_of_a_process_that_has_a_successor_does_not_end(job: Passes) -> None:
    job.meet_both()
    job.join(1)
    assert not job.end("first")
    assert job.script(1)["trained"] == [0, 0]


def test_a_coordinator_that_was_restarted_knows_who_makes_the_pass(
    job: Passes, tmp_path: Path
) -> None:
    document = Document(tmp_path / "kept", is_synced=False)
    job.coordinator.keep(document.write)
    job.meet_both()
    job.coordinator = Coordinator()
    job.coordinator.install(document.read())
    job.handlers = job.coordinator.handlers()
    assert job.end("first")


def test_a_pass_without_a_meeting_does_not_end_for_all(job: Passes) -> None:
    job.enter(0)
    job.enter(1)
    assert not job.end("first")


def test_what_a_worker_brings_is_bounded(job: Passes) -> None:
    job.enter(0)
    with pytest.raises(TriremeError, match="at most 4096 characters"):
        job.meet(0, place=["a" * 5000])


@pytest.mark.parametrize("comes_first", ["the other", "the successor"])
def test_a_meeting_ends_that_waits_for_a_worker_which_was_restarted_within_the_pass(
    job: Passes, comes_first: str
) -> None:
    job.meet_both()
    if comes_first == "the other":
        waits = job.gather(0, "figures", number=1)
    job.join(1)
    job.enter(1, incarnation=2)
    second = job.meet(1, incarnation=2)
    if comes_first == "the successor":
        waits = job.gather(0, "figures", number=1)
    error = answer_of(waits)
    assert isinstance(error, Unavailable)
    assert "workers [1] have been restarted and begin pass 1 on devices again" in str(error)
    job.join(0)
    job.enter(0, incarnation=2)
    job.meet(0, incarnation=2)
    assert len(answer_of(second).body["bodies"]) == 2
    first = job.gather(0, "figures", number=1, incarnation=2)
    job.gather(1, "figures", number=1, incarnation=2)
    assert len(answer_of(first).body["bodies"]) == 2


def test_workers_of_which_one_begins_a_pass_and_the_other_meets_are_told(job: Passes) -> None:
    job.enter(0)
    first = job.meet(0)
    other = job.begin(1, 1)  # on the servers
    error = answer_of(other)
    assert isinstance(error, BadRequest)
    assert "found [0] at the beginning of pass 1 on devices" in str(error)
    with pytest.raises(queue.Empty):  # it waits until the other has gone, or comes
        answer_of(first)


def test_a_worker_that_has_given_up_its_meeting_is_met_elsewhere(job: Passes) -> None:
    job.meet_both()
    job.join(1)
    job.enter(1, incarnation=2)
    job.meet(1, incarnation=2)
    job.gather(1, "talk", number=1, incarnation=2)
    assert len(job.gather(0, "talk", number=1).body["bodies"]) == 2
