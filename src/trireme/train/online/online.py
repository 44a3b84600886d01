"""Online learning: passes of data one behind the other, evaluated, trained on, published.

    for report in train_passes(trainer, passes, publishing=Publishing("models")):
        print(report.point, report.evaluated["auc"])

Every pass is evaluated with the model as the passes before have left it, then trained on. As
`Publishing` says, checkpoints, deltas and, behind the last pass of a day, a base are written and
listed in done-files; at the end of a day rows fade and unused ones go (Trainer.shrink). A run that
was killed goes on behind the newest listed checkpoint: passes behind it are trained again from
there, so that no update counts twice. One that is told to stop (SIGTERM) leaves a checkpoint of
where it stands, within a pass too, and goes on from there.

Every worker of the job runs the same loop over the same passes.
"""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from trireme.checkpoint.format.manifest import MANIFEST
from trireme.errors import BadRequest, Corruption, Stopped
from trireme.storage.storage import open_storage
from trireme.train.checkpointing.checkpoints import AtStop
from trireme.train.checkpointing.numbered import NumberedFolders
from trireme.train.online.donefiles import (
    BASES,
    DELTAS,
    DoneFiles,
    Exported,
    Point,
    Published,
    StoppedAt,
)
from trireme.train.online.passes import Pass, Waiting, next_day
from trireme.train.stopping import reason_among, stopping_on_sigterm
from trireme.train.trainer import Trainer

log = logging.getLogger("trireme")


Options = Callable[[Pass], Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Publishing:
    """What is written below `path`, and when. Numbers of passes count from 1 every day.

    Args:
        path: folder, local to all processes or any location that fsspec reaches; a checkpoint is
            PATH/DAY/PASS, a delta PATH/DAY/delta-PASS, and behind the last pass of a day
            PATH/NEXT_DAY/base and the checkpoint PATH/NEXT_DAY/0.
        checkpoint_per_pass: write a checkpoint behind every so many passes.
        save_delta_frequency: write a delta for inference behind every so many passes.
        save_first_base: write a base before the first pass of a new run.
        keep: checkpoints that stay; None: all.
        dtype: of the exports' rows, see Trainer.save_inference_model.
    """

    path: str
    checkpoint_per_pass: int = 6
    save_delta_frequency: int = 6
    save_first_base: bool = False
    keep: int | None = None
    dtype: Literal["float32", "float16", "int8"] = "float32"
    storage_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("checkpoint_per_pass", "save_delta_frequency", "keep"):
            value = getattr(self, name)
            if not (value is None and name == "keep") and (type(value) is not int or value < 1):
                raise BadRequest(f"Publishing: expected {name} >= 1, found {value!r}")


@dataclass(frozen=True)
class PassReport:
    """What became of a pass.

    evaluated, trained: figures of all workers before and while training on it; empty if it had no
        data.
    written: paths of checkpoints and exports, in their order.
    removed: per table what shrink removed, at the end of a day.
    """

    point: Point
    evaluated: Mapping[str, float]
    trained: Mapping[str, float]
    written: tuple[str, ...] = ()
    removed: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


def train_passes(
    trainer: Trainer,
    passes: Iterable[Pass],
    *,
    publishing: Publishing | None = None,
    evaluate: bool = True,
    prefetch: bool = False,
    preload_threads: int | None = None,
    poll_s: float = 10.0,
    timeout_s: float = 86400.0,
    training: Options = lambda _: {},
    evaluating: Options = lambda _: {},
) -> Iterator[PassReport]:
    """Train on passes in order, from behind the newest listed checkpoint on.

    Args:
        passes: in the order of (day, number); those that the checkpoint holds are passed over.
        publishing: None: nothing is written, and a run begins at the first pass.
        evaluate: figures of each pass before it is trained on.
        prefetch: ask for the next pass and begin to load it (InMemoryDataset) before training.
        preload_threads: that load it; None: the dataset's.
        poll_s, timeout_s: how often to ask whether a pass is ready, and for how long.
        training, evaluating: options of Trainer.train_from_dataset and infer_from_dataset for a
            pass. Where a run begins again in the midst of a day, dumps of the passes that it trains
            on again are replaced.

    Yields:
        A report behind each pass; the next one begins when it is asked for.

    Raises:
        BadRequest: passes that are not in their order. DeadlineExceeded: one was not ready in time.
        Corruption: no listed checkpoint can be loaded, or a done-file is broken.
        Stopped: SIGTERM at some worker, behind a step or between two passes; not if the script
            heeds the signal itself.
        As Trainer's methods.
    """
    if not (poll_s > 0 and timeout_s > 0):
        raise BadRequest(f"train_passes: expected seconds > 0, found {poll_s} and {timeout_s}")
    run = _Run(trainer, publishing, evaluating if evaluate else None, training)
    waiting = Waiting(trainer.cluster, poll_s, timeout_s, preload_threads)
    return run.over(iter(passes), waiting, prefetch=prefetch)


class _Run:
    """A run over passes: what it has published, and where it stands."""

    def __init__(
        self,
        trainer: Trainer,
        publishing: Publishing | None,
        evaluating: Options | None,
        training: Options,
    ) -> None:
        self._trainer, self._publishing = trainer, publishing
        self._evaluating, self._training = evaluating, training
        self._writes = trainer.cluster.worker == 0
        self._key = _now()
        self._exported: str | None = None  # the last export, which the next delta follows
        self._sample: Any = None  # a batch of the newest pass, to trace the model with
        self._can_export = False
        self._point: Point | None = None  # where the run stands
        self._is_saved = True  # whether a listed checkpoint holds all that
        self._begun: StoppedAt | None = None  # it stands within a pass
        self._done: DoneFiles | None = None
        if publishing is not None:
            self._done = DoneFiles(publishing.path, publishing.storage_options)

    def over(
        self, passes: Iterator[Pass], waiting: Waiting, *, prefetch: bool
    ) -> Iterator[PassReport]:
        if self._trainer.cluster.num_streams:
            raise BadRequest(
                "train_passes: expected a job in which each worker has its own share of a pass,"
                f" found one whose workers share out {self._trainer.cluster.num_streams} streams"
            )
        if self._trainer.cluster.client.script.is_successor:
            raise BadRequest(
                "train_passes: expected all workers to begin together, found one that was started"
                " again: start the job again, it goes on behind the newest checkpoint"
            )
        with stopping_on_sigterm(self._trainer.cluster):
            self._resume()
            try:
                yield from self._over(passes, waiting, prefetch=prefetch)
            except Stopped as stopped:
                self._save_place(stopped.reason)
                raise

    def _over(
        self, passes: Iterator[Pass], waiting: Waiting, *, prefetch: bool
    ) -> Iterator[PassReport]:
        here, finish, point = next(passes, None), None, self._point
        while here is not None and point is not None and here.point <= point:
            if here.ends_day and here.point == point:
                yield self._end_again(here)
            here = next(passes, None)
        while here is not None:
            self._check_order(here)
            dataset = waiting.open(here) if finish is None else finish()
            coming = finish = None
            if prefetch and (coming := next(passes, None)) is not None:
                finish = waiting.begin(coming)
            yield self._pass(here, dataset, is_first=self._point is None)
            here = coming if prefetch else next(passes, None)

    def _check_order(self, here: Pass) -> None:
        point, begun = self._point, None if self._begun is None else self._begun.within
        if point is not None and here.point <= point:
            raise BadRequest(
                f"train_passes: expected passes in the order of (day, number), found {here}"
                f" behind {point.day}/{point.number}"
            )
        if begun is not None and here.point != begun:
            raise BadRequest(
                f"train_passes: expected pass {begun.day}/{begun.number} next, within which the run"
                f" was told to stop, found {here}"
            )

    # ---- resume ----

    def _resume(self) -> None:
        """Load where a run was told to stop, or else the newest listed checkpoint that can be
        loaded.
        """
        if self._done is None or self._publishing is None:
            return
        mine: dict[str, Any] = {}
        if self._writes:
            listed = self._done.checkpoints()
            stopped = self._done.stopped()
            newest = max((of.point for of in listed), default=None)
            if stopped is not None and (newest is None or newest <= stopped.point):
                mine["stopped"] = stopped.to_json()
            mine["checkpoints"] = [[c.point.day, c.point.number, c.key, c.path] for c in listed]
            exports = [*self._done.exports(BASES), *self._done.exports(DELTAS)]
            mine["exports"] = [[*_made_behind(of.path), of.path] for of in exports]
        met = self._trainer.cluster.client.gather(mine, [], purpose="resume passes", patient=True)
        first: dict[str, Any] = met[0][0]
        failed: Exception | None = None
        if "stopped" in first:
            at = StoppedAt.from_json(first["stopped"])
            try:
                self._go_on(at)
                return
            except (Corruption, BadRequest) as error:
                failed = error
                log.warning("stream: %s cannot be loaded, going further back: %s", at.path, error)
        options = self._publishing.storage_options
        for day, number, key, path in reversed(first["checkpoints"]):
            try:
                self._trainer.load(path, storage_options=options)
            except (Corruption, BadRequest) as error:
                failed = error
                log.warning("stream: %s cannot be loaded, trying the one before: %s", path, error)
                continue
            self._key = key
            known = [of for of in first["exports"] if of[:2] <= [day, number]]
            self._exported = max(known)[2] if known else None
            log.info("stream: going on behind pass %s/%d, from %s", day, number, path)
            self._point = Point(day, number)
            return
        if failed is not None:
            raise Corruption(
                f"train_passes: expected one of {len(first['checkpoints'])} checkpoints listed"
                f" below {self._publishing_path} to load, found none that does"
            ) from failed

    def _go_on(self, at: StoppedAt) -> None:
        """Load where a run was told to stop. Raises Corruption, BadRequest: that cannot be."""
        found = self._trainer.resume(self._stops.path, storage_options=self._stops.storage_options)
        if found != at.path:
            raise Corruption(f"train_passes: expected the checkpoint {at.path}, found {found}")
        self._point, self._key, self._exported = at.point, at.key, at.exported
        where = f"behind pass {at.point.day}/{at.point.number}"
        if at.within is not None:
            self._begun, where = at, f"within pass {at.within.day}/{at.within.number}"
        log.info("stream: going on %s, from %s", where, at.path)

    @property
    def _stops(self) -> AtStop:
        """Where a checkpoint goes when the run is told to stop."""
        assert self._publishing is not None
        return AtStop(f"{self._publishing_path}/stopped", self._publishing.storage_options)

    @property
    def _publishing_path(self) -> str:
        assert self._publishing is not None
        return self._publishing.path.rstrip("/")

    # ---- one pass ----

    def _pass(self, of: Pass, dataset: Iterable[Any] | None, *, is_first: bool) -> PassReport:
        trainer = self._trainer
        trainer.set_time(of.seconds)
        evaluated: dict[str, float] = {}
        trained: dict[str, float] = {}
        written: list[str] = []
        dataset, begun = self._agreed(of, dataset), self._begun
        self._begun, self._is_saved = None, False
        if dataset is None:
            if begun is not None:
                raise BadRequest(f"train_passes: {of}: expected the rest of its data, found none")
            log.info("stream: pass %s/%d has no data", of.day, of.number)
        else:
            if is_first and self._publishing is not None and self._publishing.save_first_base:
                written += self._save_base(f"{of.day}/base", {})
            if begun is not None:
                evaluated = dict(begun.evaluated)
            elif self._evaluating is not None:
                evaluated = trainer.infer_from_dataset(
                    dataset, **self._options(self._evaluating, of)
                )
            trained = self._train(of, dataset, evaluated)
            if hasattr(dataset, "release_memory"):
                dataset.release_memory()
        self._point = of.point
        written += self._publish(of, evaluated or trained)
        removed = self._end_day(of, evaluated or trained, written) if of.ends_day else {}
        return PassReport(of.point, evaluated, trained, tuple(written), removed)

    def _train(
        self, of: Pass, dataset: Iterable[Any], evaluated: Mapping[str, float]
    ) -> dict[str, float]:
        options = self._options(self._training, of)
        if self._publishing is None:
            return self._trainer.train_from_dataset(dataset, **options)
        if "checkpoints" in options:
            raise BadRequest(
                "train_passes: expected no checkpoints= among the options of training, found them:"
                " publishing= says which there are"
            )
        try:
            return self._trainer.train_from_dataset(dataset, checkpoints=self._stops, **options)
        except Stopped:
            self._list_stop(self._point or Point(of.day, 0), of.point, evaluated)
            raise

    def _options(self, options: Options, of: Pass) -> dict[str, Any]:
        found = dict(options(of))
        dump = found.get("dump")
        if (
            self._writes
            and dump is not None
            and _remove(str(dump.path), dump.storage_options or {})
        ):
            log.info("stream: %s is of a run that was killed: it is replaced", dump.path)
        return found

    def _agreed(self, of: Pass, dataset: Iterable[Any] | None) -> Iterable[Any] | None:
        """The shuffled data of this worker; None where no worker has any."""
        mine: dict[str, Any] = {"has_data": dataset is not None}
        if dataset is not None:
            if hasattr(dataset, "global_shuffle"):
                dataset.global_shuffle(self._trainer.cluster)
            batch = _first_batch(dataset, self._trainer)
            self._sample = self._sample if batch is None else batch
        mine["has_sample"] = self._sample is not None
        mine["stops"] = self._trainer.cluster.stop_request.reason
        purpose = f"begin of pass {of.day}/{of.number}"
        met = self._trainer.cluster.client.gather(mine, [], purpose=purpose, patient=True)
        if reason := reason_among(body for body, _ in met):
            raise Stopped(reason)
        self._can_export = bool(met[0][0]["has_sample"])  # worker 0 traces the model
        if not any(body["has_data"] for body, _ in met):
            return None
        return [] if dataset is None else dataset

    def _publish(self, of: Pass, figures: Mapping[str, float]) -> list[str]:
        """Delta and checkpoint, where this pass is followed by one."""
        if self._publishing is None:
            return []
        written = []
        if of.number % self._publishing.save_delta_frequency == 0 and self._can_export:
            if self._exported is not None:
                written += self._save_delta(of, self._exported, figures)
            else:
                log.info("stream: no base yet: writing one in place of the first delta")
                written += self._save_base(f"{of.day}/base-{of.number}", figures)
        # Behind the export, so that a run that goes on from here knows what the next one follows.
        if of.number % self._publishing.checkpoint_per_pass == 0:
            written += self._save_checkpoint(of.point, f"{of.day}/{of.number}", "full")
        return written

    def _end_day(
        self, of: Pass, figures: Mapping[str, float], written: list[str]
    ) -> dict[str, dict[str, int]]:
        removed = self._trainer.shrink(day_over=True)
        if self._publishing is not None:
            day = next_day(of.day)
            if self._can_export:
                written += self._save_base(f"{day}/base", figures)
            written += self._save_checkpoint(Point(day, 0), f"{day}/0", "batch")
        return removed

    def _end_again(self, of: Pass) -> PassReport:
        """The end of a day whose last pass is in the checkpoint, but not what comes behind it."""
        self._trainer.set_time(of.seconds)
        dataset: Any = of.open()
        if hasattr(dataset, "load_into_memory"):
            dataset.load_into_memory()
        self._agreed(of, dataset)
        written: list[str] = []
        removed = self._end_day(of, {}, written)
        return PassReport(of.point, {}, {}, tuple(written), removed)

    # ---- writing ----

    def _save_checkpoint(self, point: Point, name: str, mode: str) -> list[str]:
        assert self._publishing is not None
        path = self._clear(name)
        self._trainer.save(path, mode=mode, storage_options=self._publishing.storage_options)
        if self._writes:
            assert self._done is not None
            entry = Published(point, self._key, path)
            for old in self._done.add_checkpoint(entry, keep=self._publishing.keep):
                _remove(old, self._publishing.storage_options)
            if self._done.stopped() is not None:
                self._remove_stops(keep="")
                self._done.set_stopped(None)
        self._point, self._is_saved = point, True
        return [path]

    def _save_place(self, reason: str) -> None:
        """All have stopped: save what no listed checkpoint holds."""
        if self._publishing is None:
            log.warning("%s: stopped; nothing was saved: train_passes takes publishing=", reason)
        elif self._is_saved:
            log.info("%s: stopped where a checkpoint stands", reason)
        else:
            assert self._point is not None
            path = NumberedFolders(self._stops.path, self._stops.storage_options).next().path
            self._trainer.save(path, storage_options=self._stops.storage_options)
            self._list_stop(self._point, None, {})
            log.info("%s: stopped between two passes, with a checkpoint", reason)

    def _list_stop(
        self, point: Point, within: Point | None, evaluated: Mapping[str, float]
    ) -> None:
        """List the newest checkpoint of a stop; those before go."""
        self._is_saved = True
        if self._writes:
            assert self._done is not None
            stops = self._stops
            newest = NumberedFolders(stops.path, stops.storage_options).complete()[0]
            path = str(newest.path)
            at = StoppedAt(point, within, self._key, self._exported, path, evaluated)
            self._done.set_stopped(at)
            self._remove_stops(keep=path)

    def _remove_stops(self, *, keep: str) -> None:
        """Remove the checkpoints of stops, but for one."""
        stops = self._stops
        for of in NumberedFolders(stops.path, stops.storage_options).complete():
            if of.path != keep:
                _remove(str(of.path), stops.storage_options or {})

    def _save_base(self, name: str, figures: Mapping[str, float]) -> list[str]:
        path = self._clear(name)
        self._export(path, None)
        self._key = _now()
        self._list(BASES, Exported(self._key, self._key, path, _monitor(figures)))
        return [path]

    def _save_delta(self, of: Pass, follows: str, figures: Mapping[str, float]) -> list[str]:
        path = self._clear(f"{of.day}/delta-{of.number}")
        self._export(path, follows)
        self._list(DELTAS, Exported(_now(), self._key, path, _monitor(figures)))
        return [path]

    def _export(self, path: str, follows: str | None) -> None:
        assert self._publishing is not None
        self._trainer.save_inference_model(
            path,
            batch=self._sample,
            mode="base" if follows is None else "delta",
            follows=follows,
            dtype=self._publishing.dtype,
        )
        self._exported = path

    def _list(self, name: str, entry: Exported) -> None:
        if self._writes:
            assert self._done is not None
            self._done.add_export(name, entry)

    def _clear(self, name: str) -> str:
        """The path of what is written next; what a killed run has left there goes."""
        assert self._publishing is not None
        path = f"{self._publishing_path}/{name}"
        if self._writes and _remove(path, self._publishing.storage_options):
            log.info("stream: %s was written behind the newest checkpoint: it is replaced", path)
        return path


def _first_batch(dataset: Iterable[Any], trainer: Trainer) -> Any:
    cluster = trainer.cluster
    if not hasattr(dataset, "stream"):
        return next(iter(dataset), None)
    stream = dataset.stream(cluster.worker, cluster.num_workers)
    try:
        return next(iter(stream), None)
    finally:
        stream.close()


def _remove(location: str, options: Mapping[str, Any]) -> bool:
    """Remove a folder, its manifest first; returns whether there was one."""
    storage = open_storage(location, options)
    parent, name = storage.parent()
    if name not in parent.folders():
        return False
    storage.remove(MANIFEST)
    parent.remove(name)
    return True


def _made_behind(path: str) -> tuple[str, int]:
    """Day and pass behind which an export was made: DAY/base, DAY/base-PASS, DAY/delta-PASS."""
    *_, day, name = path.split("/")
    return day, int(name.partition("-")[2] or 0)


def _now() -> int:
    """Seconds since 1970: what Fleet names exports by."""
    return int(datetime.datetime.now(datetime.timezone.utc).timestamp())


def _monitor(figures: Mapping[str, float]) -> str:
    return " ".join(f"{name}:{value:.6g}" for name, value in figures.items())
