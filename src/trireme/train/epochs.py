"""Where an epoch begins for this worker: at the beginning of its data, after the last batch that a
checkpoint holds, or after the last batch of a predecessor.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from trireme.errors import BadRequest, Stopped
from trireme.job.cluster import Cluster
from trireme.train.checkpointing.checkpoint_location import Location, NumberedFolders
from trireme.train.checkpointing.checkpoints import CheckpointAtStop, Checkpoints
from trireme.train.checkpointing.fit_progress import FitProgress
from trireme.train.checkpointing.load import Dense, LoadedCheckpoint, load, load_newest, load_part
from trireme.train.checkpointing.random_state import RandomState
from trireme.train.checkpointing.savers import Saver
from trireme.train.dealt_streams import DealtStreams, Start, check_streams
from trireme.train.leased_streams import LeasedPass, StreamBatches
from trireme.train.loop.worker_batches import EPOCH_START, EpochPosition, cut_of, worker_batches
from trireme.train.optimizer import DistributedOptimizer
from trireme.train.predecessor import (
    PredecessorProgress,
    check_order,
    check_steps,
    skip_epoch,
    warn_of_lost_buffers,
)
from trireme.train.stopping import agreed_reason_to_stop

log = logging.getLogger("trireme.train")


@dataclass(frozen=True)
class EpochStart:
    """What is left of an epoch."""

    streams: Iterable[StreamBatches]
    resumes: bool = False  # a part was trained on before, so there may be no example left
    on_first_batch: Callable[[], None] | None = None  # called before training on it


class Epochs:
    """Counts the epochs of a trainer (num_epochs) and finds where each begins. random: the random
    numbers that checkpoints hold. callbacks: states of a checkpoint that the next fit takes; None:
    it continues none.
    """

    def __init__(self, optimizer: DistributedOptimizer) -> None:
        self._optimizer, self._cluster = optimizer, optimizer.cluster
        self.num_epochs = 0
        self.is_fitting = False
        self.random = RandomState()
        self._resumed: LoadedCheckpoint | None = None
        self.callbacks: Mapping[str, Any] | None = None
        # The streams of the next epoch, or the one under way, if another number of workers began it
        self.dealt: DealtStreams | None = None

    @contextmanager
    def fitting(self) -> Iterator[None]:
        """A fit runs within the block. Raises BadRequest: one runs already, as in a callback."""
        self._expect_no_fit("fit")
        self.is_fitting = True
        try:
            yield
        finally:
            self.is_fitting = False

    def _expect_no_fit(self, method: str) -> None:
        if self.is_fitting:
            raise BadRequest(
                f"Trainer.{method}: expected a trainer that does not fit, found fit under way: a"
                " callback cannot call it; fit.stop() ends it, and the script may call"
                f" {method} then"
            )

    # ---- checkpoints ----

    @property
    def resumed(self) -> FitProgress | None:
        """How far the fit was whose checkpoint the next epoch continues; None: it has none."""
        return None if self._resumed is None else FitProgress.from_json(self._resumed.extra)

    def load(self, location: Location, dense: Dense, tables: Collection[str] | None) -> list[str]:
        """See Trainer.load."""
        self._expect_no_fit("load")
        self._resumed = self.dealt = self.callbacks = None
        if dense != "strict" or tables is not None:
            return load_part(self._optimizer, location, dense, tables)
        loaded = load(self._optimizer, location, self.random)
        self.num_epochs = FitProgress.from_json(loaded.extra).num_epochs
        return []

    def resume(self, path: Any, storage_options: Mapping[str, Any] | None) -> str | None:
        """See Trainer.resume."""
        self._expect_no_fit("resume")
        return self._resume(path, storage_options)

    def _resume(self, path: Any, storage_options: Mapping[str, Any] | None) -> str | None:
        folders = NumberedFolders(path, storage_options)
        loaded = load_newest(self._optimizer, folders.complete, storage_options, self.random)
        if loaded is None:
            return None
        self.dealt = None
        if self._optimizer.mode.deals_streams:
            self.dealt = self._deal(loaded)
        elif loaded.num_streams != self._cluster.streams_per_pass:
            raise BadRequest(
                f"Trainer.resume: expected {loaded.num_streams} workers, as in the job that"
                f" saved {loaded.path}, found {self._cluster.streams_per_pass}"
                f"{' streams' if self._cluster.num_streams else ''}; Trainer.load() takes it on any"
                " number, and begins the epoch again"
            )
        self._resumed = loaded
        progress = FitProgress.from_json(loaded.extra)
        self.num_epochs, self.callbacks = progress.num_epochs, progress.callbacks
        if self._cluster.worker == 0:
            log.info(
                "resumed from %s at epoch %d, step %d",
                *(loaded.path, self.num_epochs + 1, self._optimizer.num_steps),
            )
        return loaded.path

    def _deal(self, loaded: LoadedCheckpoint) -> DealtStreams | None:
        """The streams of the epoch under way as they are dealt to the workers of this run; None:
        each goes on with its own.
        """
        progress, num_workers = FitProgress.from_json(loaded.extra), self._cluster.num_workers
        is_as_before = loaded.num_streams == num_workers and progress.dealt is None
        if is_as_before or not progress.is_under_way:
            return None
        num_streams = max(loaded.num_streams, num_workers)
        pushed = self._cluster.client.stream_positions(range(num_streams))
        before = pushed[: loaded.num_streams]
        if progress.dealt is None:
            epoch = progress.num_epochs  # in which each worker trained on its own
            starts: list[Start] = [EpochPosition.after(push.position, epoch) for push in before]
        else:
            starts = progress.dealt.now(before)
        log.info(
            "resume: %d workers go on with the %d streams of the epoch under way",
            *(num_workers, len(starts)),
        )
        return DealtStreams.deal(starts, pushed[:num_workers])

    def resume_fit(
        self, checkpoints: Checkpoints | CheckpointAtStop | None, epochs: int
    ) -> FitProgress:
        """Load the newest checkpoint of an earlier run of the same call of fit, if there is one."""
        if not isinstance(checkpoints, Checkpoints):
            what = "expected checkpoints with resume=True"
            raise BadRequest(f"Trainer.fit: {what}, found {checkpoints}")
        if self.num_epochs or self._optimizer.num_steps > self._optimizer.steps_before:
            raise BadRequest(
                "Trainer.fit: expected resume=True at the first fit of a trainer, found one that"
                f" has made {self._optimizer.num_steps} steps; use Trainer.resume() once and then"
                " the epochs that are left"
            )
        if self._resume(checkpoints.path, checkpoints.storage_options) is None:
            return FitProgress()
        progress = self.resumed
        assert progress is not None
        assert self._resumed is not None
        num_done = self.num_epochs - progress.begun_at
        if num_done > epochs or (num_done == epochs and not progress.figures):
            raise BadRequest(
                f"Trainer.fit: expected more epochs than {self._resumed.path} has begun, which is"
                f" {num_done + progress.is_under_way}, found epochs={epochs}"
            )
        return progress

    # ---- the beginning of an epoch ----

    def begin(self, dataset: Iterable[Any], saver: Saver | None) -> EpochStart | None:
        """Enter the pass of the next epoch; None: predecessors have finished it."""
        if self._cluster.num_streams:
            return self._begin_leased(dataset, saver)
        if self.dealt is not None:
            check_streams(dataset)
        resumed, self._resumed = self._resumed, None
        if resumed is not None:
            self._check_cut(dataset, resumed)
            self._optimizer.unfinished.clear(self._optimizer.parts)
        done = self._optimizer.begin_pass(dataset)
        if done.is_over:
            skip_epoch(dataset, self._cluster, self.num_epochs)
            self._optimizer.end_pass()
            return None
        position, resumes, on_first_batch = self._begin_own(dataset, done, resumed)
        if saver is not None:
            saver.begin_epoch(done.num_pushes)
        if self.dealt is not None:
            dealt = self.dealt.streams(dataset, self._cluster, self.num_epochs)
            return EpochStart(dealt, resumes, on_first_batch)
        batches: Iterable[Any] = ()
        if not done.has_left:
            batches = worker_batches(dataset, self._cluster, self.num_epochs, position)
        return EpochStart([StreamBatches(batches, position)], resumes, on_first_batch)

    def _check_cut(self, dataset: Iterable[Any], resumed: LoadedCheckpoint) -> None:
        """Raises BadRequest: positions in the epoch under way are those of other batches or files
        (where each worker has its own: of worker 0's).
        """
        progress, cut = FitProgress.from_json(resumed.extra), cut_of(dataset)
        is_known = progress.is_under_way and progress.cut
        if is_known and progress.cut != cut.text and not (cut.is_own and self._cluster.worker):
            raise BadRequest(
                f"resume: expected the data within an epoch of which {resumed.path} was saved,"
                f" {progress.cut}, found {cut.text or 'other data'}: examples would be lost or"
                " repeated; bring the former data back, or use Trainer.load(), which begins the"
                " epoch again"
            )

    def _begin_leased(self, dataset: Iterable[Any], saver: Saver | None) -> EpochStart | None:
        """An epoch whose streams the workers share out."""
        resumed, self._resumed = self._resumed, None
        resumes = resumed is not None and FitProgress.from_json(resumed.extra).is_under_way
        self.random.begin_epoch(dataset)
        leased = LeasedPass(self._optimizer, dataset, self.num_epochs, resumes=resumes)
        if leased.is_over:
            number = self.num_epochs + 1
            log.info("train: worker %d: epoch %d is over", self._cluster.worker, number)
            self._optimizer.end_pass()
            return None
        if saver is not None:
            saver.begin_epoch(0)
        is_late = self._cluster.client.script.is_successor
        return EpochStart(leased.streams(), resumes or is_late)

    def _begin_own(
        self, dataset: Iterable[Any], done: PredecessorProgress, resumed: LoadedCheckpoint | None
    ) -> tuple[EpochPosition, bool, Callable[[], None] | None]:
        """Where this worker's stream begins, and the other fields of its EpochStart."""
        is_under_way = resumed is not None and FitProgress.from_json(resumed.extra).is_under_way
        saved = {} if resumed is None else resumed.random
        self.random.begin_epoch(dataset)
        if is_under_way:
            self.random.rewind(saved)
        if done.has_begun:
            return self._after_predecessor(dataset, done), True, None
        if is_under_way:
            return self._position(), True, lambda: self.random.restore(saved)
        if resumed is not None:
            self.random.restore(saved)
            self.random.begin_epoch(dataset)
        return EPOCH_START, False, None

    def _position(self) -> EpochPosition:
        """The position of this worker's stream in this epoch."""
        return EpochPosition.after(self._optimizer.mode.last_push.position, self.num_epochs)

    def _after_predecessor(
        self, dataset: Iterable[Any], done: PredecessorProgress
    ) -> EpochPosition:
        position, worker = self._position(), self._cluster.worker
        if not done.has_left:
            check_order(dataset)
            check_steps(self._cluster)
        log.info(
            "train: worker %d was restarted: continuing after batch %d of epoch %d; figures are"
            " of the rest",
            *(worker, position.batches, self.num_epochs + 1),
        )
        warn_of_lost_buffers(self._optimizer.model, worker)
        return position


def stop_if_asked(cluster: Cluster, saver: Saver | None) -> None:
    """Save if all workers stop here. Raises Stopped if they stop."""
    reason = agreed_reason_to_stop(cluster)
    if not reason:
        return
    if saver is not None:
        saver.stop()
        log.info("%s: training has stopped after a step, with a checkpoint", reason)
    else:
        hint = "nothing was saved: fit takes checkpoints="
        log.warning("%s: training has stopped after a step; %s", reason, hint)
    raise Stopped(reason, cluster.stop_request.code)
