"""Mode sync: every step equals one process on the union of the workers' batches.

A push is staged. When those of all workers are there the servers apply their sum, and then answer
the pulls for the next step.
"""

from dataclasses import replace

from trireme.protocol.clipping import Clip
from trireme.train.modes.base import BeginPull
from trireme.train.modes.on_servers.numbered_steps import NumberedSteps
from trireme.train.modes.setup import TableGradients, TrainingSetup, WorkerStep
from trireme.train.param_groups import check_scales
from trireme.train.predecessor import PredecessorProgress
from trireme.worker.dense_parameters import DenseParameters
from trireme.worker.gradients import KeysByClass
from trireme.worker.passes import PassNote
from trireme.worker.pull import Pulled
from trireme.worker.transport import LockedTransport


class Sync(NumberedSteps):
    """The steps are the job's: all workers have the same count."""

    trains_in_threads = False
    saves_between_steps = True
    why_not_shared = "every step is one of all workers, whose number then may not change"
    is_staged = True
    shares_device_passes = True

    def __init__(self, setup: TrainingSetup) -> None:
        super().__init__(setup)
        if (num_workers := setup.cluster.num_workers) > 1:
            where = f"in sync with {num_workers} workers"
            check_scales(setup.tables, where, "Strategy('async'), as Fleet does")
        self._staged = 0  # the step of the last push
        self._pulled = 0  # the last step that a pull has waited for
        self._has_stopped = False
        # num_steps at step 0 of the passes, the same on all workers; their own counts differ after
        # streams of unequal lengths.
        self._job_steps_before: int | None = None
        # With one worker the sum is its own gradient.
        self._server_clip: Clip | None = None if setup.cluster.num_workers == 1 else setup.clip

    def pull_ahead(self, *, steps: bool) -> BeginPull | None:
        """Nothing: the step changes rows of other workers' batches too."""
        return None

    def pull_after_steps(self, keys: KeysByClass, *, blocks: bool) -> Pulled:
        return self.pull_staged(keys, blocks=blocks)

    def pull_staged(
        self, keys: KeysByClass, *, blocks: bool, via: LockedTransport | None = None
    ) -> Pulled:
        """Pull when the last step of this worker has been applied everywhere. via: see
        WorkerClient.pull.
        """
        pulled = self.client.pull(
            keys,
            via=via,
            blocks=blocks,
            staged=self._staged,
            clipped=self.waits_for_norm,
            time=self.setup.data_time.seconds(),
        )
        return self.note_pulled(pulled)

    @property
    def waits_for_norm(self) -> bool:
        """Whether servers clip a step by its norm, which workers compute from those of servers."""
        return self._server_clip is not None and self._server_clip.kind == "norm"

    def note_pulled(self, pulled: Pulled) -> Pulled:
        """Return what has been pulled after the last step; it says whether all stop."""
        self._has_stopped, self._pulled = False, self._staged
        # Servers tell of a stop until the next pass begins; that of an ended pass stops nothing.
        first = self._first_step
        if pulled.stop and first is not None and first <= pulled.stop.step <= self._last_step:
            self._has_stopped, request = True, self.cluster.stop_request
            request.reason = request.reason or pulled.stop.reason
        return pulled

    def has_stopped(self, reason: str = "") -> bool:
        """All workers stop together, as the pull after a step says."""
        return self._has_stopped

    def clip(self, tables: TableGradients, dense: DenseParameters) -> TableGradients:
        """The gradient of a step is the sum of all workers', which servers have: they clip it."""
        return tables if self._server_clip is not None else super().clip(tables, dense)

    def step(self, step: WorkerStep) -> None:
        """Stage the gradients; all workers stop after this step if it says so."""
        if self._pulled != self._staged:  # nothing has been looked up since the step before, and
            self.pull_after_steps({}, blocks=False)  # servers take a step when they have made that
        header = replace(self.header(step), clip=self._server_clip, stops=step.stops)
        dense, following = self.dense_gradient(step.dense), self.following(step)
        self.stream.push(header, step.tables, dense, staged=True, following=following)
        self._staged = self._last_step = header.step
        if following is not None and following.pulled is not None:
            self._pulled = header.step

    # ---- the count ----

    def begin_step(self) -> int:
        super().begin_step()
        assert self._job_steps_before is not None
        return self._job_steps_before + self.next_step()

    def resume(self, steps_before: int | None = None) -> None:
        """Pushes do not count: the steps are the job's."""
        super().resume()

    def set_num_steps(self, num_steps: int) -> None:
        self.num_steps, self._job_steps_before = num_steps, None
        if self._first_step is not None:
            self._job_steps_before = num_steps - (self.next_step() - 1)

    def _note(self) -> PassNote:
        return replace(super()._note(), job_steps_before=self._job_steps_before)

    def _count_from(self, note: PassNote, progress: PredecessorProgress) -> None:
        assert self._first_step is not None
        self._job_steps_before = note.job_steps_before
        if self._job_steps_before is None:
            self._job_steps_before = note.num_steps - (self._first_step - 1)
        self.num_steps = self._job_steps_before + self._last_step
        if progress.has_left:
            self._staged = self._last_step
