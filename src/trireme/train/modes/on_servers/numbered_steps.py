"""What sync and bounded share: streams advance together, by steps that all workers number alike."""

from typing import ClassVar

from trireme.train.modes.on_servers.mode import OnServers
from trireme.train.modes.setup import TrainingSetup
from trireme.train.predecessor import PredecessorProgress
from trireme.worker import passes
from trireme.worker.passes import PassNote


class NumberedSteps(OnServers):
    """All workers enter each pass, at a step that the coordinator says."""

    enters_passes = True
    is_staged: ClassVar[bool]  # servers keep pushes until those of all workers are there

    def __init__(self, setup: TrainingSetup) -> None:
        super().__init__(setup)
        self._first_step: int | None = None  # of the pass; None between passes
        self._first_sequence = 0
        self._last_step = 0
        self._left_at: int | None = None  # the step at which a call to leave the pass was cut off

    def next_step(self) -> int:
        assert self._first_step is not None
        return self._first_step + self.stream.sequence + 1 - self._first_sequence

    def begin_pass(self) -> PredecessorProgress:
        """Enter the next pass with all other workers, unless this one has not left the last."""
        if self._left_at is not None:
            self.leave_pass()
        if self.passes.entered is not None:
            return PredecessorProgress()
        self.flush()
        entered, progress = self.passes.begin(self._note(), together=True, staged=self.is_staged)
        if not progress.is_over:
            self._first_step = entered.first_step
            self._first_sequence = entered.note.sequence + 1
            self._last_step = self.next_step() - 1
            self._count_from(entered.note, progress)
        return progress

    def _note(self) -> PassNote:
        """Where this worker stands, for a successor."""
        return PassNote(self.stream.sequence, self.num_steps)

    def _count_from(self, note: PassNote, progress: PredecessorProgress) -> None:
        """Set the step count. note: of this worker's first process in the pass."""
        self.num_steps = note.num_steps + progress.num_pushes

    def end_pass(self) -> None:
        self.flush()
        self.leave_pass()
        super().end_pass()

    def leave_pass(self) -> None:
        if self._first_step is not None:
            # Servers may have a push that failed. Other workers would wait for it if none had.
            passes_over = int(self.stream.has_failed and self.cluster.is_only_worker)
            self._left_at = self._left_at or self.next_step() + passes_over
            passes.leave(self.client, self._left_at, staged=self.is_staged)
            self._first_step = self.passes.entered = self._left_at = None

    def finish(self) -> None:
        if self._first_step is not None:
            self.end_pass()
        super().finish()
