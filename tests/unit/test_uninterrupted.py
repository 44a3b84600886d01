"""Ctrl-C within work that is not to be left half done."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.jobs import in_threads
from trireme.threads import uninterrupted


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt_in(parts: list[str], times: int) -> None:
    for number in range(times):
        parts.append(f"before {number}")
        signal.raise_signal(signal.SIGINT)
    parts.append("end")


def test_ctrl_c_comes_when_the_work_is_done() -> None:
    parts: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        uninterrupted(lambda: interrupt_in(parts, 1))
    assert parts == ["before 0", "end"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert uninterrupted(lambda: 1) == 1


def test_a_second_ctrl_c_comes_at_once() -> None:
    parts: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        uninterrupted(lambda: interrupt_in(parts, 2))
    assert parts == ["before 0", "before 1"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_the_first_ctrl_c_may_name_another_for_the_second() -> None:
    def ask(number: int, frame: object) -> None:
        signal.signal(number, signal.default_int_handler)

    for times in (1, 2):
        signal.signal(signal.SIGINT, ask)
        parts: list[str] = []
        if times == 1:
            uninterrupted(lambda parts=parts: interrupt_in(parts, 1))
        else:
            with pytest.raises(KeyboardInterrupt):
                uninterrupted(lambda parts=parts: interrupt_in(parts, 2))
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_of_the_work_is_what_ctrl_c_interrupted() -> None:
    def fail() -> None:
        signal.raise_signal(signal.SIGINT)
        raise OSError("no room")

    with pytest.raises(KeyboardInterrupt) as interrupted:
        uninterrupted(fail)
    assert isinstance(interrupted.value.__context__, OSError)


def test_other_threads_and_ignored_signals_are_left_alone() -> None:
    assert in_threads([lambda: uninterrupted(lambda: 1)]) == [1]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    uninterrupted(lambda: interrupt_in([], 2))
