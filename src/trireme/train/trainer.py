"""The trainer: fit, evaluate, save, load, on any number of workers and servers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from trireme.cluster import Cluster, default
from trireme.errors import BadRequest
from trireme.metrics import Metric
from trireme.ps.process import settled
from trireme.strategy import Strategy
from trireme.train import checkpoint
from trireme.train.optimizer import DistributedOptimizer
from trireme.train.pipeline import Pipeline, share_of
from trireme.train.progress import Display, display
from trireme.train.recipe import Recipe
from trireme.train.replica import Replica, Turns, train_replicas
from trireme.train.scoring import Loss, Scorer
from trireme.train.tally import Tally, check_metrics


@contextmanager
def _mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Train or evaluate; afterwards every part of the model is in the mode that it was in."""
    before = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, was_training in before:
            module.training = was_training


class Trainer:
    """Trains a model whose embedding rows and dense parameters live on servers (or embedded in this
    process).

    Every worker of the job makes one and calls the same methods in the same order.

    Args:
        model: takes a batch; returns (B,) or (B, C) outputs, or several such by name.
        optimizer: of the dense parameters; None if the model has none.
        strategy: the consistency mode, default async.
        loss: (outputs, labels) -> scalar tensor, the mean over the batch's examples. It gets the
            batch in place of the labels if `label` is None.
        metrics: updated with (outputs, labels) while training and evaluating. A metric may name its
            `output`, its `label` and further `columns` of the batch.
        label: name of the label column; None for a loss that reads several columns.
        depth: batches to read and plan ahead.
        threads: that train in this process, async only, each on a batch and a replica of its own,
            with its share of torch's threads. Weights are then at most threads - 1 steps old. Pays
            where batches are small. Buffers (BatchNorm) are those of the first replica; a loss may
            not use parameters of the model except through its outputs.
        progress: worker 0 shows a progress bar (on a terminal) or lines (elsewhere).
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        *,
        loss: Loss,
        strategy: Strategy | None = None,
        metrics: Sequence[Metric] = (),
        label: str | None = "label",
        depth: int = 2,
        threads: int = 1,
        progress: bool = True,
        cluster: Cluster | None = None,
    ) -> None:
        check_metrics(metrics, label)
        if threads < 1:
            raise BadRequest(f"Trainer: expected threads >= 1, found {threads}")
        if threads > 1 and strategy is not None and strategy.mode == "sync":
            raise BadRequest(
                f"Trainer: expected threads=1 in sync, found {threads}: steps come one after the"
                " other; use more workers"
            )
        self.cluster = default() if cluster is None else cluster
        self.model, self.metrics, self.label = model, list(metrics), label
        self._score = Scorer(loss, label)
        self.depth, self.threads = depth, threads
        self.num_epochs = 0
        self._shows = progress and self.cluster.worker == 0
        self.optimizer = DistributedOptimizer(
            optimizer, model, strategy=strategy, cluster=self.cluster
        )

    @classmethod
    def from_recipe(
        cls,
        recipe: Recipe,
        *,
        strategy: Strategy | None = None,
        depth: int = 2,
        threads: int = 1,
        progress: bool = True,
        cluster: Cluster | None = None,
    ) -> Trainer:
        """A trainer of what a model file's `create` returned; the rest is as in the constructor."""
        return cls(
            recipe.model,
            recipe.optimizer,
            loss=recipe.loss,
            strategy=strategy,
            metrics=recipe.metrics,
            label=recipe.label,
            depth=depth,
            threads=threads,
            progress=progress,
            cluster=cluster,
        )

    def fit(self, dataset: Iterable[Any], *, epochs: int = 1) -> dict[str, float]:
        """Train on this worker's share of the data, `epochs` times.

        Returns:
            Of the last epoch and all workers: "loss", each metric, "examples", "examples_per_s".
            Metrics are of each batch before it was trained on (progressive).
        """
        if epochs < 1:
            raise BadRequest(f"Trainer.fit: expected epochs >= 1, found {epochs}")
        if epochs > 1 and isinstance(dataset, Iterator):
            raise BadRequest(
                f"Trainer.fit: expected a dataset that can be read {epochs} times, found"
                f" {type(dataset).__name__}, an iterator, which is empty after the first"
            )
        figures: dict[str, float] = {}
        for epoch in range(epochs):
            title = "train" if epochs == 1 else f"train {epoch + 1}/{epochs}"
            share = share_of(dataset, self.cluster, self.num_epochs)
            figures = self._run(share, title, training=True)
            self.num_epochs += 1
        return figures

    def evaluate(self, dataset: Iterable[Any]) -> dict[str, float]:
        """Loss and metrics on all workers' shares of the data; changes nothing.

        Starts when every worker has come and every push has been applied.
        """
        self.optimizer.flush()
        self.cluster.client.gather({}, [], purpose="evaluate", patient=True)
        self.optimizer.refresh()
        with torch.no_grad():
            return self._run(share_of(dataset, self.cluster), "evaluate", training=False)

    def _run(self, share: Iterable[Any], title: str, *, training: bool) -> dict[str, float]:
        tally = Tally(self.metrics, self.label)
        pipeline = Pipeline(
            share,
            self.model,
            training=training,
            depth=self.depth,
            ahead=self.threads == 1,
            cluster=self.cluster,
        )
        started = time.monotonic()
        with display(title, enabled=self._shows) as shown:
            with _mode(self.model, training=training), settled(), pipeline:
                work = self._train if training else self._evaluate
                work(pipeline, tally, lambda: self._show(shown, share, tally))
            if training:
                self.optimizer.end_pass()
            tally.merge(self.cluster, title)
            if shown is not None:
                shown.num_examples = tally.num_examples
                shown.show(1.0, tally.figures())
        elapsed_s = time.monotonic() - started
        return {
            **tally.figures(),
            "examples": tally.num_examples,
            "examples_per_s": tally.num_examples / elapsed_s,
        }

    def _train(self, pipeline: Pipeline, tally: Tally, show: Callable[[], None]) -> None:
        first = self.optimizer.replica
        first.pending.take()  # of a batch that failed
        tables = self.optimizer.tables
        replicas = [first, *(first.copy(tables) for _ in range(self.threads - 1))]
        turns = Turns(replicas)
        behind = self.threads == 1 and not self.optimizer.is_sync

        def work(replica: Replica) -> None:
            self.cluster.use_pending(replica.pending)
            for batch in pipeline.batches(replica):
                replica.model.zero_grad()
                scored = self._score(replica.model, batch)
                assert scored.loss is not None
                scored.loss.backward()  # type: ignore[no-untyped-call]
                with turns.turn(replica):
                    # First, because a metric refuses outputs that are not numbers: they should not
                    # reach the tables.
                    tally.add(scored)
                    self.optimizer.step_of(
                        replica,
                        examples=batch.num_examples,
                        position=batch.position,
                        behind=behind,
                    )
                    if replica is first:
                        show()

        def fail(replica: Replica) -> None:
            turns.fail(replica)
            pipeline.stop()

        train_replicas(replicas, work, fail)

    def _evaluate(self, pipeline: Pipeline, tally: Tally, show: Callable[[], None]) -> None:
        for batch in pipeline:
            tally.add(self._score(self.model, batch))
            show()

    def _show(self, shown: Display | None, share: Any, tally: Tally) -> None:
        if shown is None:
            return
        shown.num_examples = tally.num_examples * self.cluster.num_workers
        if shown.is_due():
            fraction = share.fraction_read() if hasattr(share, "fraction_read") else None
            shown.show(fraction, tally.figures())

    # ---- checkpoints ----

    def save(self, path: str | Path) -> None:
        """Write tables, dense parameters, optimizer state and worker 0's module buffers.

        Raises:
            BadRequest: the folder exists already, or is outside the servers' root.
        """
        checkpoint.save(self.optimizer, path, {"num_epochs": self.num_epochs})

    def load(self, path: str | Path, *, dense: Literal["strict", "match"] = "strict") -> list[str]:
        """Bring servers, model and optimizer to the state of a checkpoint, whatever number of
        servers wrote it.

        Args:
            dense: "strict": go on with the run that the checkpoint is of. "match": begin a new run
                with its tables by name and its dense parameters and buffers by name and shape, for
                a model that has changed, a feature more say; rates are this run's.

        Returns:
            Tables, parameters and buffers that kept their own values; none in "strict".

        Raises:
            BadRequest: no checkpoint there. Corruption: a damaged file. SchemaMismatch: another
                model.
        """
        if dense == "match":
            return checkpoint.load_matching(self.optimizer, path)
        if dense != "strict":
            raise BadRequest(f"Trainer.load: expected dense 'strict' or 'match', found {dense!r}")
        self.num_epochs = int(checkpoint.load(self.optimizer, path).get("num_epochs", 0))
        return []
