"""Online learning: pass after pass of data is evaluated, trained on and published.

    for report in train_passes(trainer, passes, publishing=Publishing(path="models")):
        print(report.point, report.evaluated["auc"])

Every pass is evaluated with the model as the earlier passes have left it, then trained on. As
`Publishing` says, checkpoints, deltas and, after the last pass of a day, a base are written and
listed in done-files; at the end of a day rows fade and unused ones are removed (Trainer.shrink). A
run that was killed continues after the newest listed checkpoint: later passes are trained again,
so that no update counts twice. A run that is asked to stop (SIGTERM) leaves a checkpoint of
where it stands, also within a pass, and continues from there.

Every worker of the job runs the same loop over the same passes.
"""

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from trireme.errors import BadRequest, Corruption, Stopped, check_flags, check_numbers
from trireme.job.cluster import Cluster
from trireme.train.loop.worker_batches import Closable, worker_batches
from trireme.train.online.donefiles import BASES, DELTAS, DoneFiles, PassPoint, StopRecord
from trireme.train.online.passes import Pass, PassLoader, next_day, opened
from trireme.train.online.publishing import Publisher, Publishing, remove_folder
from trireme.train.stopping import first_reason, stopping_on_signals
from trireme.train.trainer import Trainer

log = logging.getLogger("trireme")

Options = Callable[[Pass], Mapping[str, Any]]


@dataclass(frozen=True)
class PassReport:
    """The results of a pass.

    evaluated, trained: figures of all workers before and during training; empty if the pass had no
        data.
    written: paths of checkpoints and exports, in their order.
    removed: table -> what shrink removed, at the end of a day.
    """

    point: PassPoint
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
    """Train on passes in order, beginning after the newest listed checkpoint.

    Args:
        passes: in the order of (day, number); those that the checkpoint holds are left out.
        publishing: None: nothing is written, and a run begins at the first pass.
        evaluate: compute the figures of each pass before it is trained on.
        prefetch: begin to load the next pass (InMemoryDataset) before training on this one.
        preload_threads: threads that load it; None: the dataset's.
        poll_s, timeout_s: how often to ask whether a pass is ready, and for how long.
        training, evaluating: options of Trainer.fit and Trainer.evaluate for a pass. Dumps of
            passes that are trained again are replaced.

    Yields:
        A report after each pass; the next pass begins when the next report is asked for.

    Raises:
        BadRequest: passes out of order. DeadlineExceeded: a pass was not ready in time.
        Corruption: no listed checkpoint can be loaded, or a done-file is broken.
        Stopped: a worker got SIGTERM, after a step or between two passes; not if the script handles
            the signal itself.
        As Trainer's methods.
    """
    check_flags("train_passes", evaluate=evaluate, prefetch=prefetch)
    check_numbers("train_passes", "> 0", poll_s=poll_s, timeout_s=timeout_s)
    publisher = None if publishing is None else Publisher(trainer, publishing)
    loop = _PassLoop(trainer, publisher, evaluating if evaluate else None, training)
    loader = PassLoader(trainer.cluster, poll_s, timeout_s, preload_threads)
    return loop.run(iter(passes), loader, prefetch=prefetch)


class _PassLoop:
    def __init__(
        self,
        trainer: Trainer,
        publisher: Publisher | None,
        evaluating: Options | None,
        training: Options,
    ) -> None:
        self._trainer, self._cluster, self._publisher = trainer, trainer.cluster, publisher
        self._evaluating, self._training = evaluating, training
        self._point: PassPoint | None = None  # the run stands after this pass
        self._is_saved = True  # whether a listed checkpoint holds it
        self._begun: StopRecord | None = None  # the run stands within a pass

    def run(
        self, passes: Iterator[Pass], loader: PassLoader, *, prefetch: bool
    ) -> Iterator[PassReport]:
        self._trainer.optimizer.mode.check_between_passes("train_passes")
        if self._cluster.num_streams:
            raise BadRequest(
                "train_passes: expected a job in which each worker has its own share of a pass,"
                f" found one whose workers share out {self._cluster.num_streams} streams: leave"
                " --streams out"
            )
        if self._cluster.client.script.is_successor:
            raise BadRequest(
                "train_passes: expected all workers to begin together, found one that was started"
                " again: start the job again, it continues after the newest checkpoint"
            )
        # Fail now rather than after hours of passes.
        own = nullcontext() if self._publisher is None else self._publisher.own_folder()
        with stopping_on_signals(self._cluster), own:
            if self._publisher is not None and (at := resume(self._trainer, self._publisher)):
                self._point, self._begun = at.point, None if at.within is None else at
            try:
                yield from self._run(passes, loader, prefetch=prefetch)
            except Stopped as stopped:
                self._save_stop(stopped.reason)
                raise

    def _run(
        self, passes: Iterator[Pass], loader: PassLoader, *, prefetch: bool
    ) -> Iterator[PassReport]:
        this, finish, point = next(passes, None), None, self._point
        while this is not None and point is not None and this.point <= point:
            if this.ends_day and this.point == point:
                yield self._repeat_end_of_day(this)
            this = next(passes, None)
        while this is not None:
            self._check_order(this)
            dataset = loader.open(this) if finish is None else finish()
            following = finish = None
            if prefetch and (following := next(passes, None)) is not None:
                finish = loader.begin(following)
            yield self._run_pass(this, dataset, is_first=self._point is None)
            this = following if prefetch else next(passes, None)

    def _check_order(self, this: Pass) -> None:
        point, begun = self._point, None if self._begun is None else self._begun.within
        if point is not None and this.point <= point:
            raise BadRequest(
                f"train_passes: expected passes in the order of (day, number), found {this}"
                f" behind {point.day}/{point.number}"
            )
        if begun is not None and this.point != begun:
            raise BadRequest(
                f"train_passes: expected pass {begun.day}/{begun.number} next, within which the run"
                f" was told to stop, found {this}"
            )

    # ---- one pass ----

    def _run_pass(self, this: Pass, dataset: Iterable[Any] | None, *, is_first: bool) -> PassReport:
        self._trainer.set_time(this.seconds)
        evaluated: Mapping[str, float] = {}
        trained: Mapping[str, float] = {}
        written: list[str] = []
        dataset = self._agree_on_data(this, dataset)
        begun, self._begun, self._is_saved = self._begun, None, False
        if dataset is None:
            if begun is not None:
                raise BadRequest(f"train_passes: {this}: expected the rest of its data, found none")
            log.info("stream: pass %s/%d has no data", this.day, this.number)
        else:
            if is_first and self._publisher is not None:
                written += self._publisher.before_first_pass(this)
            if begun is not None:
                evaluated = begun.evaluated
            elif self._evaluating is not None:
                evaluated = self._trainer.evaluate(dataset, **self._options(self._evaluating, this))
            trained = self._train(this, dataset, evaluated)
            if hasattr(dataset, "release_memory"):
                dataset.release_memory()
        self._point, figures = this.point, evaluated or trained
        if self._publisher is not None:
            written += self._publisher.after_pass(this, figures)
            self._is_saved = self._publisher.has_checkpoint_after(this)
        removed = self._end_day(this, figures, written) if this.ends_day else {}
        return PassReport(this.point, evaluated, trained, tuple(written), removed)

    def _train(
        self, this: Pass, dataset: Iterable[Any], evaluated: Mapping[str, float]
    ) -> dict[str, float]:
        options = self._options(self._training, this)
        if self._publisher is None:
            return self._trainer.fit(dataset, **options)
        if "checkpoints" in options:
            raise BadRequest(
                "train_passes: expected no checkpoints= among the options of training, found them:"
                " publishing= says which there are"
            )
        try:
            return self._trainer.fit(dataset, checkpoints=self._publisher.stops, **options)
        except Stopped:
            point = self._point or PassPoint(this.day, 0)
            self._publisher.list_stop(point, this.point, evaluated)
            self._is_saved = True
            raise

    def _options(self, options: Options, this: Pass) -> dict[str, Any]:
        chosen = dict(options(this))
        dump, writes = chosen.get("dump"), self._cluster.worker == 0
        if writes and dump and remove_folder(str(dump.path), dump.storage_options or {}):
            log.info("stream: %s is of a run that was killed: it is replaced", dump.path)
        return chosen

    def _agree_on_data(self, this: Pass, dataset: Iterable[Any] | None) -> Iterable[Any] | None:
        """The shuffled data of this worker; None where no worker has any."""
        example = None
        if dataset is not None:
            if hasattr(dataset, "global_shuffle"):
                dataset.global_shuffle(self._cluster)
            self._check_repeats(this, dataset)
            dataset, example = _with_first_batch(dataset, self._cluster)
        publisher = self._publisher
        if publisher is not None and example is not None:
            publisher.example = example
        body = {
            "has_data": dataset is not None,
            "has_sample": publisher is not None and publisher.example is not None,
            "stops": self._cluster.stop_request.reason,
        }
        purpose = f"begin of pass {this.day}/{this.number}"
        arrivals = self._cluster.client.coordinator.gather(body, [], purpose=purpose, patient=True)
        replies = [reply for reply, _ in arrivals]
        if reason := first_reason(replies):
            raise Stopped(reason, self._cluster.stop_request.code)
        if publisher is not None:
            publisher.can_export = bool(replies[0]["has_sample"])  # worker 0 exports
        if not any(reply["has_data"] for reply in replies):
            return None
        return [] if dataset is None else dataset

    def _check_repeats(self, this: Pass, dataset: Iterable[Any]) -> None:
        if self._evaluating is not None and isinstance(dataset, Iterator):
            raise BadRequest(
                f"train_passes: {this}: expected data that can be read twice, to evaluate and to"
                f" train, found {type(dataset).__name__}, which gives its batches once: let open()"
                " return a list of them, or give evaluate=False"
            )

    # ---- the end of a day, and stops ----

    def _end_day(
        self, last: Pass, figures: Mapping[str, float], written: list[str]
    ) -> dict[str, dict[str, int]]:
        removed = self._trainer.shrink(day_over=True)
        if self._publisher is not None:
            written += self._publisher.after_day(last, figures)
            self._point, self._is_saved = PassPoint(next_day(last.day), 0), True
        return removed

    def _repeat_end_of_day(self, last: Pass) -> PassReport:
        """End a day again whose last pass is in the checkpoint, but not what comes after it."""
        self._trainer.set_time(last.seconds)
        self._agree_on_data(last, opened(last))
        written: list[str] = []
        removed = self._end_day(last, {}, written)
        return PassReport(last.point, {}, {}, tuple(written), removed)

    def _save_stop(self, reason: str) -> None:
        """All have stopped: save what no listed checkpoint holds."""
        if self._publisher is None:
            log.warning("%s: stopped; nothing was saved: train_passes takes publishing=", reason)
        elif self._is_saved:
            log.info("%s: stopped where a checkpoint stands", reason)
        else:
            assert self._point is not None
            self._publisher.save_stop(self._point)
            log.info("%s: stopped between two passes, with a checkpoint", reason)


def _with_first_batch(dataset: Iterable[Any], cluster: Cluster) -> tuple[Iterable[Any], Any]:
    """The data, whole, and its first batch; None: it has none."""
    if isinstance(dataset, Iterator):
        first = list(itertools.islice(dataset, 1))
        return itertools.chain(first, dataset), next(iter(first), None)
    batches = worker_batches(dataset, cluster)
    try:
        return dataset, next(iter(batches), None)
    finally:
        if isinstance(batches, Closable):
            batches.close()


def resume(trainer: Trainer, publisher: Publisher) -> StopRecord | None:
    """Load the checkpoint of the last stop, or else the newest listed one that can be loaded, and
    bring the publisher to its state. Every worker calls it. Returns where the run stands; None:
    nothing is listed. Raises Corruption: none of the listed checkpoints can be loaded.
    """
    own = _listed(publisher.done_files) if trainer.cluster.worker == 0 else {}
    replies = trainer.cluster.client.coordinator.gather(
        own, [], purpose="resume passes", patient=True
    )
    listed: dict[str, Any] = replies[0][0]
    failure: Exception | None = None
    for record, is_stop in _candidates(listed):
        try:
            _load(trainer, publisher, record, is_stop=is_stop)
        except (Corruption, BadRequest) as error:
            failure = error
            instead = "going further back" if is_stop else "trying the one before"
            log.warning("stream: %s cannot be loaded, %s: %s", record.path, instead, error)
            continue
        publisher.key, publisher.last_export = record.key, record.exported
        if trainer.cluster.worker == 0 and listed["checkpoints"]:
            publisher.remove_dropped()
        where = f"after pass {record.point.day}/{record.point.number}"
        if record.within is not None:
            where = f"within pass {record.within.day}/{record.within.number}"
        log.info("stream: continuing %s, from %s", where, record.path)
        return record
    if failure is not None:
        raise Corruption(
            f"train_passes: expected one of {len(listed['checkpoints'])} checkpoints listed below"
            f" {publisher.path} to load, found none that does"
        ) from failure
    return None


def _listed(done_files: DoneFiles) -> dict[str, Any]:
    """What the done-files list, for the other workers."""
    checkpoints, stopped = done_files.checkpoints(), done_files.stopped()
    exports = [*done_files.exports(BASES), *done_files.exports(DELTAS)]
    body: dict[str, Any] = {
        "checkpoints": [[c.point.day, c.point.number, c.key, c.path] for c in checkpoints],
        "exports": [[*_made_after(export.path), export.path] for export in exports],
    }
    newest = max((checkpoint.point for checkpoint in checkpoints), default=None)
    if stopped is not None and (newest is None or newest <= stopped.point):
        body["stopped"] = stopped.to_json()
    return body


def _candidates(listed: Mapping[str, Any]) -> Iterator[tuple[StopRecord, bool]]:
    """Where the run may continue, best first; whether it is a stop."""
    if "stopped" in listed:
        yield StopRecord.from_json(listed["stopped"]), True
    for day, number, key, path in reversed(listed["checkpoints"]):
        earlier = [export for export in listed["exports"] if export[:2] <= [day, number]]
        last_export = max(earlier)[2] if earlier else None
        yield StopRecord(PassPoint(day, number), None, key, last_export, path), False


def _load(trainer: Trainer, publisher: Publisher, record: StopRecord, *, is_stop: bool) -> None:
    options = publisher.stops.storage_options
    if not is_stop:
        trainer.load(record.path, storage_options=options)
    elif (path := trainer.resume(publisher.stops.path, storage_options=options)) != record.path:
        raise Corruption(f"train_passes: expected the checkpoint {record.path}, found {path}")


def _made_after(path: str) -> tuple[str, int]:
    """Day and pass after which an export was made: DAY/base, DAY/base-PASS, DAY/delta-PASS."""
    *_, day, name = path.split("/")
    return day, int(name.partition("-")[2] or 0)
