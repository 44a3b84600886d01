"""A connection that several threads use in turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.jobs import in_threads
from trireme.errors import BadRequest
from trireme.rpc import Call, Reply
from trireme.worker.transport import LockedTransport


class Answering:
    def call_all(self, calls: Sequence[Call], *, timeout_s: float) -> list[Reply]:
        return [Reply() for _ in calls]

    def close(self) -> None:
        pass


class Interrupted:
    """A lock that Ctrl-C finds just acquired."""

    def __init__(self, lock: Any) -> None:
        self._lock, self.release = lock, lock.release

    def acquire(self, timeout: float) -> bool:
        self._lock.acquire(timeout=timeout)
        raise KeyboardInterrupt


def test_ctrl_c_leaves_the_connection_to_others_wherever_it_comes() -> None:
    transport = LockedTransport(Answering())
    lock = transport._lock
    transport._lock = Interrupted(lock)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        transport.call_all([], 0.0)
    transport._lock = lock
    assert in_threads([lambda: transport.call_all([], 0.0)]) == [[]]


def test_a_busy_connection_is_released_by_whoever_uses_it_alone() -> None:
    transport = LockedTransport(Answering())
    with transport._lock, pytest.raises(TimeoutError, match="its connection was busy for"):
        in_threads([lambda: transport.call_all([], 0.0)])
    assert transport.call_all([], 0.0) == []


def test_a_call_within_a_call_is_refused_and_the_one_around_it_goes_on() -> None:
    class CalledBySignal(Answering):
        def call_all(self, calls: Sequence[Call], *, timeout_s: float) -> list[Reply]:
            with pytest.raises(BadRequest, match="found another within it"):
                transport.call_all([], 60.0)
            return super().call_all(calls, timeout_s=timeout_s)

    transport = LockedTransport(CalledBySignal())
    for _ in range(2):
        assert transport.call_all([], 0.0) == []
