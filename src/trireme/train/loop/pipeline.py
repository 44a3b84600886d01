"""The pipeline of a training loop: read and plan ahead, pull one batch ahead (async) or just in
time (sync).

    source -- plan thread --> [depth planned] -- pull thread --> [pulled] --> the loop

In async the pull for the next batch starts when the loop has taken the current one and the pushes
made until then have been applied. So weights are one step old when they are used, whatever the
depth: depth hides the time of reading and planning, never adds staleness. In sync the loop itself
pulls, after its last step has been applied everywhere; and where several threads share the loop,
each pulls for itself while the others compute. In geo it pulls from the worker's cache, for which
the pull thread has fetched what this lacked.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from trireme import _core
from trireme.data.batch import Batch
from trireme.data.foreign import as_batch
from trireme.errors import BadRequest
from trireme.job.cluster import Cluster
from trireme.job.default import default
from trireme.nn import Plan, Planner
from trireme.protocol.routing import Keys
from trireme.threads import settled
from trireme.train.loop.conduit import Conduit
from trireme.train.loop.replica import Replica
from trireme.train.loop.share import Closes, Place, share_of
from trireme.train.loop.timing import Timing
from trireme.train.modes.geo import Geo
from trireme.train.optimizer import DistributedOptimizer
from trireme.train.shared_pass import SharedPass
from trireme.train.succession import Inherited, check_order, pass_over
from trireme.worker.client import Pulled
from trireme.worker.lookups import PendingLookups, RowLookup


class _Planned(NamedTuple):
    number: int
    batch: Batch
    plan: Plan

    def keys(self) -> dict[str, Keys]:
        return {part.table.part: part.keys for part in self.plan.tables}


class Pipeline:
    """Iterate to get batches with their rows attached. Use it as a context manager: threads end
    with it.

    Args:
        source: iterable of batches, or of what `as_batch` makes one of: mappings from names to
            tensors, KeyedJaggedTensors; closed with the pipeline if it can be.
        model: its embedding modules say what to look up.
        training: rows get gradients and the next step pushes them; else nothing is registered.
        depth: batches read and planned ahead, >= 1.
        ahead: whether training pulls one batch ahead, where the mode lets it.
        steps: whether the loop makes one step of each batch, as it must for bounded to pull ahead.
        timing: adds up what its threads spend, and the loop on waiting and pulling.
        begun: called when the source has given its first batch, before the loop gets it, or when
            there is none.
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
        if depth < 1:
            raise BadRequest(f"prefetch: expected depth >= 1, found {depth}")
        self._cluster = default() if cluster is None else cluster
        self._source, self._training = source, training
        self._timing = timing or Timing()
        self._begun = begun
        self._planner = Planner(model, pool=self._cluster.pool)
        for table in self._planner.tables:
            self._cluster.ensure_table(table)
        self._planned: Conduit[_Planned] = Conduit(depth)
        self._pulled: Conduit[tuple[_Planned, Pulled]] = Conduit(1)
        self._fetched: Conduit[_Planned] = Conduit(1)
        # One permit: the pull of a batch waits until the loop has taken the one before.
        self._may_pull = threading.Semaphore(1)
        of = self._cluster.row_source
        self._optimizer = of if isinstance(of, DistributedOptimizer) else None
        self._steps = steps
        may_pull_ahead = self._optimizer is None or self._optimizer.may_pull_ahead(steps=steps)
        self._pulls_in_loop = training and not (ahead and may_pull_ahead)
        of_geo = None if self._optimizer is None else self._optimizer.geo
        self._geo = of_geo if training and of_geo is not None and of_geo.may_fetch else None

    def __enter__(self) -> Pipeline:
        if self._training and self._cluster.is_prefetching:
            raise BadRequest("prefetch: another pipeline is training on this cluster already")
        if self._training and self._optimizer is not None:
            self._optimizer.begin_run()
        self._cluster.is_prefetching |= self._training
        self._planned.start("trireme-plan", self._plan)
        if self._geo is not None:
            self._fetched.start("trireme-pull", partial(self._fetch, self._geo))
        elif not self._pulls_in_loop:
            self._pulled.start("trireme-pull", self._pull)
        self._cluster.add_running(self.stop)
        ahead = self._pulled if self._geo is None else self._fetched
        queues = {"planned": self._planned.__len__, "pulled": ahead.__len__}
        self._cluster.metrics.queues.update(queues)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._cluster.remove_running(self.stop)
        for queue in ("planned", "pulled"):
            self._cluster.metrics.queues.pop(queue, None)
        if self._training:
            self._cluster.is_prefetching = False

    def stop(self) -> None:
        """End both threads; what they are doing is finished first, within a deadline."""
        # The pull thread may wait for a permit: give it one, it then finds its conduit closed.
        self._may_pull.release()
        has_stopped = self._planned.close()
        for ahead in (self._pulled, self._fetched):
            ahead.close(self._cluster.client.timeout_s + 1)
        if has_stopped and isinstance(self._source, Closes):
            self._source.close()

    def _plan(self) -> Iterator[_Planned]:
        behind, begun = self._timing.behind, self._begun
        for number, source in enumerate(behind.timed("read", self._source)):
            if begun is not None:
                begun()
                begun = None
            batch = as_batch(source)
            with behind.measure("unique"):
                plan = self._planner.plan(batch, train=self._training)
            yield _Planned(number, batch, plan)
        if begun is not None:
            begun()

    def _pull(self) -> Iterator[tuple[_Planned, Pulled]]:
        for planned in self._planned:
            self._may_pull.acquire()
            if self._optimizer is not None:
                self._optimizer.flush()
            with self._timing.behind.measure("pull"):
                pulled = self._pull_one(planned)
            yield planned, pulled

    def _fetch(self, geo: Geo) -> Iterator[_Planned]:
        assert self._optimizer is not None
        for planned in self._planned:
            self._may_pull.acquire()
            with self._timing.behind.measure("pull"):
                geo.fetch(planned.keys(), self._optimizer.data_time())
            yield planned

    def _pull_one(self, planned: _Planned) -> Pulled:
        number = planned.number if self._steps else None
        if not self._training:
            return self._cluster.pull(planned.keys(), training=False)
        if self._optimizer is None:
            return self._cluster.client.pull(planned.keys(), blocks=True)
        return self._optimizer.pull(planned.keys(), blocks=True, number=number)

    def _pull_in_loop(self, replica: Replica | None) -> Iterator[tuple[_Planned, Pulled]]:
        source = self._planned if self._geo is None else self._fetched
        for planned in self._timing.loop.timed("wait", source):
            if replica is not None:
                replica.number = planned.number
            with self._timing.loop.measure("pull"):
                pulled = self._pull_one(planned)
            if self._optimizer is not None and self._optimizer.is_stopped:
                break
            yield planned, pulled

    def __iter__(self) -> Iterator[Batch]:
        return self.batches(None if self._optimizer is None else self._optimizer.replica)

    def batches(self, replica: Replica | None) -> Iterator[Batch]:
        """Batches for one of several threads that share the pipeline, whatever the others leave.

        Args:
            replica: gets the dense weights of each batch and its number; its next step pushes the
                gradients of the rows. None: there is no optimizer.
        """
        if replica is not None:
            replica.number = -1
        if self._pulls_in_loop:
            pulled_batches = self._pull_in_loop(replica)
        else:
            pulled_batches = self._timing.loop.timed("wait", self._pulled)
        for planned, pulled in pulled_batches:
            self._may_pull.release()
            if self._training and replica is not None:
                replica.number = planned.number
                replica.install(pulled)
            self._attach(planned, pulled, replica.pending if replica else self._cluster.pending)
            yield planned.batch

    def _attach(self, planned: _Planned, pulled: Pulled, pending: PendingLookups) -> None:
        """Give the batch its rows; in training the next step pushes their gradients."""
        plan = planned.plan
        rows = {name: torch.from_numpy(_core.borrow(r)) for name, r in pulled.rows.items()}
        leaves = plan.attach(planned.batch, rows, train=self._training)
        if self._training:
            pending.pulled_at(pulled.versions)
            for part in plan.tables:
                leaf = leaves[part.table.part]
                looked_up = RowLookup(part.table, part.keys, leaf, part.scale, part.columns)
                pending.add(looked_up, plan.num_examples)


def prefetch(
    dataset: Iterable[Any],
    model: nn.Module,
    *,
    depth: int = 2,
    epoch: int = 0,
    cluster: Cluster | None = None,
) -> Iterator[Batch]:
    """Batches for a plain training loop, with rows and dense weights pulled ahead of it.

    `dataset` is iterated once: one pass. A dataset with streams gives each worker its own; of any
    other iterable every worker takes each num_workers-th batch. When it is exhausted this worker
    has left the pass and its parameters are current. In the place of a worker that was killed, the
    batches that it has trained on are read again and left out. Where workers share out streams, a
    loop that is left early gives its stream back, and others train on what is left of it.

        for batch in tr.prefetch(train, model):
            loss = criterion(model(batch), batch["label"])
            loss.backward()
            optimizer.step()

    Args:
        depth: batches to read and plan ahead.
        epoch: changes the order of a dataset that shuffles.
    """
    of = default() if cluster is None else cluster
    with of.client.script.section():
        optimizer = of.row_source
        if of.num_streams and isinstance(optimizer, DistributedOptimizer):
            shared = SharedPass(optimizer, dataset, epoch, is_trainers=False)
            for turn in () if shared.is_over else shared.turns():
                pipeline = Pipeline(turn.share, model, training=True, depth=depth, cluster=of)
                try:
                    with settled(), pipeline:
                        yield from pipeline
                except GeneratorExit:
                    shared.leave_amid()
                    raise
            optimizer.end_pass()
            return
        found = Inherited()
        if isinstance(optimizer, DistributedOptimizer):
            found = optimizer.begin_pass()
            if optimizer.geo is not None and found.num_pushes:
                raise BadRequest(
                    "prefetch: expected to know how many batches a predecessor has trained on,"
                    " found mode 'geo', whose pushes do not say it: train with Trainer.fit, or"
                    " start the job again and load the newest checkpoint"
                )
        share = _share_left(dataset, of, epoch, found)
        if share is not None:
            pipeline = Pipeline(share, model, training=True, depth=depth, cluster=of)
            with settled(), pipeline:
                yield from pipeline
                optimizer = of.row_source
        if isinstance(optimizer, DistributedOptimizer):
            optimizer.end_pass()


def _share_left(
    dataset: Iterable[Any], cluster: Cluster, epoch: int, found: Inherited
) -> Iterable[Any] | None:
    """What predecessors have left of this worker's share; None if there is nothing."""
    if found.is_over or found.has_left:
        pass_over(dataset, cluster, epoch)
        return None
    if found.num_pushes == 0:
        return share_of(dataset, cluster, epoch)
    check_order(dataset)
    if cluster.client.script.has_met_within():
        raise BadRequest(
            "prefetch: expected a loop without meetings of the workers to go on with, in the place"
            " of a worker that was killed, found one with them: start the job again and load the"
            " newest checkpoint"
        )
    return share_of(dataset, cluster, epoch, Place(found.num_pushes))
