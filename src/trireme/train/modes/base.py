"""What a consistency mode is: how rows reach a worker, and when its steps reach the others."""

from collections.abc import Callable
from typing import ClassVar

from trireme.train.clipping import clip_gradients
from trireme.train.modes.local_training import LocalTraining, TableGradients, WorkerStep
from trireme.train.predecessor import PredecessorProgress, check_loop
from trireme.worker.dense_parameters import DenseParameters
from trireme.worker.gradients import KeysByClass
from trireme.worker.pull import Pulled


class Mode:
    """One worker's part of a mode: async, unless a method is overridden. The training thread uses
    it; another thread may `flush`, `pull` ahead, or run the `fetcher`.

    Raises:
        BadRequest: the mode cannot train this model in this job; nothing has been created yet.
    """

    in_lockstep: ClassVar[bool] = False  # all workers make each step together, save and stop at it
    pushes_are_steps: ClassVar[bool] = True  # each push is one step of this worker
    trains_in_threads: ClassVar[bool] = True  # several threads may each train on a batch
    why_not_shared: ClassVar[str] = ""  # why workers that share streams cannot come and go

    def __init__(self, local: LocalTraining) -> None:
        self.local = local
        self.cluster, self.client = local.cluster, local.cluster.client
        self.stream, self.passes = local.stream, local.passes
        self.is_stopped = False  # no worker makes another step of the pass
        local.check_shared_streams(self.why_not_shared)

    def open(self) -> None:
        """Create tables and dense parameters, or find them made, and begin from their weights."""
        self.local.create_on_servers()
        self.resume()
        self.passes.begin_script()
        self.local.replica.install(self.client.pull({}, blocks=True))

    # ---- rows and dense weights ----

    def may_pull_ahead(self, *, steps: bool) -> bool:
        """Whether to pull the next batch's rows during the current one. steps: the loop makes one
        step per batch.
        """
        return True

    def fetcher(self) -> Callable[[KeysByClass], None] | None:
        """What a thread does for the keys of the next batch where `pull` may not be ahead."""
        return None

    def begin_run(self) -> None:
        """Number the batches that come now from 0."""
        self.join_pass()

    def pull(self, keys: KeysByClass, *, blocks: bool, number: int | None = None) -> Pulled:
        """Rows to train on, and dense weights if asked, as soon as the mode allows. number: the
        batch's.
        """
        self.join_pass()
        return self.read(keys, blocks=blocks)

    def read(self, keys: KeysByClass, *, blocks: bool) -> Pulled:
        """Rows as they are now, after this worker's steps."""
        return self.client.pull(keys, blocks=blocks, time=self.stream.data_time())

    def refresh(self) -> None:
        """Wait for all pushes of this worker, and take the servers' dense weights."""
        self.flush()
        self.local.replica.install(self.read({}, blocks=True))

    # ---- the step ----

    def count_step(self) -> int:
        """Count a step; returns its number in the pass, 0 where steps have none."""
        self.passes.num_steps += 1
        return 0

    def clip(self, tables: TableGradients, dense: DenseParameters) -> TableGradients:
        """Clip what the worker clips before a step. Raises NotFinite: no step is to be made."""
        return clip_gradients(self.local.clip, tables, dense.parameters.values())

    def step(self, step: WorkerStep) -> None:
        """Make a step of the gradients, and leave none."""
        dense = self.local.dense_gradient(step.dense)
        self.stream.push(step.header, step.tables, dense, behind=step.behind)

    def settle(self) -> None:
        """Let the next forward pass see the step, in a loop without a pipeline."""
        self.refresh()

    def flush(self) -> None:
        """Wait until the servers have all steps. Raises the error of one that failed."""
        self.stream.flush()

    # ---- the pass ----

    def join_pass(self) -> None:
        """Enter the next pass if the loop did not call begin_pass."""
        if self.passes.is_repeating:
            check_loop(PredecessorProgress(num_pushes=self.stream.sequence))

    def begin_pass(self) -> PredecessorProgress:
        """Enter the next pass; returns what a predecessor did in it."""
        self.flush()  # pushes on their way belong to the pass before
        _, progress = self.passes.begin()
        self.passes.num_steps += progress.num_pushes
        return progress

    def num_batches(self, num_pushes: int) -> int:
        """The batches that a predecessor trained on with these pushes."""
        return num_pushes

    def end_pass(self) -> None:
        """Leave the pass: this worker has no more batches in it."""
        self.flush()
        self.passes.entered = None
        self.refresh()

    def finish(self) -> None:
        """Leave what is still open, before the cluster closes or another optimizer begins."""

    # ---- checkpoints ----

    def resume(self) -> None:
        """Continue where the servers stand: at the start, and after a load."""
        self.stream.resume()

    def set_num_steps(self, num_steps: int) -> None:
        """Count on from here, after a load."""
        self.passes.num_steps = num_steps

    def publish(self) -> None:
        """Bring to the servers what only workers have, before a save; one worker does."""

    def adopt(self) -> None:
        """Take what the servers have, after a load."""
        self.refresh()
