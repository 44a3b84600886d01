"""A lock that many threads share, or one holds alone."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class SharedLock:
    """A readers-writer lock: a thread that waits to hold it alone goes before new sharers. One
    thread may not enter it twice. Threads: any.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_sharing = 0
        self._is_exclusive = False
        self._num_waiting = 0

    @contextmanager
    def shared(self) -> Iterator[None]:
        with self._changed:
            while self._is_exclusive or self._num_waiting:
                self._changed.wait()
            self._num_sharing += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_sharing -= 1
                if not self._num_sharing:
                    self._changed.notify_all()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        with self._changed:
            self._num_waiting += 1
            try:
                while self._is_exclusive or self._num_sharing:
                    self._changed.wait()
            finally:
                self._num_waiting -= 1
            self._is_exclusive = True
        try:
            yield
        finally:
            with self._changed:
                self._is_exclusive = False
                self._changed.notify_all()
