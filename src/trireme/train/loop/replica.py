"""Several training threads in one process: each trains a replica of the model, batches in turn.

An operation of torch on a small batch is shorter than the time to wake torch's threads and to wait
for the last of them, which the threads that plan, pull and push hold up. A thread per batch needs
no such meetings. With T threads weights are at most T - 1 steps old: the other threads' batches.
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
from trireme.table import Table
from trireme.threads import torch_threads
from trireme.worker.dense_parameters import DenseParameters
from trireme.worker.lookups import PendingLookups
from trireme.worker.pull import Pulled


@dataclass(eq=False)
class Replica:
    """What one training thread works on: a model, its dense parameters, and the rows it has looked
    up since its last step.

    Attributes:
        number: of the batch it works on, from 0 in the order of the stream; -1: none yet.
    """

    model: nn.Module
    dense: DenseParameters
    pending: PendingLookups
    number: int = -1

    def install(self, pulled: Pulled) -> None:
        """Write pulled dense weights into the model's parameters."""
        for block_ids, values in pulled.blocks or []:
            self.dense.install(block_ids, values)

    def copy(self, tables: Sequence[Table]) -> Replica:
        """Another one, with parameters and buffers of its own; the tables are the same."""
        model = copy.deepcopy(self.model, {id(table): table for table in tables})
        return Replica(model, self.dense.of_copy(model), PendingLookups())


class Turns:
    """Lets threads act in the order of their batches, so that positions of the stream only grow.

    A thread waits as long as the others live: how long a model computes is its own business.
    """

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._changed = threading.Condition()
        self._next = 0
        self._alive, self._num_replicas = list(replicas), len(replicas)

    @contextmanager
    def turn(self, replica: Replica) -> Iterator[None]:
        """Run the block after those of all batches before the replica's. Raises Closed: a thread
        that had one of these has failed.
        """
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
        """Its turn will not come, whatever batch it had; those before that still may."""
        with self._changed:
            self._alive.remove(replica)
            self._changed.notify_all()


def train_replicas(
    replicas: Sequence[Replica], work: Callable[[Replica], None], fail: Callable[[Replica], None]
) -> None:
    """Run `work` on each replica, the first in this thread; returns when all have ended.

    Args:
        fail: called when `work` on this replica has failed; makes the others end soon.

    Raises:
        The first error of any of them; the others' follow from it.
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
    # Each its share: one operation should not wait for the threads of another.
    with torch_threads(max(1, torch.get_num_threads() // len(replicas))):
        for thread in threads:
            thread.start()
        run(replicas[0])
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
