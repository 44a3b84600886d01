"""The pipeline of a training loop: batches are read, planned and pulled ahead of it.

    source -- plan thread --> [depth planned] -- pull thread --> [ahead] --> the loop

The loop takes a batch when its step before has been made. Then the other rows of the batch and the
dense weights are pulled: what that step does not change was pulled during it (async, bounded and
hybrid; see modes/on_servers/pull_ahead.py). So depth hides the time of reading and planning, and
adds no staleness. In sync the loop pulls all, after its last step has been applied everywhere; in
geo the pull thread fetches what the worker's cache lacks. Where several threads share the loop,
each pulls all for itself while the others compute. To evaluate, rows are pulled one batch ahead.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from trireme import accelerator
from trireme.bounded_queue import BoundedQueue
from trireme.data.batch import Batch
from trireme.data.foreign import as_batch
from trireme.errors import BadRequest, check_values
from trireme.job.cluster import Cluster
from trireme.job.default import default
from trireme.nn import BatchPlan, Planner
from trireme.nn.on_device import SentBatch, device_of
from trireme.nn.session import collect, session_of
from trireme.train.loop.replica import Replica
from trireme.train.loop.timing import Timing
from trireme.train.loop.worker_batches import Closable
from trireme.train.modes.base import BeginPull, CompletePull
from trireme.train.optimizer import newest_optimizer
from trireme.worker.gradients import KeysByClass
from trireme.worker.pull import Pulled

log = logging.getLogger("trireme.train")

CLOSE_S = 20.0


@dataclass(frozen=True, slots=True, eq=False)
class _Prepared:
    """A batch on its way to the loop. sent: to the model's device; None: not yet. pulled: None: the
    loop pulls its rows, by `complete` if their pull has begun.
    """

    number: int
    batch: Batch
    plan: BatchPlan
    sent: SentBatch | None = None
    complete: CompletePull | None = None
    pulled: Pulled | None = None


class Pipeline:
    """Iterate to get batches with their rows attached. Use it as a context manager: its threads end
    with it.

    Args:
        source: iterable of batches, or of what `as_batch` converts; it is closed with the pipeline
            if it can be.
        model: its embedding modules say what to look up.
        training: rows get gradients, which the next step pushes.
        depth: batches read and planned ahead, >= 1; more if the mode wants more.
        ahead: whether training begins to pull one batch ahead, where the mode lets it.
        steps: whether the loop makes one step of each batch.
        timing: adds up the time of its threads, and the time that the loop waits and pulls.
        begun: called before the loop gets the first batch, or when there is none.
    """

    def __init__(
        self,
        source: Iterable[Any],
        model: nn.Module,
        *,
        training: bool,
        depth: int = 2,
        ahead: bool = True,
        steps: bool = False,
        timing: Timing | None = None,
        begun: Callable[[], None] | None = None,
        cluster: Cluster | None = None,
    ) -> None:
        check_values("prefetch", depth=(depth >= 1, ">= 1", depth))
        self._cluster = default() if cluster is None else cluster
        self._source, self._training = source, training
        self._timing = timing or Timing()
        self._begun = begun
        self._planner = Planner(model, pool=self._cluster.pool)
        self._link = accelerator.link_to(device_of(model))
        self._session = session_of(self._cluster)
        for table in self._planner.tables:
            self._cluster.client.create_table(table.schema)
        self._optimizer = newest_optimizer(self._cluster)
        self._mode = None if self._optimizer is None else self._optimizer.mode
        self._steps = steps
        self._begin: BeginPull | None = None  # of a pull that the loop completes
        if training and ahead and self._mode is not None:
            self._begin = self._mode.pull_ahead(steps=steps)
        self._pulls_whole = not training or self._mode is None  # in the pull thread
        if training and self._mode is not None:
            depth = max(depth, self._mode.lookahead())
        self._planned: BoundedQueue[_Prepared] = BoundedQueue(depth)
        self._ahead: BoundedQueue[_Prepared] = BoundedQueue(1)
        # Free when a pull may begin: that of a batch waits until the loop has taken the one before.
        # Ctrl-C in the middle of a semaphore's methods would leave it unusable.
        self._may_pull = threading.Lock()

    def __enter__(self) -> Pipeline:
        if self._training and self._session.is_prefetching:
            raise BadRequest(
                "prefetch: expected no other loop that trains on this cluster, found one that has"
                " not ended: if it was left early, close its iterator, batches.close(), or keep"
                " none: for batch in tr.prefetch(...)"
            )
        if self._training and self._mode is not None:
            self._mode.begin_run()
        self._session.is_prefetching |= self._training
        try:
            self._start()
        except BaseException:
            self._end()
            raise
        return self

    def _start(self) -> None:
        self._planned.start("trireme-plan", self._plan_noted())
        if self._has_pull_thread:
            self._ahead.start("trireme-pull", self._pull_ahead())
        self._cluster.add_running(self.stop)
        queues = {"planned": self._planned.__len__, "pulled": self._ahead.__len__}
        self._cluster.metrics.queues.update(queues)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._end()
        if kind is None and not self._training and self._mode is not None:
            self._mode.end_run()  # where it trains, the pass ends, perhaps behind more pipelines

    def _end(self) -> None:
        try:
            self.stop()
        finally:  # also after Ctrl-C while it waits for the threads: another loop may follow
            if self._training:
                self._session.is_prefetching = False
            self._cluster.take_back(self.stop)
            for queue in ("planned", "pulled"):
                self._cluster.metrics.queues.pop(queue, None)

    @property
    def _has_pull_thread(self) -> bool:
        return self._pulls_whole or self._begin is not None

    def stop(self) -> None:
        """End both threads, each after what it works on, within a deadline."""
        for queue in (self._planned, self._ahead):
            queue.close()
        # The pull thread may wait for a permit; with one it sees that its queue is closed. Before
        # that, it could take the permit for another batch, and wait for the next one.
        self._permit_pull()
        has_stopped = _stop(self._planned, CLOSE_S)
        _stop(self._ahead, self._cluster.client.timeout_s + 1)
        if has_stopped and isinstance(self._source, Closable):
            self._source.close()

    def _permit_pull(self) -> None:
        with contextlib.suppress(RuntimeError):  # it is permitted already
            self._may_pull.release()

    def _plan_noted(self) -> Iterator[_Prepared]:
        """The batches; the mode learns of each, and of the end."""
        mode = self._mode if self._training else None
        try:
            for prepared in self._plan():
                if mode is not None:
                    mode.plan(prepared.plan.keys())
                yield prepared
        finally:
            if mode is not None:
                mode.plan(None)

    def _plan(self) -> Iterator[_Prepared]:
        watch, begun = self._timing.background, self._begun
        for number, source in enumerate(watch.timed("read", self._source)):
            if begun is not None:
                begun()
                begun = None
            batch = as_batch(source)
            with watch.measure("unique"):
                plan = self._planner.plan(batch, train=self._training)
            if self._cluster.client.has_tiers:
                self._announce(plan.keys())
            yield _Prepared(number, batch, plan)
        if begun is not None:
            begun()

    def _announce(self, keys: KeysByClass) -> None:
        if self._training and self._mode is not None:
            keys = self._mode.lacking(keys)
        self._cluster.client.announce(keys)

    def _pull_ahead(self) -> Iterator[_Prepared]:
        under_way: KeysByClass = {}  # the keys of the batch that the loop has taken
        for planned in self._planned:
            self._may_pull.acquire()
            keys = planned.plan.keys()
            if self._pulls_whole and self._mode is not None:
                self._mode.flush()
            with self._timing.background.measure("pull"):
                if self._begin is None:
                    planned = self._pull(planned)
                else:
                    complete = self._begin(keys, under_way, self._number_of(planned))
                    planned = replace(self._sent(planned), complete=complete)
            under_way = keys
            yield planned

    def _number_of(self, planned: _Prepared) -> int | None:
        return planned.number if self._steps else None

    def _sent(self, planned: _Prepared) -> _Prepared:
        """The batch, on its way to the device."""
        if planned.sent is not None:
            return planned
        return replace(planned, sent=SentBatch(self._link, planned.batch, planned.plan))

    def _pull(self, planned: _Prepared) -> _Prepared:
        """The batch with its rows, on their way to the device."""
        if planned.complete is not None:
            pulled = planned.complete()
        elif self._mode is None:
            pulled = self._cluster.client.pull(planned.plan.keys(), blocks=self._training)
        elif self._training:
            number = self._number_of(planned)
            pulled = self._mode.pull(planned.plan.keys(), blocks=True, number=number)
        else:
            pulled = self._mode.read(planned.plan.keys())
        planned = self._sent(planned)
        assert planned.sent is not None
        planned.sent.send_rows(pulled.rows)
        return replace(planned, pulled=pulled)

    def __iter__(self) -> Iterator[Batch]:
        return self.batches(None if self._optimizer is None else self._optimizer.replica)

    def batches(self, replica: Replica | None) -> Iterator[Batch]:
        """Batches for one of several threads that share the pipeline. replica: gets the dense
        weights of each batch and its number; its next step pushes the gradients of the rows. None:
        there is no optimizer.
        """
        if replica is not None:
            replica.number = -1
        waiting = self._ahead if self._has_pull_thread else self._planned
        for prepared in self._timing.loop.timed("wait", waiting):
            if replica is not None:
                replica.number = prepared.number
            if prepared.pulled is None:
                with self._timing.loop.measure("pull"):
                    prepared = self._pull(prepared)
                if self._mode is not None and self._mode.has_stopped():
                    break
            assert prepared.pulled is not None
            assert prepared.sent is not None
            if self._training and replica is not None:
                replica.install(prepared.pulled)
            pending = self._session.pending if replica is None else replica.pending
            batch, plan, rows = prepared.sent.receive()
            leaves = plan.attach(batch, rows, train=self._training)
            if self._training:
                self._session.note_untrained(pending, self._planner.tables)
                collect(pending, plan, leaves, prepared.pulled)
            self._permit_pull()  # last: the pull thread would take the interpreter meanwhile
            yield batch


def _stop(queue: BoundedQueue[_Prepared], timeout_s: float) -> bool:
    """Close the queue. Returns False: its thread did not end in time."""
    queue.close()
    has_ended = queue.join(timeout_s)
    if not has_ended:
        log.warning(
            "%s: its source did not come back within %.0f s and is left behind",
            queue.name,
            timeout_s,
        )
    return has_ended
