"""When a server considers its job over: goodbyes, silence, stop."""

from __future__ import annotations

import io
import logging
import os
import queue
import signal
import sys
import threading
import time
from typing import Any

import pytest

from trireme.errors import BadRequest, Unavailable
from trireme.job.serving import stop_on_signals
from trireme.rpc import Request
from trireme.server.attendance import GOODBYE_S, OVER, Attendance

SILENCE_S = 60.0


class Clock:
    """A clock that stands still until the test moves it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def tell(
    attendance: Attendance, method: str, worker: int, incarnation: int = 1, **more: Any
) -> None:
    body = {"worker": worker, "num_workers": 2, "incarnation": incarnation, **more}
    deadline = time.monotonic() + 10
    request = Request(1, method, body, [], "test", "test", "", deadline)
    attendance.handlers()[f"server.{method}"](request)


def leave(attendance: Attendance, worker: int, incarnation: int = 1) -> None:
    for method in ("goodbye", "left"):
        tell(attendance, method, worker, incarnation)


def outcome(attendance: Attendance) -> queue.SimpleQueue[Any]:
    """What `wait` returns or raises, once it does."""
    result: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def run() -> None:
        try:
            result.put(attendance.wait(SILENCE_S))
        except Unavailable as error:
            result.put(error)

    threading.Thread(target=run, daemon=True).start()
    return result


def test_the_job_is_over_when_every_worker_has_left() -> None:
    attendance = Attendance()
    result = outcome(attendance)
    for worker in (0, 1):
        tell(attendance, "alive", worker)
        leave(attendance, worker)
    assert result.get(timeout=30) == "all workers have said goodbye"


@pytest.mark.parametrize("is_recovered", [False, True])
def test_a_server_stays_for_the_worker_that_may_not_know_that_its_goodbye_was_heard(
    is_recovered: bool,
) -> None:
    """Such a worker says it again; one that was killed meanwhile does not."""
    clock = Clock()
    attendance = Attendance(clock)
    leave(attendance, 0)
    tell(attendance, "goodbye", 1)
    if is_recovered:
        gone, attendance = attendance.gone(), Attendance(clock)
        attendance.install(gone)
    clock.now += GOODBYE_S - 1
    tell(attendance, "goodbye", 1)
    clock.now += 2
    tell(attendance, "left", 0)
    assert attendance.is_over
    result = outcome(attendance)
    with pytest.raises(queue.Empty):
        result.get(timeout=0.2)
    clock.now += GOODBYE_S
    assert result.get(timeout=30) == "all workers have said goodbye"


def test_a_late_sign_of_life_does_not_take_a_goodbye_back_but_a_successor_does() -> None:
    attendance = Attendance()
    leave(attendance, 0)
    leave(attendance, 1)
    tell(attendance, "alive", 1)
    assert outcome(attendance).get(timeout=30) == "all workers have said goodbye"
    tell(attendance, "alive", 1, incarnation=2)
    result = outcome(attendance)
    tell(attendance, "goodbye", 1)  # its predecessor's, again
    leave(attendance, 1, incarnation=2)
    assert result.get(timeout=30) == "all workers have said goodbye"


@pytest.mark.parametrize("comes", [True, False])
def test_silence_is_an_error_that_names_the_workers_that_have_not_left(comes: bool) -> None:
    clock = Clock()
    attendance = Attendance(clock)
    if comes:
        tell(attendance, "alive", 1)
    tell(attendance, "goodbye", 0)
    clock.now += SILENCE_S + 1
    error = outcome(attendance).get(timeout=30)
    assert "workers [1] have been silent for 60 s without saying goodbye" in str(error)


def test_a_restarted_server_waits_as_long_for_its_workers() -> None:
    clock = Clock()
    attendance = Attendance(clock)
    clock.now += SILENCE_S
    attendance.begin_again()
    clock.now += SILENCE_S + 1
    error = outcome(attendance).get(timeout=30)
    assert "expected the workers of the job that it continues with within 60 s, found none" in str(
        error
    )


def test_silent_workers_are_those_without_recent_calls_or_ended() -> None:
    def silent() -> list[int]:
        body = {"within_s": 5.0}
        request = Request(1, "server.attendance", body, [], "t", "t", "", time.monotonic() + 10)
        reply = attendance.handlers()["server.attendance"](request)
        actual: list[int] = reply.body["silent"]
        return actual

    clock = Clock()
    attendance = Attendance(clock)
    assert silent() == []
    tell(attendance, "alive", 0)
    assert silent() == [1]
    clock.now += 4
    tell(attendance, "alive", 1)
    assert silent() == []
    clock.now += 2
    assert silent() == [0]
    tell(attendance, "alive", 0)
    tell(attendance, "goodbye", 1)
    assert silent() == [1]


def test_a_request_to_stop_does_not_outlive_the_workers_that_got_it() -> None:
    """A job may begin on the servers of one that was killed when it had been asked to stop."""

    def stops(worker: int) -> str:
        body = {"within_s": 5.0, "worker": worker}
        request = Request(1, "server.attendance", body, [], "t", "t", "", time.monotonic() + 10)
        clock.now += 1
        return str(attendance.handlers()["server.attendance"](request).body["stops"])

    clock = Clock()
    attendance = Attendance(clock)
    for worker in (0, 1):
        tell(attendance, "alive", worker)
    tell(attendance, "alive", 1, stops="SIGTERM")
    assert stops(0) == stops(1) == "SIGTERM"
    tell(attendance, "alive", 0, incarnation=2)  # of this job or of another
    assert stops(0) == ""
    tell(attendance, "alive", 1)
    assert stops(0) == "SIGTERM"
    for worker in (1, 0):  # of another
        tell(attendance, "alive", worker, incarnation=3)
        assert stops(worker) == ""
    assert stops(1) == ""
    tell(attendance, "alive", 0, incarnation=3, stops="SIGINT")
    assert stops(0) == stops(1) == "SIGINT"


def test_while_one_worker_calls_the_others_are_waited_for() -> None:
    clock = Clock()
    attendance = Attendance(clock)
    tell(attendance, "alive", 1)
    clock.now += SILENCE_S - 1
    tell(attendance, "alive", 0)
    clock.now += SILENCE_S - 1
    attendance.stop("stopped by the test")
    assert outcome(attendance).get(timeout=30) == "stopped by the test"


def test_a_stop_waits_for_workers_that_are_stopping_and_for_no_others() -> None:
    for stops, outcomes in (("", "stopped"), ("SIGTERM", OVER)):
        clock = Clock()
        attendance = Attendance(clock)
        for worker in (0, 1):
            tell(attendance, "alive", worker)
        attendance.stop("stopped", within_s=7.0)
        result = outcome(attendance)
        clock.now += 6.0
        tell(attendance, "alive", 1, stops=stops)
        clock.now += 2.0
        if stops:
            tell(attendance, "alive", 0, stops=stops)
            for worker in (0, 1):
                leave(attendance, worker)
        assert result.get(timeout=30) == outcomes


def test_a_second_stop_waits_for_nobody_and_none_does_without_workers() -> None:
    attendance = Attendance(Clock())
    attendance.stop("stopped", within_s=7.0)
    assert outcome(attendance).get(timeout=30) == "stopped"
    for worker in (0, 1):
        tell(attendance, "alive", worker, stops="SIGTERM")
    attendance.stop("stopped", within_s=7.0)
    attendance.stop("stopped again")
    assert outcome(attendance).get(timeout=30) == "stopped again"


def test_a_worker_beyond_the_number_of_workers_is_refused() -> None:
    with pytest.raises(
        BadRequest, match="expected 0 <= worker < num_workers <= 4096, found 2 and 2"
    ):
        tell(Attendance(), "alive", 2)


@pytest.mark.parametrize("num_workers", [-1, 0, 4097, 2**63 - 1])
@pytest.mark.parametrize("method", ["alive", "goodbye"])
def test_a_late_worker_cannot_say_any_number_of_workers(method: str, num_workers: int) -> None:
    attendance = Attendance()
    with pytest.raises(BadRequest, match=f"num_workers <= 4096, found 7 and {num_workers}"):
        tell(attendance, method, 7, late=True, num_workers=num_workers)
    assert (attendance.gone(), attendance.silences_s()) == ([], {})


def test_a_worker_is_described_by_its_last_call_until_it_leaves() -> None:
    clock = Clock()
    attendance = Attendance(clock)
    tell(attendance, "alive", 0, report={"retries": 3})
    tell(attendance, "alive", 1)
    clock.now += 2
    tell(attendance, "alive", 0, report={"retries": 4, "pushes": 1})
    assert attendance.reports() == {0: {"retries": 4, "pushes": 1}, 1: {}}
    assert attendance.silences_s() == {0: 0, 1: 2}
    tell(attendance, "goodbye", 0)
    assert (attendance.reports(), attendance.silences_s()) == ({1: {}}, {1: 2})


def test_the_figures_of_a_worker_are_those_of_its_last_call_until_it_leaves() -> None:
    attendance = Attendance()
    tell(attendance, "alive", 0, figures={"loss": 0.5, "auc": 0.7})
    tell(attendance, "alive", 1)
    assert attendance.figures() == {0: {"loss": 0.5, "auc": 0.7}, 1: {}}
    tell(attendance, "alive", 0, figures={"loss": 0.25})
    assert attendance.figures()[0] == {"loss": 0.25}
    tell(attendance, "goodbye", 0)
    assert attendance.figures() == {1: {}}


@pytest.mark.parametrize(
    "figures",
    [{"loss": "0.5"}, {3: 0.5}, [0.5], {"n" * 65: 0.5}, {f"m{i}": 0.5 for i in range(33)}],
)
def test_a_worker_can_only_report_few_numbers_with_short_names(figures: Any) -> None:
    attendance = Attendance()
    with pytest.raises(BadRequest, match="expected"):
        tell(attendance, "alive", 0, figures=figures)
    assert attendance.figures() == {}


@pytest.mark.parametrize("report", [{"other": 1}, {"retries": "3"}, {3: 3}, [1]])
def test_a_worker_can_only_say_numbers_of_known_names(report: Any) -> None:
    attendance = Attendance()
    with pytest.raises(BadRequest, match="expected"):
        tell(attendance, "alive", 0, report=report)
    assert attendance.reports() == {}


def test_with_leased_streams_the_members_at_the_end_are_waited_for() -> None:
    """Worker 1 was given up, worker 2 has come late; worker 3 only listened, and knows of none."""
    attendance = Attendance()
    tell(attendance, "alive", 2, late=True)
    tell(attendance, "goodbye", 3, late=True, members=None)
    tell(attendance, "goodbye", 2, late=True, members=[0, 2])
    assert not attendance.is_over
    again = Attendance()
    again.install(attendance.gone())
    for one in (attendance, again):
        tell(one, "goodbye", 0, members=[0, 2])
        assert one.is_over
    with pytest.raises(BadRequest, match="expected 0 <= worker < num_workers"):
        tell(Attendance(), "alive", 2)


def test_of_two_lists_of_members_the_shorter_one_counts_in_any_order() -> None:
    for lists in ([[0, 1, 2], [0, 1]], [[0, 1], [0, 1, 2]]):
        attendance = Attendance()
        for worker, members in enumerate(lists):
            tell(attendance, "goodbye", worker, members=members)
        assert attendance.is_over


class _Interrupted(io.StringIO):
    """Gets SIGTERM while it first writes, and refuses to be written to meanwhile, as files do."""

    is_writing = was_interrupted = False

    def write(self, text: str) -> int:
        if self.is_writing:
            raise RuntimeError("reentrant call")
        self.is_writing = True
        try:
            if not self.was_interrupted:
                self.was_interrupted = True
                os.kill(os.getpid(), signal.SIGTERM)
            return super().write(text)
        finally:
            self.is_writing = False


def test_a_signal_that_interrupts_a_log_line_stops_a_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attendance, stream, line = Attendance(), _Interrupted(), logging.getLogger("trireme.job")
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(line, "handlers", [logging.StreamHandler(stream)])
    monkeypatch.setattr(line, "level", logging.INFO)
    late = threading.Timer(10.0, attendance.stop, ["after the signal"])
    late.start()
    with stop_on_signals(attendance):
        line.info("listening")
        assert attendance.wait(60.0) == "stopped by SIGTERM"
    late.cancel()
