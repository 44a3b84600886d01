"""The trainer: fit, evaluate, save, load, on any number of workers and servers."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from trireme.blocks import Blocks
from trireme.errors import BadRequest, Stopped
from trireme.inference.export.trainer_exports import InferenceExports
from trireme.job.cluster import Cluster
from trireme.job.default import default
from trireme.metrics import Metric
from trireme.strategy import Strategy
from trireme.train import row_life as life
from trireme.train.checkpointing import checkpoint
from trireme.train.checkpointing.checkpoints import AtStop, Checkpoints, Saver, saving
from trireme.train.checkpointing.fit_note import FitNote
from trireme.train.checkpointing.numbered import NumberedFolders
from trireme.train.checkpointing.random_state import RandomState
from trireme.train.dump import Dump, dumping
from trireme.train.loop.fetch import Fetch
from trireme.train.loop.run import Run, Watch
from trireme.train.loop.scoring import ExampleIds, Loss, Scorer
from trireme.train.loop.share import BEGIN, Place, share_of
from trireme.train.loop.staleness import staleness
from trireme.train.loop.tally import Tally, check_metrics
from trireme.train.optimizer import DistributedOptimizer
from trireme.train.recipe import Recipe
from trireme.train.shared_pass import SharedPass, Turn, check_dump, place_among
from trireme.train.stopping import agreed_to_stop, stopping_on_sigterm
from trireme.train.succession import (
    Inherited,
    check_order,
    dump_left,
    figures_again,
    pass_over,
    warn_of_buffers,
)

log = logging.getLogger("trireme.train")


class Trainer(InferenceExports):
    """Trains a model whose embedding rows and dense parameters live on servers (or embedded in this
    process).

    Every worker of the job makes one and calls the same methods in the same order.

    Args:
        model: takes a batch; returns (B,) or (B, C) outputs, or several such by name.
        optimizer: of the dense parameters; None if the model has none.
        strategy: the consistency mode, default async.
        blocks: how dense parameters are cut into blocks, and which server has which.
        clip_norm, clip_value: how gradients are clipped, see DistributedOptimizer.
        loss: (outputs, labels) -> scalar tensor, the mean over the batch's examples. It gets the
            batch in place of the labels if `label` is None.
        metrics: updated with (outputs, labels) while training and evaluating. A metric may name its
            `output`, its `label` and further `columns` of the batch.
        label: name of the label column; None for a loss that reads several columns. Weights of
            examples have no effect by themselves: a loss without `label` may read them, and
            metrics take them as `weights`.
        depth: batches to read and plan ahead.
        threads: that train in this process, async and bounded only, each on a batch and a replica
            of its own, with its share of torch's threads. Weights are then at most threads - 1
            steps old. Pays where batches are small, and where servers are behind a slow network:
            with twice as many threads as cores, half of them compute while the others wait.
            Buffers (BatchNorm) are those of the first replica; a loss may not use parameters of the
            model except through its outputs.
        progress: worker 0 shows a progress bar (on a terminal) or lines (elsewhere).
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
        if threads > 1 and strategy is not None and strategy.mode not in ("async", "bounded"):
            raise BadRequest(
                f"Trainer: expected threads=1 in {strategy.mode}, found {threads}: steps come one"
                " after the other; use more workers"
            )
        self.cluster = default() if cluster is None else cluster
        self.model, self.loss, self.metrics, self.label = model, loss, list(metrics), label
        self.depth, self.threads = depth, threads
        self.num_epochs = 0
        self._exports = {}
        self._random = RandomState()
        self._resumed: checkpoint.Loaded | None = None
        self.shows_progress = progress and self.cluster.worker == 0
        self.optimizer = DistributedOptimizer(
            optimizer,
            model,
            strategy=strategy,
            blocks=blocks,
            clip_norm=clip_norm,
            clip_value=clip_value,
            cluster=self.cluster,
        )

    @classmethod
    def from_recipe(
        cls,
        recipe: Recipe,
        *,
        strategy: Strategy | None = None,
        blocks: Blocks | None = None,
        clip_norm: float | None = None,
        clip_value: float | None = None,
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
            blocks=blocks,
            clip_norm=clip_norm,
            clip_value=clip_value,
            metrics=recipe.metrics,
            label=recipe.label,
            depth=depth,
            threads=threads,
            progress=progress,
            cluster=cluster,
        )

    def fit(
        self,
        dataset: Iterable[Any],
        *,
        epochs: int = 1,
        checkpoints: Checkpoints | None = None,
        resume: bool = False,
    ) -> dict[str, float]:
        """Train on this worker's share of the data, `epochs` times.

        Args:
            epochs: after `Trainer.resume` the first is the one that was under way.
            checkpoints: to take meanwhile, and when all epochs are done.
            resume: begin where a run of the same call was ended: with `Trainer.resume` from
                `checkpoints.path`, if there is a checkpoint. `epochs` counts from the beginning of
                that call; if all are done, its figures are returned.

        A worker that was killed and started again goes on where its predecessor was, and makes
        no epoch again; see docs/failures.md.

        SIGTERM at any worker stops all after a step, in sync the same one, with a checkpoint if
        there are `checkpoints`: Stopped, a SystemExit with code 0. A script that heeds SIGTERM
        itself, or trains in another than the main thread, is left alone.

        Returns:
            Of the last epoch and all workers: "loss", each metric, "examples", "examples_per_s".
            Metrics are of each batch before it was trained on (progressive). Of an epoch that was
            resumed they cover the batches since.

        Raises:
            DataError: there are no examples at all.
            NotFinite: outputs or a loss that are NaN or infinite; nothing of that batch is pushed.
            ResourceExhausted: no room for a checkpoint; those before are intact.
            As `resume`; BadRequest: `resume` of a trainer that has trained, or without checkpoints.
        """
        return self.train_from_dataset(
            dataset, epochs=epochs, checkpoints=checkpoints, resume=resume
        )

    def train_from_dataset(
        self,
        dataset: Iterable[Any],
        *,
        epochs: int = 1,
        checkpoints: Checkpoints | AtStop | None = None,
        resume: bool = False,
        fetch_list: Sequence[str] = (),
        fetch_info: Sequence[str] = (),
        print_period: int = 100,
        debug: bool = False,
        dump: Dump | None = None,
        check_nan: bool = True,
        stat_var_names: Sequence[str] | None = None,
    ) -> dict[str, float]:
        """As `fit`, and show what happens meanwhile.

        Args:
            fetch_list: values that worker 0 prints every `print_period` batches; see `Fetch`.
            fetch_info: what to call them; default their names.
            debug: worker 0 prints, as often and at the end, where the time goes, see `Timing`; and
                at the end how stale pushes were.
            dump: what to write of each example, scored before it was trained on; the epochs one
                behind the other.
            check_nan: raise NotFinite for outputs or a loss that are not numbers. Metrics refuse
                such outputs even so, but cannot name the examples.
            stat_var_names: metrics that are of all workers in the end; the others stay those of
                this worker. None: all.

        Returns, Raises: as `fit`; BadRequest for names that there are not, or a folder that holds a
            dump; ResourceExhausted for a full disk.
        """
        if epochs < 1:
            raise BadRequest(f"Trainer.fit: expected epochs >= 1, found {epochs}")
        if epochs > 1 and isinstance(dataset, Iterator):
            raise BadRequest(
                f"Trainer.fit: expected a dataset that can be read {epochs} times, found"
                f" {type(dataset).__name__}, an iterator, which is empty after the first"
            )
        fetch = Fetch(fetch_list, fetch_info, print_period)
        note = self._resume_fit(checkpoints, epochs) if resume else FitNote(self.num_epochs)
        if resume and self.num_epochs == note.begun_at + epochs:
            return note.figures
        num_passes = note.begun_at + epochs - self.num_epochs
        with (
            stopping_on_sigterm(self.cluster),
            self.cluster.client.script.section(),
            life.time_of(dataset, self.optimizer),
            dumping(
                dump_left(check_dump(dump, self.cluster), self.cluster, num_passes),
                *(dataset, self.model, self.cluster),
            ) as file,
            saving(checkpoints, self.optimizer, self._random, note.to_json) as saver,
        ):
            watch = Watch(fetch, debug, file, ExampleIds(dataset) if check_nan else None)
            for epoch in range(self.num_epochs - note.begun_at, epochs):
                title = "train" if epochs == 1 else f"train {epoch + 1}/{epochs}"
                tally = Tally(self.metrics, self.label, merged=stat_var_names)
                note.num_epochs, note.is_under_way = self.num_epochs, True
                with self.cluster.client.script.section():
                    note.figures = self._train_epoch(title, dataset, tally, watch, saver)
                    self._stop_if_asked(saver)
                self.num_epochs += 1
                note.num_epochs, note.is_under_way = self.num_epochs, False
        return note.figures

    def _train_epoch(
        self,
        title: str,
        dataset: Iterable[Any],
        tally: Tally,
        watch: Watch,
        saver: Saver | None,
    ) -> dict[str, float]:
        """From where the last resume or a predecessor has left it, or else from its beginning."""
        if self.cluster.num_streams:
            return self._train_streams(title, dataset, tally, watch, saver)
        found = self.optimizer.begin_pass()
        if found.is_over:
            self._resumed = None
            pass_over(dataset, self.cluster, self.num_epochs)
            self.optimizer.end_pass()
            return figures_again(tally, self.cluster, title)
        place, begun = self._begin_epoch(dataset, found)
        if saver is not None:
            saver.begin_epoch(found.num_pushes)
        share: Iterable[Any] = ()
        if not found.has_left:
            share = share_of(dataset, self.cluster, self.num_epochs, place)
        run = self._run(title, [Turn(share, place)], self.model, tally, watch)
        goes_on = begun is not None
        run = dataclasses.replace(
            run, epoch=self.num_epochs, begun=begun, goes_on=goes_on, saver=saver
        )
        return run.train()

    def _train_streams(
        self,
        title: str,
        dataset: Iterable[Any],
        tally: Tally,
        watch: Watch,
        saver: Saver | None,
    ) -> dict[str, float]:
        """An epoch whose streams the workers share out among themselves."""
        resumed, self._resumed = self._resumed, None
        goes_on = resumed is not None and FitNote.from_json(resumed.extra).is_under_way
        self._random.begin_epoch(dataset)
        shared = SharedPass(self.optimizer, dataset, self.num_epochs, goes_on=goes_on)
        if shared.is_over:
            log.info("train: worker %d: epoch %d is over", self.cluster.worker, self.num_epochs)
            self.optimizer.end_pass()
            return figures_again(tally, self.cluster, title)
        if saver is not None:
            saver.begin_epoch(0)
        run = self._run(title, shared.turns(), self.model, tally, watch)
        is_late = self.cluster.client.script.is_successor
        run = dataclasses.replace(
            run, epoch=self.num_epochs, goes_on=goes_on or is_late, saver=saver
        )
        return run.train()

    def _stop_if_asked(self, saver: Saver | None) -> None:
        """Raises Stopped."""
        reason = agreed_to_stop(self.cluster)
        if not reason:
            return
        if saver is not None:
            saver.stop()
            log.info("%s: training has stopped after a step, with a checkpoint", reason)
        else:
            log.warning(
                "%s: training has stopped after a step; nothing was saved: fit takes checkpoints=",
                reason,
            )
        raise Stopped(reason)

    def _begin_epoch(
        self, dataset: Iterable[Any], found: Inherited
    ) -> tuple[Place, Callable[[], None] | None]:
        """Where this worker's share begins, and what to do when it does."""
        resumed, self._resumed = self._resumed, None
        self._random.begin_epoch(dataset)
        if found.is_some:
            if resumed is not None and FitNote.from_json(resumed.extra).is_under_way:
                self._random.rewind(resumed.random)
            return self._succeed(dataset, found), lambda: None
        if resumed is None:
            return BEGIN, None
        own = resumed.random
        if not FitNote.from_json(resumed.extra).is_under_way:
            self._random.restore(own)
            self._random.begin_epoch(dataset)
            return BEGIN, None
        self._random.rewind(own)
        return self._place(), lambda: self._random.restore(own)

    def _place(self) -> Place:
        """Where the stream stands in this epoch."""
        at = self.optimizer.position
        if at and at[0] == self.num_epochs:
            return Place(at[1], at[2:])
        return BEGIN  # this worker had made no step in the epoch

    def _succeed(self, dataset: Iterable[Any], found: Inherited) -> Place:
        """Go on in the place of a predecessor."""
        place, worker = self._place(), self.cluster.worker
        if not found.has_left:
            check_order(dataset)
        log.info(
            "train: worker %d was started again: going on behind batch %d of epoch %d; figures are"
            " of the rest",
            *(worker, place.batches, self.num_epochs),
        )
        warn_of_buffers(self.model, worker)
        return place

    def _resume_fit(self, checkpoints: Checkpoints | AtStop | None, epochs: int) -> FitNote:
        """Load what a call like this one has left; the note of it, or a new one."""
        if not isinstance(checkpoints, Checkpoints):
            raise BadRequest(
                f"Trainer.fit: expected checkpoints with resume=True, found {checkpoints}"
            )
        if self.num_epochs or self.optimizer.num_steps:
            raise BadRequest(
                "Trainer.fit: expected resume=True at the first fit of a trainer, found one that"
                f" has made {self.optimizer.num_steps} steps; use Trainer.resume() once and then"
                " the epochs that are left"
            )
        if self.resume(checkpoints.path, storage_options=checkpoints.storage_options) is None:
            return FitNote()
        assert self._resumed is not None
        note = FitNote.from_json(self._resumed.extra)
        if self.num_epochs - note.begun_at > epochs or (
            self.num_epochs - note.begun_at == epochs and not note.figures
        ):
            raise BadRequest(
                f"Trainer.fit: expected more epochs than {self._resumed.path} has begun, which is"
                f" {self.num_epochs - note.begun_at + note.is_under_way}, found epochs={epochs}"
            )
        return note

    def evaluate(self, dataset: Iterable[Any]) -> dict[str, float]:
        """Loss and metrics on all workers' shares of the data; changes nothing.

        Starts when every worker has come and every push has been applied.
        """
        return self.infer_from_dataset(dataset)

    def infer_from_dataset(
        self,
        dataset: Iterable[Any],
        *,
        model: nn.Module | None = None,
        labels: bool = True,
        fetch_list: Sequence[str] = (),
        fetch_info: Sequence[str] = (),
        print_period: int = 100,
        debug: bool = False,
        dump: Dump | None = None,
        check_nan: bool = True,
        stat_var_names: Sequence[str] | None = None,
    ) -> dict[str, float]:
        """As `evaluate`, and show or write what the model makes of the data.

        Args:
            model: what to run in place of the whole model, without loss and metrics: a part of it,
                as the tower that gives the vectors of items.
            labels: False: the data has none, so that there are no loss and metrics.

        The others as of `train_from_dataset`. With `dump`, each worker writes the outputs of its
        stream in order, from part-00000 on.
        """
        fetch = Fetch(fetch_list, fetch_info, print_period)
        if labels and model is None:
            title, tally = "evaluate", Tally(self.metrics, self.label, merged=stat_var_names)
        else:
            title, tally = "infer", Tally([], None, merged=stat_var_names, has_loss=False)
        with self.cluster.client.script.section():
            if self.cluster.client.script.is_behind:
                return figures_again(tally, self.cluster, title)
            self.optimizer.flush()
            came = {"worker": self.cluster.worker}
            met = self.cluster.client.gather(came, [], purpose=title, patient=True)
            self.optimizer.refresh()
            with (
                life.time_of(dataset, self.optimizer),
                dumping(dump, dataset, self.model, self.cluster) as file,
            ):
                watch = Watch(fetch, debug, file, ExampleIds(dataset) if check_nan else None)
                share = share_of(dataset, self.cluster, of=place_among(met, self.cluster))
                turns = [Turn(share)]
                return self._run(title, turns, model or self.model, tally, watch).evaluate()

    def _run(
        self, title: str, turns: Iterable[Turn], model: nn.Module, tally: Tally, watch: Watch
    ) -> Run:
        return Run(
            title=title,
            turns=turns,
            model=model,
            score=Scorer(self.loss if tally.has_loss else None, self.label),
            tally=tally,
            optimizer=self.optimizer,
            watch=watch,
            depth=self.depth,
            threads=self.threads,
            shows=self.shows_progress,
        )

    # ---- the life of rows ----

    def set_time(self, time: float | Callable[[], float]) -> None:
        """Say what time the data is of: rows fade and expire by it.

        Args:
            time: seconds since 1970 that pushes carry from now on, 0 if the data has none, which is
                how a run begins; or what gives them at every push, as `time.time` for the clock on
                the wall. A row's time never goes back: pushes of an earlier time count as of its
                last one.

        Raises:
            BadRequest: less than 0, or 2**32 or more.
        """
        self.optimizer.set_time(time)

    def shrink(self, *, day_over: bool = True) -> dict[str, dict[str, int]]:
        """Remove the rows whose time is over by their tables' policies; every worker calls it.

        Call it once a day of data, behind the day's training; more often changes nothing.

        Args:
            day_over: judge rows as of the end of the day of `set_time`: shows and clicks have faded
                by that day, too, as in Fleet.

        Returns:
            Table -> "expired" and "evicted": how many rows were removed.
        """
        return life.shrink(self.optimizer, day_over=day_over)

    def counters(self) -> dict[str, dict[str, int]]:
        """Table -> what has become of keys since the servers started: "admitted" got a row,
        "rejected" (pushes of a key that) did not, "expired" and "evicted" lost theirs.
        """
        return life.counters(self.optimizer)

    def staleness(self) -> dict[int, int]:
        """How stale pushes were when they were applied, of all workers and servers since the
        servers started: how many pushes a server had applied since the pull that a push was
        computed from -> number of pushes. The last key counts all beyond, too.
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
            hot: of "hot", how many rows of each table, or (a float) what share.
            keep: leave so many checkpoints in the parent folder, and what their deltas need.
            storage_options: what fsspec opens the location with.

        Raises:
            BadRequest: no new folder, or servers may not write there; a delta without a checkpoint
                before. ResourceExhausted: the disk is full; nothing is left of it.
        """
        location = checkpoint.Location(path, storage_options, self.shows_progress)
        note, what = FitNote(num_epochs=self.num_epochs), checkpoint.What(mode, hot, keep)
        checkpoint.save(self.optimizer, location, note.to_json(), what, random=self._random)

    def load(
        self,
        path: str | Path,
        *,
        dense: Literal["strict", "match", "skip"] = "strict",
        tables: Collection[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Bring servers, model, optimizer and random numbers to the state of a checkpoint, whatever
        number of servers wrote it; a delta, on top of what was loaded before. The next epoch begins
        at its beginning; see `resume`.

        Args:
            dense: "strict": go on with the run that the checkpoint is of. "match": begin a new run
                of a changed model, with tables by name and dense parameters and buffers by name and
                shape; rates are this run's. "skip": that without dense parameters and buffers.
            tables: these alone, which begins a new run too; None: all of the model.

        Returns:
            Tables, parameters and buffers that kept their own values.

        Raises:
            BadRequest: no checkpoint there, or a delta of another one. Corruption: a damaged file.
                SchemaMismatch: another model. Nothing has changed then.
        """
        location = checkpoint.Location(path, storage_options, self.shows_progress)
        self._resumed = None
        if dense != "strict" or tables is not None:
            return checkpoint.load_part(self.optimizer, location, dense, tables)
        loaded = checkpoint.load(self.optimizer, location, self._random)
        self.num_epochs = FitNote.from_json(loaded.extra).num_epochs
        return []

    def resume(
        self, path: str | Path, *, storage_options: Mapping[str, Any] | None = None
    ) -> str | None:
        """Go on from the newest whole checkpoint in the numbered folders below a path or location.

        As `load`; and the next fit goes on within the epoch that was under way, each worker behind
        the last batch that the checkpoint holds of its stream. A folder that is not a complete
        checkpoint, or a damaged one, is reported and passed over.

        Returns:
            Where it is; None: there is none, and nothing has changed.

        Raises:
            Corruption: there are only damaged ones. SchemaMismatch: another model.
            BadRequest: it is of another number of workers; `load` it, and begin the epoch again.
        """
        folders = NumberedFolders(path, storage_options)
        loaded = checkpoint.load_newest(
            self.optimizer, folders.complete, storage_options, self._random
        )
        if loaded is None:
            return None
        if loaded.num_streams != self.cluster.streams_per_pass:
            raise BadRequest(
                f"Trainer.resume: expected {loaded.num_streams} workers, of whose streams"
                f" {loaded.path} is, found {self.cluster.streams_per_pass}"
                f"{' streams' if self.cluster.num_streams else ''}; Trainer.load() takes it on any"
                " number, and begins the epoch again"
            )
        self._resumed = loaded
        self.num_epochs = FitNote.from_json(loaded.extra).num_epochs
        return loaded.path
