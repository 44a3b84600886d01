"""One pass over data: the pipeline, the loop, and the observers of its batches."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from trireme.data.batch import Batch
from trireme.errors import DataError
from trireme.nn.session import session_of
from trireme.progress import Display, display
from trireme.threads import frozen_objects
from trireme.train.checkpointing.savers import Saver
from trireme.train.compute.remote_stages import Remote
from trireme.train.leased_streams import StreamBatches
from trireme.train.loop.accumulation import Accumulated
from trireme.train.loop.pipeline import Pipeline
from trireme.train.loop.replica import BatchOrder, Replica, train_replicas
from trireme.train.loop.reporting import Report, Reporter
from trireme.train.loop.scoring import Compute, ExampleIds, Scored, Scorer, check_finite, in_mode
from trireme.train.loop.staleness import described, staleness
from trireme.train.loop.tally import Tally
from trireme.train.loop.timing import TimeReport
from trireme.train.optimizer import DistributedOptimizer

Observer = Callable[[nn.Module, Scored], None]
"""Gets each batch after its step, in the order of the stream, one at a time."""


class BatchObserver(Protocol):
    """A file of a dump, or what keeps outputs."""

    def observe(self, model: nn.Module, scored: Scored) -> None: ...


@dataclass(frozen=True)
class PassOptions:
    """What a pass does in addition to computing its figures."""

    report: Report  # what worker 0 prints
    dump: BatchObserver | None  # gets every batch
    ids: ExampleIds | None  # name examples whose outputs are not finite; None: no check
    after_step: Callable[[Scored, Tally], None] | None = None


@dataclass(frozen=True, kw_only=True)
class DataPass:
    """One pass over data."""

    title: str
    streams: Iterable[StreamBatches]  # one after the other
    model: nn.Module  # the optimizer's or a part of it
    score: Scorer
    tally: Tally
    optimizer: DistributedOptimizer
    options: PassOptions
    depth: int
    threads: int  # see Trainer
    accumulate: int  # see Trainer
    remote: Remote | None = None  # the model at compute workers; None: it runs here
    shows: bool  # worker 0 shows its progress
    epoch: int = 0  # which the servers keep with the position of each stream
    begun: Callable[[], None] | None = None  # called before the first batch is trained on
    continues: bool = False  # it was begun before, and may have no examples left
    saver: Saver | None = None  # takes checkpoints meanwhile

    def train(self) -> dict[str, float]:
        """Train; returns the figures of all workers. Raises DataError: no worker had an example."""
        return self._run(self._train, training=True)

    def evaluate(self) -> dict[str, float]:
        """Evaluate; returns the figures of all workers, with loss NaN if there are no examples."""
        with torch.no_grad():
            return self._run(self._evaluate, training=False)

    def _run(
        self, work: Callable[[StreamBatches, Pipeline, list[Observer]], None], *, training: bool
    ) -> dict[str, float]:
        cluster, progress = self.optimizer.cluster, _Progress()
        started = time.monotonic()
        is_quiet = not self.shows or cluster.worker != 0
        with display(self.title, is_quiet=is_quiet) as shown:
            report = self._report(shown, progress, training)
            before = staleness(self.optimizer) if report is not None and training else None
            observers = self._observers(shown, progress, report)
            with in_mode(self.model, training=training), frozen_objects():
                for stream in self.streams:
                    progress.begin(stream.batches)
                    with self._pipeline(stream, training) as pipeline:
                        work(stream, pipeline, observers)
            if training:
                self.optimizer.end_pass()
                if self.saver is not None:
                    self.saver.end_epoch()
            if report is not None:
                report.end()
            if before is not None:
                shown.say(described(Counter(staleness(self.optimizer)) - Counter(before)))
            self.tally.merge(cluster, self.title)
            if training and self.tally.num_examples == 0 and not self.continues:
                raise DataError(
                    f"{self.title}: expected examples, found none at any worker: there is no data,"
                    " or with drop_last less than a batch"
                )
            shown.num_examples = self.tally.num_examples
            is_cut = training and self.optimizer.mode.has_stopped(cluster.stop_request.reason)
            shown.show(None if is_cut else 1.0, self.tally.figures())
        elapsed_s = time.monotonic() - started
        return {
            **self.tally.figures(),
            "examples": self.tally.num_examples,
            "examples_per_s": self.tally.num_examples / elapsed_s,
        }

    def _pipeline(self, stream: StreamBatches, training: bool) -> Pipeline:
        return Pipeline(
            stream.batches,
            self.model,
            training=training,
            depth=self.depth,
            ahead=self.threads == 1,
            steps=self.accumulate == 1,
            timing=self.optimizer.timing,
            begun=self.begun,
            cluster=self.optimizer.cluster,
        )

    def _report(self, shown: Display, progress: _Progress, training: bool) -> TimeReport | None:
        if not self.options.report.timing or self.optimizer.cluster.worker != 0:
            return None
        return TimeReport(
            shown.say,
            self.optimizer.timing,
            progress,
            period=self.options.report.period,
            threads=self.threads if training else 1,
        )

    def _observers(
        self, shown: Display, progress: _Progress, report: TimeReport | None
    ) -> list[Observer]:
        cluster = self.optimizer.cluster
        say = shown.say if cluster.worker == 0 else None
        observers: list[Observer] = [
            Reporter(self.options.report, self.tally.figures, say, self._waited_s).observe,
            lambda *_: self._show(shown, progress),
        ]
        if self.options.dump is not None:
            observers.append(self.options.dump.observe)
        if report is not None:
            observers.append(lambda _, scored: report.observe(scored.batch.num_examples))
        return observers

    def _waited_s(self) -> float:
        return self.optimizer.timing.loop.read().get("wait", 0.0)

    def _show(self, shown: Display, progress: _Progress) -> None:
        shown.num_examples = self.tally.num_examples * self.optimizer.cluster.num_workers
        if shown.is_due():
            figures = self.tally.figures()
            shown.show(progress.fraction_read(), figures)
            self.optimizer.cluster.metrics.figures = figures

    def _train(self, stream: StreamBatches, pipeline: Pipeline, observers: list[Observer]) -> None:
        optimizer, loop, compute_on = self.optimizer, self.optimizer.timing.loop, self._compute_on()
        first = optimizer.replica
        first.pending.take()  # lookups of a batch that failed
        replicas = [first, *(first.copy(optimizer.tables) for _ in range(self.threads - 1))]
        order = BatchOrder(replicas)

        def position(number: int, batch: Batch) -> tuple[int, ...]:
            num_read = stream.start.batches + number + 1
            return (self.epoch, num_read, *stream.label, *batch.position)

        def step(replica: Replica, scored: Scored, num_examples: int) -> None:
            with loop.measure("push"):
                optimizer.step_of(
                    replica,
                    examples=num_examples,
                    position=position(replica.number, scored.batch),
                    in_background=self.threads == 1,
                    stops=optimizer.cluster.stop_request.reason,
                )
                optimizer.run_step_hooks()

        def conclude(scored: Scored) -> None:
            if self.options.after_step is not None:
                self.options.after_step(scored, self.tally)
            if self.saver is not None:
                self.saver.after_step()

        def work(replica: Replica) -> None:
            session_of(optimizer.cluster).use_pending(replica.pending)
            compute, parameters = compute_on(replica), list(replica.model.parameters())
            untrained = Accumulated(replica, self.accumulate)
            for batch in pipeline.batches(replica):
                for parameter in parameters:  # as zero_grad, which looks for them in all modules
                    parameter.grad = None
                scored = optimizer.mode.compute(replica.model, batch, compute)
                with order.turn(replica):
                    # First, because a metric refuses outputs that are not numbers, before they
                    # reach the tables.
                    self.tally.add(scored)
                    if is_due := untrained.add(scored):
                        step(replica, scored, untrained.finish())
                    for observe in observers:
                        observe(replica.model, scored)
                    if is_due:
                        conclude(scored)
                if optimizer.mode.has_stopped(optimizer.cluster.stop_request.reason):
                    break
            if (last := untrained.last) is not None:
                step(replica, last, untrained.finish())
                conclude(last)

        def fail(replica: Replica) -> None:
            order.fail(replica)
            pipeline.stop()

        optimizer.num_threads = self.threads
        try:
            train_replicas(replicas, work, fail)
        finally:
            optimizer.num_threads = 1

    def _compute_on(self) -> Callable[[Replica], Compute]:
        """Forward and backward of a batch with a replica of the model: here or elsewhere."""
        if self.remote is None:
            return lambda _: self._compute
        run = self.remote.begin(self.model, training=True, threads=self.threads)

        def compute(replica: Replica, _: nn.Module, batch: Batch) -> Scored:
            with self.optimizer.timing.loop.measure("compute"):
                return self._checked(run.train(replica, batch))

        return lambda replica: partial(compute, replica)

    def _compute(self, model: nn.Module, batch: Batch) -> Scored:
        with self.optimizer.timing.loop.measure("forward"):
            scored = self._score(model, batch)
        assert scored.loss is not None
        with self.optimizer.timing.loop.measure("backward"):
            scored.loss.backward()  # type: ignore[no-untyped-call]
        return scored

    def _evaluate(self, _: StreamBatches, pipeline: Pipeline, observers: list[Observer]) -> None:
        for scored in self._evaluated(pipeline):
            self.tally.add(scored)
            for observe in observers:
                observe(self.model, scored)

    def _evaluated(self, pipeline: Pipeline) -> Iterator[Scored]:
        loop = self.optimizer.timing.loop
        if self.remote is None:
            for batch in pipeline:
                with loop.measure("forward"):
                    scored = self._score(self.model, batch)
                yield scored
            return
        run = self.remote.begin(self.model, training=False, threads=self.threads)
        scored_batches = run.evaluate(pipeline, scores=self.tally.has_loss)
        yield from map(self._checked, scored_batches)

    def _score(self, model: nn.Module, batch: Batch) -> Scored:
        return self._checked(self.score(model, batch))

    def _checked(self, scored: Scored) -> Scored:
        if self.options.ids is not None:
            check_finite(scored, self.options.ids)
        return scored


class _Progress:
    """How far the current batches are read, and the time that reading has taken."""

    def __init__(self) -> None:
        self._batches: Iterable[Any] = ()
        self._past: dict[str, float] = {}

    def begin(self, batches: Iterable[Any]) -> None:
        self._past, self._batches = self.seconds, batches

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by activity, of these batches and those before; empty if they are unknown."""
        current: dict[str, float] = getattr(self._batches, "seconds", {})
        return {name: self._past.get(name, 0.0) + s for name, s in current.items()} or self._past

    def fraction_read(self) -> float | None:
        """0 to 1 of these batches; None if it is unknown."""
        batches = self._batches
        return batches.fraction_read() if hasattr(batches, "fraction_read") else None
