"""What every process of a job sets up once: its threads, and how it keeps memory."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from trireme import _core

# More than the buffers of a step with large batches; a process that needs less keeps less.
FREED_BYTES_KEPT = 512 << 20


def start_pool(threads: int) -> _core.Pool:
    """Threads for the calls of the core, 0 for one per CPU; and from now on freed memory is kept.

    Steps take and free the same large buffers over and over: arrays of keys and rows here, and
    activations in torch. Giving them back in between would cost page faults at every step.
    """
    _core.keep_freed_memory(FREED_BYTES_KEPT)  # without effect where the C library cannot
    return _core.Pool(threads or os.cpu_count() or 1)


@contextmanager
def settled() -> Iterator[None]:
    """While the block runs, the cyclic collector leaves alone what exists now.

    Modules and functions, hundreds of thousands of objects, live until the end; searching them for
    garbage stops every thread for a tenth of a second, again and again. Nothing if the process has
    frozen objects itself.
    """
    is_ours = gc.get_freeze_count() == 0
    if is_ours:
        gc.freeze()
    try:
        yield
    finally:
        if is_ours:
            gc.unfreeze()


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """While the block runs, each operation of torch uses at most so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
