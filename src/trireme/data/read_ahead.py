"""Runs an iterator in a thread of its own, a bounded number of items ahead of its consumer."""

import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from trireme.bounded_queue import BoundedQueue, Closed
from trireme.errors import Internal

T = TypeVar("T")

_JOIN_S = 30.0


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
        self,
        source: Iterator[T],
        *,
        depth: int,
        name: str,
        stop: Callable[[], None] = lambda: None,
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
