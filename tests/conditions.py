"""Conditions that tests wait for."""

import threading
import time
from collections.abc import Callable

WAIT_S = 30.0


def wait_until(is_true: Callable[[], bool]) -> None:
    """Returns when `is_true` returns True; fails after 30 s."""
    deadline = time.monotonic() + WAIT_S
    while not is_true():
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)
