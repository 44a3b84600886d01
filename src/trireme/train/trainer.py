"""The trainer: fit, evaluate, save, load, on any number of workers and servers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trireme.blocks import Blocks
from trireme.byte_size import parse_bytes
from trireme.data.array_dataset import as_dataset
from trireme.errors import check_choice, check_flags
from trireme.job.cluster import Cluster
from trireme.job.default import default
from trireme.metrics import Metric
from trireme.metrics.by_name import metric_of
from trireme.nn.on_device import device_of
from trireme.strategy import Strategy
from trireme.train import row_life
from trireme.train.callbacks.callback import Callback
from trireme.train.callbacks.callback_calls import checked_callbacks
from trireme.train.checkpointing.checkpoint_location import Location
from trireme.train.checkpointing.checkpoints import CheckpointAtStop, Checkpoints
from trireme.train.checkpointing.fit_progress import FitProgress
from trireme.train.checkpointing.load import Dense
from trireme.train.checkpointing.save import SaveOptions, save
from trireme.train.checkpointing.savers import Saver
from trireme.train.collected_outputs import CollectedOutputs
from trireme.train.compute.remote_model import CREDITS
from trireme.train.compute.remote_stages import remote_of
from trireme.train.compute.service import serve_model
from trireme.train.dump import Dump, dumping
from trireme.train.epochs import Epochs
from trireme.train.fitting import FitRequest, fit
from trireme.train.leased_streams import StreamBatches, part_among
from trireme.train.loop.data_pass import DataPass, PassOptions
from trireme.train.loop.reporting import Report
from trireme.train.loop.scoring import ExampleIds, Loss, Scorer
from trireme.train.loop.staleness import staleness
from trireme.train.loop.tally import Tally, check_metrics, counts_kept, scoring_of
from trireme.train.loop.worker_batches import worker_batches
from trireme.train.modes import mode_class
from trireme.train.optimizer import DistributedOptimizer
from trireme.train.param_groups import check_scales
from trireme.train.pass_data import PassData, WindowSize
from trireme.train.predecessor import kept_figures
from trireme.train.recipe import Evaluation, Recipe
from trireme.train.trainer_checks import (
    check_autocast,
    check_made,
    check_not_in_autocast,
    check_pass,
    check_pass_data,
    check_settings,
    check_threads,
)
from trireme.worker import expiry_calls


class Trainer:
    """Trains a model whose rows and dense parameters live on servers (or in this process).

    Every worker of the job makes one and calls the same methods in the same order.

    Args:
        model: takes a batch; returns (B,) or (B, C) outputs, or a dict of such outputs by name. In
            a job with compute workers they run it; a Trainer of their own does not return.
        optimizer: of the dense parameters; None if the model has none. Or a DistributedOptimizer of
            this model, which the trainer then uses; strategy, blocks and clipping are its own.
        strategy: the consistency mode, default async.
        blocks: how dense parameters are cut into blocks and placed on servers.
        clip_norm, clip_value: how gradients are clipped, see DistributedOptimizer.
        fresh: whether to begin anew: without rows and optimizer state of an earlier model whose
            tables have the same names, see DistributedOptimizer.
        skip_not_finite: skip steps whose gradients are not finite, see DistributedOptimizer.
        loss: (outputs, labels) -> scalar tensor, the mean over the batch's examples. With
            `label=None` it gets the batch in place of the labels.
        metrics: updated with (outputs, labels) while training and evaluating. A name, such as
            "auc", stands for the metric with its defaults. A metric may name its `output`, its
            `label` and further `columns` of the batch.
        label: name of the label column; None for a loss that reads several columns. A column of
            example weights has no effect by itself: a loss with `label=None`, and metrics, read it.
        autocast: torch.bfloat16: every forward pass, in training and evaluation, here and at
            compute workers, computes under `torch.autocast` in it. Weights, rows, gradients,
            optimizer state, outputs and the loss stay float32. None: without autocast.
        depth: batches to read and plan ahead.
        threads: that train in this process, in async and bounded only, each on its own batches and
            its own replica of the model. Weights are at most threads - 1 steps old. Pays where
            batches are small or the network is slow: twice as many threads as cores compute while
            others wait. Buffers (BatchNorm) are those of the first replica. A loss may use
            parameters of the model only through its outputs. In a job with compute workers these
            are the batches of this worker in flight. None: 1; with compute workers, in modes that
            allow it, two for each of them, shared by the workers, but at least 2.
        accumulate: batches of each step of `fit`, as if they were one: their gradients are added
            up, weighted by examples. An epoch's last step has what is left. Needs threads=1.
        progress: worker 0 shows a progress bar (on a terminal) or lines (elsewhere).
        callbacks: called by `fit` after steps and epochs, in this order; see Callback.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        *,
        loss: Loss,
        strategy: Strategy | None = None,
        blocks: Blocks | None = None,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        skip_not_finite: bool = False,
        fresh: bool | None = None,
        metrics: Sequence[Metric | str] = (),
        label: str | None = "label",
        autocast: torch.dtype | None = None,
        depth: int = 2,
        threads: int | None = None,
        accumulate: int = 1,
        progress: bool = True,
        callbacks: Sequence[Callback] = (),
        cluster: Cluster | None = None,
    ) -> None:
        check_settings(model, strategy, blocks, cluster, metrics, loss)
        check_flags("Trainer", skip_not_finite=skip_not_finite, fresh=fresh, progress=progress)
        check_autocast(autocast)
        own_metrics = [metric_of(metric) for metric in metrics]
        check_metrics(own_metrics, label)
        self.callbacks = checked_callbacks(callbacks)
        options: dict[str, Any] = {"strategy": strategy, "blocks": blocks, "cluster": cluster}
        options |= {"clip_norm": clip_norm, "clip_value": clip_value, "fresh": fresh}
        made = optimizer if isinstance(optimizer, DistributedOptimizer) else None
        if made is not None:
            check_made(made, model, options | {"skip_not_finite": skip_not_finite or None})
            strategy, cluster = made.strategy, made.cluster
        strategy = Strategy() if strategy is None else strategy
        threads = check_threads(threads, strategy, accumulate)
        self.cluster = default() if cluster is None else cluster
        self.scorer = Scorer(loss, label, autocast)
        is_threaded = mode_class(strategy.mode).trains_in_threads
        if (place := self.cluster.place) is not None:
            in_flight = threads or (CREDITS if is_threaded else 1)
            serve_model(self.cluster, place, model, self.scorer, in_flight=in_flight)
        self.model, self.loss, self.metrics, self.label = model, loss, own_metrics, label
        self.remote = remote_of(self.cluster, model, self.scorer)
        if threads is None:
            threads = self.remote.credits if self.remote and is_threaded else 1
        self.depth, self.threads, self.accumulate = depth, threads, accumulate
        self.cluster.metrics.num_credits = threads
        self.shows_progress = progress and self.cluster.worker == 0
        options |= {"strategy": strategy, "cluster": self.cluster}
        options["skip_not_finite"] = skip_not_finite
        self.optimizer = made or DistributedOptimizer(optimizer, model, **options)
        if accumulate > 1:
            check_scales(self.optimizer.tables, f"with {accumulate=}", "larger batches")
        self._epochs = Epochs(self.optimizer)

    @classmethod
    def from_recipe(cls, recipe: Recipe, **options: Any) -> Trainer:
        """A trainer of what a model file's `create` returned. options: the constructor's others."""
        trainer = cls(
            recipe.model,
            recipe.optimizer,
            loss=recipe.loss,
            metrics=recipe.metrics,
            label=recipe.label,
            clip_norm=recipe.clip_norm,
            clip_value=recipe.clip_value,
            **options,
        )
        recipe.begin_schedule(trainer.optimizer)
        return trainer

    def __repr__(self) -> str:
        made = self.optimizer
        tables = ", ".join(table.name for table in made.tables) or "none"
        parts = (type(self.model).__name__, made.strategy, f"tables: {tables}")
        counts = f"{made.num_steps} steps, {self.num_epochs} epochs, {self.cluster}"
        return f"Trainer({', '.join(map(str, parts))}, {counts})"

    @property
    def num_epochs(self) -> int:
        """Epochs made so far, those of a loaded checkpoint included. A custom loop sets it after
        each epoch, so that `save` keeps it and `resume` brings it back.
        """
        return self._epochs.num_epochs

    @num_epochs.setter
    def num_epochs(self, number: int) -> None:
        self._epochs.num_epochs = number

    # ---- train and evaluate ----

    def fit(
        self,
        dataset: Iterable[Any],
        *,
        epochs: int = 1,
        valid: Iterable[Any] | None = None,
        checkpoints: Checkpoints | CheckpointAtStop | None = None,
        resume: bool = False,
        report: Report | None = None,
        dump: Dump | None = None,
        check_nan: bool = True,
    ) -> dict[str, float]:
        """Train on this worker's part of the data, `epochs` times.

        Args:
            dataset: of trireme.data, a DataLoader, or any iterable of batches; or a DataFrame, an
                Arrow table or a mapping of columns: an ArrayDataset of it, shuffled.
            epochs: after `Trainer.resume` the first is the one that was under way.
            valid: data that `evaluate` scores after each epoch.
            checkpoints: to take during the epochs and at their end.
            resume: continue with an earlier run of the same call: with the newest checkpoint below
                `checkpoints.path`, if there is one. `epochs` counts from the beginning of that
                call; if all are done, their figures are returned.
            report: what worker 0 prints.
            dump: what to write of each example, scored before it is trained on; epoch after epoch.
            check_nan: raise NotFinite for outputs or a loss that are not finite. Without it metrics
                still refuse such outputs, but cannot name the examples.

        A worker that was killed and restarted continues where its predecessor was, and repeats
        no epoch; see docs/failures.md.

        SIGTERM or Ctrl-C at any worker stops all after a step, in sync the same one, with a
        checkpoint if there are `checkpoints`: Stopped, a SystemExit with code 0, after Ctrl-C 130.
        They have no such effect in a script that handles the signal itself, or that trains in
        another than the main thread.

        Returns:
            Of the last epoch and all workers: "loss", each metric, "examples", "examples_per_s".
            Metrics are of each batch before it was trained on (progressive). Of an epoch that was
            resumed they cover the batches since. With `valid` also "valid_loss", "valid_auc", ...

        Raises:
            DataError: there are no examples at all.
            NotFinite: outputs, a loss or gradients are NaN or infinite; their batch is not pushed.
            ResourceExhausted: no room for a checkpoint or a dump; earlier checkpoints are intact.
            BadRequest: unknown names in `report` or `dump`; a folder that already holds a dump;
                `resume` without checkpoints, or of a trainer that has trained; within its callback.
            Others as `resume`.
        """
        check_flags("Trainer.fit", resume=resume, check_nan=check_nan)
        request = FitRequest(
            dataset=as_dataset(dataset, shuffle=True),
            valid=None if valid is None else as_dataset(valid),
            epochs=epochs,
            checkpoints=checkpoints,
            resume=resume,
            report=report or Report(),
            dump=dump,
            check_nan=check_nan,
        )
        with self._epochs.fitting():
            return fit(self, self._epochs, request, self._train_epoch)

    def _train_epoch(
        self, title: str, dataset: Iterable[Any], options: PassOptions, saver: Saver | None
    ) -> dict[str, float]:
        tally = Tally(self.metrics, self.label, merged=options.report.merged)
        if (start := self._epochs.begin(dataset, saver)) is None:
            return kept_figures(tally, self.cluster, title)
        return self._run(
            tally,
            self.scorer,
            title=title,
            streams=start.streams,
            options=options,
            epoch=self.num_epochs,
            begun=start.on_first_batch,
            continues=start.resumes,
            saver=saver,
        ).train()

    def evaluate(
        self,
        dataset: Iterable[Any],
        *,
        model: nn.Module | Evaluation | None = None,
        labels: bool = True,
        report: Report | None = None,
        dump: Dump | None = None,
        check_nan: bool = True,
    ) -> dict[str, float]:
        """Loss and metrics over all workers' parts of the data; changes nothing.

        Begins when every worker has come and every push has been applied.

        Args:
            model: runs in place of the whole model, without loss and metrics, in this process: a
                part of it, such as the tower that gives the vectors of items. An Evaluation has
                metrics of its own, and maybe a loss.
            labels: False: the data has no labels, so there are no loss and metrics.
            report, check_nan: see `fit`.
            dump: what to write of each example, by each worker of its part from part-00000 on.
        """
        check_flags("Trainer.evaluate", labels=labels)
        scores = labels and (model is None or isinstance(model, Evaluation))
        with counts_kept(self.metrics if self._epochs.is_fitting else ()):
            return self._evaluate(dataset, model, scores, report, dump, check_nan)

    def predict(
        self, dataset: Iterable[Any], *, model: nn.Module | None = None, check_nan: bool = True
    ) -> dict[str, torch.Tensor]:
        """The outputs for this worker's part of the data, in its order; every worker calls it.
        Those of a worker alone are of all the data. Changes nothing, and needs no labels.

        Args:
            dataset, model, check_nan: as in `evaluate`.

        Returns:
            By name, (N, ...) on the CPU; a single tensor is "output", as of a Predictor, which
            gives the same bits for the same batches (and autocast). Without a batch: empty.

        Raises:
            Unavailable: this worker was restarted and is past this call: rows have changed.
        """
        outputs = CollectedOutputs()
        self._evaluate(dataset, model, False, None, None, check_nan, outputs)
        return outputs.by_name()

    def _evaluate(
        self,
        dataset: Iterable[Any],
        model: nn.Module | Evaluation | None,
        scores: bool,
        report: Report | None,
        dump: Dump | None,
        check_nan: bool,
        outputs: CollectedOutputs | None = None,
    ) -> dict[str, float]:
        title = "evaluate" if scores else "infer" if outputs is None else "predict"
        check_flags("Trainer.evaluate, predict", check_nan=check_nan)
        check_not_in_autocast(called := "evaluate" if outputs is None else "predict")
        self.optimizer.check_alone(f"Trainer.{called}")
        dataset = as_dataset(dataset)
        other = model if isinstance(model, Evaluation) else None
        part = other.model if other is not None else model
        assert part is None or isinstance(part, nn.Module)
        report = report or Report()
        rule = (other or self) if scores else None
        tally, scorer = scoring_of(rule, report.merged, self.scorer.autocast)
        with self.cluster.client.script.section():
            if self.cluster.client.script.is_behind:
                if outputs is not None:
                    outputs.are_lost = True
                return kept_figures(tally, self.cluster, title)
            self.optimizer.flush()
            arrivals = self.cluster.client.coordinator.gather(
                {"worker": self.cluster.worker}, [], purpose=title, patient=True
            )
            self.optimizer.refresh()
            with (
                row_life.at_data_time(dataset, self.optimizer),
                dumping(dump, dataset, self.model, self.cluster) as file,
            ):
                ids = ExampleIds(dataset) if check_nan else None
                options = PassOptions(report, file if outputs is None else outputs, ids)
                share = part_among(arrivals, self.cluster)
                own = worker_batches(dataset, self.cluster, part=share, shaped=outputs is not None)
                batches = [StreamBatches(own)]
                return self._run(
                    tally, scorer, model=part, title=title, streams=batches, options=options
                ).evaluate()

    def _run(
        self, tally: Tally, scorer: Scorer, *, model: nn.Module | None = None, **data: Any
    ) -> DataPass:
        return DataPass(
            model=model or self.model,
            score=scorer,
            tally=tally,
            optimizer=self.optimizer,
            depth=self.depth,
            threads=self.threads,
            accumulate=self.accumulate,
            remote=self.remote if model is None else None,
            shows=self.shows_progress,
            **data,
        )

    # ---- passes on a device ----

    @contextmanager
    def on_device(
        self, dataset: Iterable[Any], following: Iterable[Any] | None = None
    ) -> Iterator[None]:
        """Train within the block on the rows that this data needs, which are on the device of the
        model meanwhile: `begin_pass`, then `end_pass`. After an error in the block the servers keep
        the state of the beginning.
        """
        self.begin_pass(dataset, following)
        with self._in_pass():
            yield

    @contextmanager
    def in_window(self, batches: int, memory: int | str) -> Iterator[None]:
        """Train within the block on a stream of any length: `begin_window`, then `end_pass`. After
        an error in the block the servers keep the state of the beginning.
        """
        self.begin_window(batches, memory)
        with self._in_pass():
            yield

    @contextmanager
    def _in_pass(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.abandon_pass()
            raise
        self.end_pass()

    def begin_window(self, batches: int, memory: int | str) -> None:
        """Begin a pass over data that is not known: until `end_pass`, `fit` brings the rows of the
        next batches to the device of the model, and rows leave it when there is no room.

        Args:
            batches: how many are planned ahead of the one that is trained on; their rows are
                brought together, as far as there is room.
            memory: of rows on the device, such as "2GiB"; with several tables, parts of it as the
                first batches need them.

        Raises:
            BadRequest: as `begin_pass`. `fit` raises ResourceExhausted: a batch has more rows than
                there is room for.
        """
        optimizer = self.optimizer
        check_pass("begin_window", optimizer, self.remote, self.threads, self.accumulate)
        size = WindowSize(batches, parse_bytes("begin_window: memory", memory))
        optimizer.mode = optimizer.mode.begin_device_pass(size, device_of(self.model))

    def begin_pass(self, dataset: Iterable[Any], following: Iterable[Any] | None = None) -> None:
        """Bring the rows that the data needs, with optimizer state, to the device of the model.
        Until `end_pass` `fit` trains them there, and the servers learn nothing of it.

        Args:
            dataset: can be read more than once. It is read here once, for its keys.
            following: the data of the next pass. It is read during training, and its rows are
                brought into memory; those that both passes need stay on the device. All
                workers give one, or none does.

        Raises:
            BadRequest: a mode whose dense weights or rows are in the workers (hybrid, geo), several
                workers in another mode than sync and collective, or `following` at some of them;
                `threads` > 1, an iterator; a table with an admission filter, `max_rows`,
                `max_bytes`, `absent="zeros"`, 16-bit weights, heads or statistics in lookups; a
                DataLoader that follows without a generator. Unavailable: somebody else changes
                rows, or another worker has gone. The servers have not changed.
        """
        optimizer = self.optimizer
        check_pass("begin_pass", optimizer, self.remote, self.threads, self.accumulate)
        check_pass_data(dataset, following)
        reader, epoch = (self.model, self.cluster), self.num_epochs
        following_data = None if following is None else PassData.read_by(*reader, following, epoch)
        if following_data is not None:
            following_data.check_beside_training()
        data = PassData.read_by(*reader, dataset, epoch)
        device = device_of(self.model)
        optimizer.mode = optimizer.mode.begin_device_pass(data, device, following_data)

    def end_pass(self) -> None:
        """Give the servers what has been trained since `begin_pass`: rows, dense weights, optimizer
        state; all of it or nothing. After an error train no more: call it again, or `abandon_pass`.

        Raises BadRequest: there is no pass. Unavailable: servers did not take it.
        """
        self.optimizer.mode = self.optimizer.mode.end_device_pass()

    def abandon_pass(self) -> None:
        """Forget what has been trained. Raises BadRequest: no pass, or the servers have it all."""
        self.optimizer.mode = self.optimizer.mode.abandon_device_pass()

    # ---- the life of rows ----

    def set_time(self, time: float | Callable[[], float]) -> None:
        """Set the time of the data, by which rows fade and expire.

        Args:
            time: seconds since 1970 of pushes from now on; or a function that returns them at every
                push, such as `time.time` for the wall clock; 0, the default: the data has no time.
                A row's time never goes back: earlier pushes count as of the row's last one.

        Raises:
            BadRequest: less than 0, or 2**32 or more.
        """
        self.optimizer.set_time(time)

    def shrink(self, *, day_over: bool = True) -> dict[str, dict[str, int]]:
        """Remove the rows that have expired by their tables' policies; every worker calls it, once
        after each day of data. Returns table -> "expired" and "evicted", numbers of removed rows.

        day_over: judge rows as of the end of the day of `set_time`: shows and clicks have faded by
            that day too, as in Fleet.
        """
        return row_life.shrink(self.optimizer, day_over=day_over)

    def counters(self) -> dict[str, dict[str, int]]:
        """Table -> counts since servers started: pushes of "admitted" keys made rows, of "rejected"
        ones none; "expired" and "evicted" rows. Within a pass in sync without its last step.
        """
        self.optimizer.flush()
        return expiry_calls.counters(self.cluster.client)

    def staleness(self) -> dict[int, int]:
        """How stale pushes were when they were applied, over all workers and servers since the
        servers started: number of pushes that a server applied between the pull that a push was
        computed from and that push -> number of pushes. The last key also counts all beyond it.
        """
        return staleness(self.optimizer)

    # ---- checkpoints ----

    def save(
        self,
        path: str | Path,
        *,
        mode: str | int = "full",
        hot: float | None = None,
        keep: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Write tables, dense parameters, optimizer state, module buffers and random numbers.

        Args:
            path: a new folder on storage that all processes share, or a location of fsspec.
            mode: what of the tables, by name or Fleet's number: "full" (0), "delta" (1), "base"
                (2), "batch" (3) or "hot"; see docs/checkpoints.md.
            hot: with mode "hot", how many rows of each table, or (a float) what fraction.
            keep: how many checkpoints stay in the parent folder, besides what their deltas need.
            storage_options: for fsspec.

        Raises:
            BadRequest: the folder exists, or servers may not write there; a delta without an
                earlier checkpoint. ResourceExhausted: the disk is full; nothing is left behind.
        """
        self.optimizer.check_alone("Trainer.save")
        location = Location(path, storage_options, self.shows_progress)
        progress, random = FitProgress(num_epochs=self.num_epochs).to_json(), self._epochs.random
        save(self.optimizer, location, progress, SaveOptions(mode, hot, keep), random=random)

    def load(
        self,
        path: str | Path,
        *,
        dense: Dense = "strict",
        tables: Collection[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Bring servers, model, optimizer and random numbers to the state of a checkpoint, whatever
        number of servers wrote it. A delta is loaded on top of what was loaded before. The next
        epoch begins at its beginning; see `resume`.

        Args:
            dense: "strict": continue the run that wrote the checkpoint. "match": begin a new run
                of a changed model, with tables by name, and dense parameters and buffers by name
                and shape, of another optimizer without its state; learning rates are this run's.
                "skip": the same without dense parameters and buffers.
            tables: load these alone, which begins a new run too; None: all of the model.

        Returns:
            Tables, parameters and buffers that kept their own values.

        Raises:
            BadRequest: no checkpoint there, or a delta of another one; within a callback.
                Corruption: a damaged file. SchemaMismatch: another model. Nothing has changed then.
        """
        check_choice("load", ("strict", "match", "skip"), dense=dense)
        self.optimizer.mode.check_between_passes("load")
        location = Location(path, storage_options, self.shows_progress)
        return self._epochs.load(location, dense, tables)

    def resume(
        self, path: str | Path, *, storage_options: Mapping[str, Any] | None = None
    ) -> str | None:
        """Load the newest whole checkpoint in the numbered folders below a path or location; the
        next fit continues within the epoch that was under way, each worker after the last batch of
        its stream that the checkpoint holds.

        A folder that is not a complete checkpoint, or a damaged one, is reported and left out.

        Returns:
            Its path; None: there is no checkpoint, and nothing has changed.

        Raises:
            Corruption: there are only damaged ones. SchemaMismatch: another model.
            BadRequest: it is of another number of workers, in a mode other than collective; `load`
                it, and begin the epoch again; within a callback.
        """
        self.optimizer.mode.check_between_passes("resume")
        return self._epochs.resume(path, storage_options)


def optimizer_of(trainer: Trainer | DistributedOptimizer) -> DistributedOptimizer:
    return trainer.optimizer if isinstance(trainer, Trainer) else trainer
