"""A bounded queue between two threads of a pipeline that ends: by running dry, by an error, by
being closed.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")
log = logging.getLogger("trireme.train")

CLOSE_S = 20.0


class Closed(Exception):
    """The consumer wants no more."""


class Conduit(Generic[T]):
    """One producer thread; consumers share the items. The producer's exception is raised in each
    consumer, after the items before it.

    A consumer waits as long as the producer's thread lives: how long data may take is the
    source's business.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._items: deque[T] = deque()
        self._changed = threading.Condition()
        self._is_finished = False
        self._is_closed = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start(self, name: str, produce: Callable[[], Iterator[T]]) -> None:
        """Run the producer's iterator in a thread of its own."""
        self._thread = threading.Thread(target=self._run, args=(produce,), name=name, daemon=True)
        self._thread.start()

    def _run(self, produce: Callable[[], Iterator[T]]) -> None:
        error: BaseException | None = None
        try:
            for item in produce():
                self._put(item)
        except Closed:
            pass
        except BaseException as raised:  # noqa: BLE001 handed to the consumer
            error = raised
        with self._changed:
            self._is_finished, self._error = True, error
            self._changed.notify_all()

    def _put(self, item: T) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or len(self._items) < self._capacity)
            if self._is_closed:
                raise Closed
            self._items.append(item)
            self._changed.notify_all()

    def __len__(self) -> int:
        """Items that wait for a consumer."""
        return len(self._items)

    def __iter__(self) -> Iterator[T]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._items or self._is_finished or self._is_closed)
                if self._is_closed:
                    raise Closed
                if not self._items:
                    if self._error is not None:
                        raise self._error
                    return
                item = self._items.popleft()
                self._changed.notify_all()
            yield item

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """Tell both sides to stop, and wait until the producer has ended its current item.

        Returns:
            Whether it has; False: it took longer, and its thread is left behind.
        """
        with self._changed:
            self._is_closed = True
            self._items.clear()
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                log.warning(
                    "%s: its source did not come back within %.0f s and is left behind",
                    self._thread.name,
                    timeout_s,
                )
                return False
        return True
