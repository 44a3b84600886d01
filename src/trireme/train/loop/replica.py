"""Several training threads in one process: each trains a replica of the model on every T-th batch.

On a small batch, waking torch's threads costs more than the operation. The woken threads also
compete with those that plan, pull and push. A thread per batch does not wait for others. With T
threads weights are at most T - 1 steps old.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from trireme.bounded_queue import Closed
from trireme.errors import ResourceExhausted, start_thread
from trireme.table import Table
from trireme.threads import torch_threads
from trireme.worker.dense_parameters import DenseParameters
from trireme.worker.lookups import PendingLookups
from trireme.worker.pull import Pulled


@dataclass(eq=False)
class Replica:
    """What one training thread works on."""

    model: nn.Module
    dense: DenseParameters  # the model's
    pending: PendingLookups
    number: int = -1  # of its batch, from 0 in the order of the stream; -1: it has none yet

    def install(self, pulled: Pulled) -> None:
        """Write pulled dense weights into the model's parameters."""
        for block_ids, values in pulled.blocks or []:
            self.dense.install(block_ids, values)

    def copy(self, tables: Sequence[Table]) -> Replica:
        """Another replica, with parameters and buffers of its own and the same tables."""
        model = copy.deepcopy(self.model, {id(table): table for table in tables})
        return Replica(model, self.dense.of_copy(model), PendingLookups())


class BatchOrder:
    """Lets threads act in the order of their batches, so that positions of the stream only grow. A
    thread waits without a deadline while the others live: a model may compute for long.
    """

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._changed = threading.Condition()
        self._next = 0
        self._alive, self._num_replicas = list(replicas), len(replicas)

    @contextmanager
    def turn(self, replica: Replica) -> Iterator[None]:
        """Run the block after those of all batches before. Raises Closed: one of them failed."""
        number = replica.number
        with self._changed:
            self._changed.wait_for(lambda: self._next == number or self._is_hopeless(number))
            if self._next != number:
                raise Closed
        yield
        with self._changed:
            self._next = number + 1
            self._changed.notify_all()

    def _is_hopeless(self, number: int) -> bool:
        has_failed = len(self._alive) < self._num_replicas
        return has_failed and not any(self._next <= other.number < number for other in self._alive)

    def fail(self, replica: Replica) -> None:
        """The replica's block will not run. Blocks of batches before still may."""
        with self._changed:
            self._alive.remove(replica)
            self._changed.notify_all()


def train_replicas(
    replicas: Sequence[Replica], work: Callable[[Replica], None], fail: Callable[[Replica], None]
) -> None:
    """Run `work` on each replica, the first in this thread; returns when all have ended. When one
    fails, `fail` is called to make the others end soon. Raises the first error; those of other
    threads follow from it.
    """
    errors: list[BaseException] = []

    def run(replica: Replica) -> None:
        try:
            work(replica)
        except BaseException as error:  # noqa: BLE001 raised below, in the caller's thread
            errors.append(error)
            fail(replica)

    threads = [
        threading.Thread(target=run, args=(r,), name=f"trireme-train-{i}", daemon=True)
        for i, r in enumerate(replicas[1:], 1)
    ]
    # One operation should not wait for the threads of another.
    with torch_threads(max(1, torch.get_num_threads() // len(replicas))):
        started = []
        for replica, thread in zip(replicas[1:], threads, strict=True):
            try:
                start_thread(thread)
                started.append(thread)
            except ResourceExhausted as error:
                errors.append(error)
                fail(replica)
        run(replicas[0])
        for thread in started:
            thread.join()
    if errors:
        raise errors[0]
