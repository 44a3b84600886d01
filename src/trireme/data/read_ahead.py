"""Runs an iterator in a thread of its own, a bounded number of items ahead of its consumer."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Generic, TypeVar

from trireme.errors import Internal

T = TypeVar("T")

# A consumer waits as long as its source works; it looks this often whether the thread still lives.
_LOOK_S = 5.0
_JOIN_S = 30.0


class ReadAhead(Iterator[T], Generic[T]):
    """Items of `source` in order; what it raises is raised here, after the items before it.

    The source is used, and closed if it is a generator, by the thread alone. close() stops and
    joins the thread; dropping the object or leaving the interpreter does the same.

    Args:
        stop: called by whoever closes, before the join: makes a source that waits for something
            else end or raise soon.

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
        self._shared = _Shared[T](depth)
        # A daemon, so that an exit does not wait for a consumer that never comes back; the
        # finalizer runs at exit too and joins it before the interpreter is torn down.
        self._thread = threading.Thread(
            target=_produce, args=(source, self._shared), name=name, daemon=True
        )
        self._finalizer = weakref.finalize(self, _stop, self._shared, self._thread, stop)
        self._thread.start()

    def __next__(self) -> T:
        shared = self._shared
        with shared.changed:
            while not shared.items and not shared.is_done:
                shared.changed.wait(_LOOK_S)
                if not self._thread.is_alive() and not shared.is_done:
                    raise Internal(f"ReadAhead: thread {self._thread.name} ended without a word")
            if shared.items:
                shared.changed.notify_all()
                return shared.items.popleft()
            error, shared.error = shared.error, None
        self.close()
        if error is not None:
            raise error
        raise StopIteration

    def close(self) -> None:
        """Stop the thread and wait for it; further items are lost."""
        self._finalizer()


class _Shared(Generic[T]):
    """What both threads see; every member is guarded by `changed`."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.changed = threading.Condition()
        self.items: deque[T] = deque()
        self.error: BaseException | None = None
        self.is_done = False  # the source has ended, failed or been told to stop


def _produce(source: Iterator[T], shared: _Shared[T]) -> None:
    error: BaseException | None = None
    try:
        for item in source:
            if not _offer(item, shared):
                break
    except BaseException as caught:  # noqa: BLE001 - raised again in the consumer
        # Told to stop in the meantime: the error is of an item that nobody asks for any more.
        error = None if shared.is_done else caught
    try:
        if isinstance(source, Generator):
            source.close()
    except BaseException as caught:  # noqa: BLE001 - raised again in close()
        error = caught
    with shared.changed:
        shared.error = error
        shared.is_done = True
        shared.changed.notify_all()


def _offer(item: T, shared: _Shared[T]) -> bool:
    """Add an item when there is room; False if told to stop."""
    with shared.changed:
        # The consumer takes an item or closes; its finalizer closes in any case.
        while len(shared.items) >= shared.depth and not shared.is_done:
            shared.changed.wait(_LOOK_S)
        if not shared.is_done:
            shared.items.append(item)
            shared.changed.notify_all()
        return not shared.is_done


def _stop(shared: _Shared[T], thread: threading.Thread, stop: Callable[[], None]) -> None:
    with shared.changed:
        shared.is_done = True
        shared.items.clear()
        shared.error = None
        shared.changed.notify_all()
    stop()
    if thread is threading.current_thread():  # dropped by the source itself
        return
    thread.join(_JOIN_S)
    if thread.is_alive():
        raise Internal(f"ReadAhead: thread {thread.name} did not stop within {_JOIN_S:.0f} s")
    if shared.error is not None:
        raise shared.error
