"""Threads, memory and garbage collection of a process that computes."""

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from trireme import _core
from trireme.errors import BadRequest

T = TypeVar("T")

# More than the buffers of a step with large batches.
FREED_BYTES_KEPT = 512 << 20
_FROZEN_BY_PYTHON = 1000  # at most, as 3.12 starts; a script that freezes its own freezes thousands
THREADS_MAX = 1024  # the system refuses far more, after seconds of making them


class _Frozen:
    """Who has frozen the objects of this process: num_blocks of `frozen_objects`, or others.

    Python answers by counting the frozen objects, which takes tens of milliseconds: it is asked
    only where no block runs, and no more once others have.
    """

    lock = threading.Lock()
    num_blocks = 0
    by_others = False


def start_pool(threads: int) -> _core.Pool:
    """Start threads for the calls of the core, 0: one for each core that this process may use; and
    keep freed memory from now on.

    Steps allocate and free the same large buffers over and over: arrays of keys and rows, and
    activations in torch. Returning them to the system would cost page faults at every step.

    Raises BadRequest: as checked_threads.
    """
    _core.keep_freed_memory(FREED_BYTES_KEPT)  # no effect without glibc
    return _core.Pool(checked_threads(threads))


def checked_threads(threads: int) -> int:
    """The number of threads, 0: one for each core that this process may use. Raises BadRequest:
    more than THREADS_MAX, or fewer than none.
    """
    if not 0 <= threads <= THREADS_MAX:
        raise BadRequest(
            f"threads: expected 0 to {THREADS_MAX} (--threads, TRIREME_THREADS), found {threads}"
        )
    return threads or len(os.sched_getaffinity(0))


@contextmanager
def frozen_objects(num_new: int = 0) -> Iterator[None]:
    """While the block runs, the cyclic garbage collector ignores the objects that exist now, and
    searches when there are `num_new` others; 0: when Python would.

    Modules and functions, hundreds of thousands of objects, live until the end. Each search of them
    stops all threads for a tenth of a second. No effect on them if the process has frozen objects
    itself, or was forked from one that had, as by `trireme launch`.
    """
    thresholds = gc.get_threshold()
    with _Frozen.lock:
        if _Frozen.num_blocks == 0 and not _Frozen.by_others:
            _Frozen.by_others = gc.get_freeze_count() > _FROZEN_BY_PYTHON
            if not _Frozen.by_others:
                gc.freeze()
        _Frozen.num_blocks += 1
    if num_new:
        gc.set_threshold(num_new, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        with _Frozen.lock:
            _Frozen.num_blocks -= 1
            if _Frozen.num_blocks == 0 and not _Frozen.by_others:
                gc.unfreeze()


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """While the block runs, each operation of torch uses at most this many threads."""
    import torch  # here, for commands that read settings do without it

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def uninterrupted(work: Callable[[], T]) -> T:
    """work(), which what Python does at the first Ctrl-C follows: nothing is left half done. At a
    second one it comes at once. Has an effect in the main thread, where signals are handled.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    if (before := signal.getsignal(signal.SIGINT)) is None:  # not Python's, which cannot restore it
        return work()
    held: list[int] = []

    def hold(number: int, _: object) -> None:
        held.append(number)
        if len(held) > 1:
            release()

    def release() -> None:
        signal.signal(signal.SIGINT, before)
        for number in held:
            signal.raise_signal(number)

    signal.signal(signal.SIGINT, hold)
    try:
        return work()
    finally:
        if len(held) < 2:
            release()
