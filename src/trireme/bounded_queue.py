"""Bounded queues between a thread that runs an iterator and the consumers of its items."""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Any, Generic, TypeVar

from trireme.errors import Internal, start_thread

T = TypeVar("T")

# A consumer waits as long as the producer works; it checks this often whether its thread lives.
_CHECK_S = 5.0
_JOIN_S = 30.0


class Closed(Exception):
    """The queue was closed before its end."""


class BoundedQueue(Iterator[T], Generic[T]):
    """The items of an iterator that a thread of its own runs, at most `capacity` items ahead.

    The iterator's error is raised in each consumer, after the items before it. How long an item
    takes is the iterator's business.

    Attributes:
        is_finished: the iterator has ended.
        error: what the iterator raised; after `close` only what it raised while it ended.

    Threads: any may consume, and close.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        # Taken by itself: Ctrl-C in the middle of a condition's own `with` would leave it taken.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._items: deque[T] = deque()
        self.is_finished = self._is_closed = False
        self.error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start(self, name: str, items: Iterator[T]) -> None:
        """Run the iterator in a thread, which alone uses it, and closes it if it is a generator.
        Raises ResourceExhausted: the system refuses the thread.
        """
        # A daemon, so that the process can end while no consumer comes.
        thread = threading.Thread(target=self._fill, args=(items,), name=name, daemon=True)
        start_thread(thread)
        self._thread = thread

    def _fill(self, items: Iterator[T]) -> None:
        error: BaseException | None = None
        try:
            for item in items:
                if not self._put(item):
                    break
        except BaseException as raised:  # noqa: BLE001 raised again in the consumers
            # After close() it is about an item that no caller waits for.
            error = None if self._is_closed else raised
        try:
            if isinstance(items, Generator):
                items.close()
        except BaseException as raised:  # noqa: BLE001 kept in `error`
            error = raised
        with self._lock:
            self.is_finished, self.error = True, error
            self._changed.notify_all()

    def _put(self, item: T) -> bool:
        """Add an item when there is room. Returns False: the queue is closed."""
        with self._lock:
            self._changed.wait_for(lambda: self._is_closed or len(self._items) < self._capacity)
            if not self._is_closed:
                self._items.append(item)
                self._changed.notify_all()
            return not self._is_closed

    def __len__(self) -> int:
        """The number of items that wait for a consumer."""
        return len(self._items)

    def __next__(self) -> T:
        """Raises Closed; Internal: the thread has died."""
        with self._lock:
            while not (self._items or self.is_finished or self._is_closed):
                self._changed.wait(_CHECK_S)
                is_alive = self._thread is not None and self._thread.is_alive()
                if not (is_alive or self.is_finished):
                    raise Internal(f"{self.name}: its thread has ended without an error")
            if self._is_closed:
                raise Closed
            if self._items:
                self._changed.notify_all()
                return self._items.popleft()
        if self.error is not None:
            raise self.error
        raise StopIteration

    @property
    def name(self) -> str:
        """The name of the thread."""
        return "" if self._thread is None else self._thread.name

    def close(self) -> None:
        """Drop the items, and end the thread after the item that it works on."""
        with self._lock:
            self._is_closed = True
            self._items.clear()
            self.error = None
            self._changed.notify_all()

    def join(self, timeout_s: float) -> bool:
        """Wait for the end of the thread. Returns False: it takes longer."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
            return not self._thread.is_alive()
        return True


class ReadAhead(Iterator[T], Generic[T]):
    """Items of `source` in order; its error is raised after the items before it.

    close() stops and joins the thread; dropping the object or leaving the interpreter does the
    same.

    Args:
        stop: called before the join, by the thread that closes: makes a source that waits for
            something else end or raise soon.

    Threads: one consumer at a time.
    """

    def __init__(
        self, source: Iterator[T], *, depth: int, name: str, stop: Callable[[], None] = lambda: None
    ) -> None:
        self._queue: BoundedQueue[T] = BoundedQueue(depth)
        # It runs at exit too, and joins the thread before the interpreter is torn down.
        self._finalizer = weakref.finalize(self, _stop, self._queue, stop)
        self._queue.start(name, source)

    def __next__(self) -> T:
        try:
            return next(self._queue)
        except Closed:
            raise StopIteration from None
        except BaseException:
            if self._queue.is_finished:
                self.close()
            raise

    def close(self) -> None:
        """Stop the thread and wait for it; further items are lost. Raises the error that the source
        raised while it was closed.
        """
        self._finalizer()


def _stop(queue: BoundedQueue[Any], stop: Callable[[], None]) -> None:
    queue.close()
    stop()
    if not queue.join(_JOIN_S):
        raise Internal(f"ReadAhead: thread {queue.name} did not stop within {_JOIN_S:.0f} s")
    if queue.error is not None:
        raise queue.error
