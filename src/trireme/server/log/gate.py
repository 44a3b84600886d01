"""Many may be inside, or one alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """A lock that is shared or held alone. Who waits to be alone goes before newcomers. Not to be
    entered twice by one thread. Threads: any.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._is_alone = False
        self._waiting = 0

    @contextmanager
    def shared(self) -> Iterator[None]:
        with self._changed:
            while self._is_alone or self._waiting:
                self._changed.wait()
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                if not self._inside:
                    self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        with self._changed:
            self._waiting += 1
            try:
                while self._is_alone or self._inside:
                    self._changed.wait()
            finally:
                self._waiting -= 1
            self._is_alone = True
        try:
            yield
        finally:
            with self._changed:
                self._is_alone = False
                self._changed.notify_all()
