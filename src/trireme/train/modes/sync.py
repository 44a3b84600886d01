"""Mode sync: every step equals one process on the union of the workers' batches.

A push is staged. When those of all workers are there the servers apply their sum, and then answer
the pulls for the next step.
"""

from collections.abc import Sequence
from dataclasses import replace

from trireme.errors import BadRequest
from trireme.protocol.clipping import Clip
from trireme.train.modes.local_training import LocalTraining, TableGradients, WorkerStep
from trireme.train.modes.numbered_steps import NumberedSteps
from trireme.train.predecessor import PredecessorProgress
from trireme.train.stopping import is_last_step
from trireme.worker.dense_parameters import DenseParameters
from trireme.worker.gradients import KeysByClass
from trireme.worker.pull import Pulled


class Sync(NumberedSteps):
    """The steps are the job's: all workers have the same count."""

    in_lockstep = True
    pushes_are_steps = False  # but the job's
    trains_in_threads = False
    why_not_shared = "every step is one of all workers, whose number then may not change"
    is_staged = True

    def __init__(self, local: LocalTraining) -> None:
        super().__init__(local)
        _check_scales(local)
        self._staged = 0  # the step of the last push
        # num_steps at step 0 of the passes, the same on all workers; their own counts differ after
        # streams of unequal lengths.
        self._steps_before: int | None = None
        # With one worker the sum is its own gradient.
        self._server_clip: Clip | None = None if local.cluster.num_workers == 1 else local.clip

    def may_pull_ahead(self, *, steps: bool) -> bool:
        return False

    def read(self, keys: KeysByClass, *, blocks: bool) -> Pulled:
        """Rows with the last step of this worker, once it has been applied everywhere."""
        pulled = self.client.pull(
            keys,
            blocks=blocks,
            staged=self._staged,
            clipped=self._server_clip is not None and self._server_clip.kind == "norm",
            time=self.stream.data_time(),
        )
        self.is_stopped = is_last_step(pulled, self._last_step, self.cluster)
        return pulled

    def clip(self, tables: TableGradients, dense: DenseParameters) -> TableGradients:
        """The gradient of a step is the sum of all workers', which servers have: they clip it."""
        return tables if self._server_clip is not None else super().clip(tables, dense)

    def step(self, step: WorkerStep) -> None:
        """Stage the gradients; all workers stop after this step if it says so."""
        header = replace(step.header, clip=self._server_clip)
        self.stream.push(header, step.tables, self.local.dense_gradient(step.dense), staged=True)
        self._staged = self._last_step = header.step

    # ---- the count ----

    def count_step(self) -> int:
        assert self._steps_before is not None
        step = self.next_step()
        self.passes.num_steps = self._steps_before + step
        return step

    def set_num_steps(self, num_steps: int) -> None:
        self.passes.num_steps, self._steps_before = num_steps, None
        if self._first_step is not None:
            self._steps_before = num_steps - (self.next_step() - 1)

    def _counts(self) -> Sequence[int]:
        return () if self._steps_before is None else (self._steps_before,)

    def _count_from(self, progress: PredecessorProgress, counts: Sequence[int]) -> None:
        assert self._first_step is not None
        before = self.passes.num_steps - (self._first_step - 1)
        self._steps_before = counts[0] if counts else before
        self.passes.num_steps = self._steps_before + self._last_step
        if progress.has_left:
            self._staged = self._last_step


def _check_scales(local: LocalTraining) -> None:
    num_workers = local.cluster.num_workers
    for table in local.tables if num_workers > 1 else ():
        if table.optimizer.scale == "fleet" and not table.schema.is_scored:
            raise BadRequest(
                f"DistributedOptimizer: expected scale='loss' for table {table.name!r} in sync with"
                f" {num_workers} workers, found 'fleet', which counts a key in the batch of"
                " one worker; give the table a ScorePolicy, whose shows servers add up, or use"
                " Strategy('async'), as Fleet does"
            )
