"""What sync and bounded share: streams advance together, by steps that all workers number alike."""

from collections.abc import Sequence
from typing import ClassVar

from trireme.train.modes.base import Mode
from trireme.train.modes.local_training import LocalTraining
from trireme.train.predecessor import PredecessorProgress, check_loop
from trireme.worker import passes


class NumberedSteps(Mode):
    """All workers enter each pass, at a step that the coordinator says."""

    is_staged: ClassVar[bool]  # servers keep pushes until those of all workers are there

    def __init__(self, local: LocalTraining) -> None:
        super().__init__(local)
        self._first_step: int | None = None  # of the pass; None between passes
        self._first_sequence = 0
        self._last_step = 0

    def next_step(self) -> int:
        """The number of the next step of this worker in the pass."""
        assert self._first_step is not None
        return self._first_step + self.stream.sequence + 1 - self._first_sequence

    def count_step(self) -> int:
        self.passes.num_steps += 1
        return self.next_step()

    def join_pass(self) -> None:
        if self.passes.entered is None:
            check_loop(self.begin_pass())

    def begin_pass(self) -> PredecessorProgress:
        """Enter the next pass with all other workers, unless this one has not left the last."""
        if self.passes.entered is not None:
            return PredecessorProgress()
        self.flush()
        entered, progress = self.passes.begin(self._counts(), together=True, staged=self.is_staged)
        if not progress.is_over:
            assert entered.note is not None
            begun_at, _, *counts = entered.note
            self._first_step, self._first_sequence = entered.first_step, begun_at + 1
            self._last_step = self.next_step() - 1
            self._count_from(progress, counts)
        return progress

    def _counts(self) -> Sequence[int]:
        """Further counts that a successor needs to continue."""
        return ()

    def _count_from(self, progress: PredecessorProgress, counts: Sequence[int]) -> None:
        """Set the step count. counts: `_counts` of this worker's first process in
        the pass.
        """
        self.passes.num_steps += progress.num_pushes

    def end_pass(self) -> None:
        self.flush()
        if self._first_step is not None:
            passes.leave(self.client, self.next_step(), staged=self.is_staged)
            self._first_step = None
        super().end_pass()

    def finish(self) -> None:
        if self._first_step is not None:
            self.end_pass()
