"""ReadAhead: keeps the order, raises errors after the items before them, and ends its thread."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from trireme.bounded_queue import ReadAhead


def test_items_come_in_order_and_the_error_after_them():
    def source():
        yield from range(100)
        raise ZeroDivisionError("at 100")

    ahead = ReadAhead(source(), depth=3, name="test-ahead")
    assert [next(ahead) for _ in range(100)] == list(range(100))
    with pytest.raises(ZeroDivisionError, match="at 100"):
        next(ahead)
    with pytest.raises(StopIteration):
        next(ahead)


def test_close_ends_a_thread_that_waits_for_room_and_closes_its_source():
    closed = threading.Event()

    def source():
        try:
            while True:
                yield 1
        finally:
            closed.set()

    ahead = ReadAhead(source(), depth=1, name="test-ahead")
    next(ahead)
    ahead.close()
    ahead.close()
    assert closed.is_set()
    assert not any(thread.name == "test-ahead" for thread in threading.enumerate())


def test_an_error_of_the_source_while_closing_is_not_swallowed():
    def source():
        try:
            while True:
                yield 1
        finally:
            raise ZeroDivisionError("while closing")

    ahead = ReadAhead(source(), depth=1, name="test-ahead")
    next(ahead)
    with pytest.raises(ZeroDivisionError, match="while closing"):
        ahead.close()


def test_the_interpreter_ends_with_a_stream_left_open():
    code = """
from trireme.bounded_queue import ReadAhead
from itertools import count
ahead = ReadAhead(count(), depth=2, name="test-ahead")
print(next(ahead))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert (done.stdout, done.stderr) == ("0\n", "")
