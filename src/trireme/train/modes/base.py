"""What a consistency mode is: how rows reach a worker, and when its steps reach the others."""

from collections.abc import Callable
from typing import ClassVar, Protocol

import torch
from torch import nn

from trireme.data.batch import Batch
from trireme.errors import BadRequest
from trireme.protocol.routing import Keys
from trireme.train.loop.scoring import Compute, Scored
from trireme.train.modes.setup import TableGradients, TrainingSetup, WorkerStep
from trireme.train.pass_data import PassData, WindowSize
from trireme.train.predecessor import PredecessorProgress
from trireme.worker.client import StreamPosition
from trireme.worker.dense_parameters import DenseParameters
from trireme.worker.gradients import KeysByClass
from trireme.worker.pull import Pulled

CompletePull = Callable[[], Pulled]
"""Ends a pull that another thread began; the training thread calls it, after its step before."""

BeginPull = Callable[[KeysByClass, KeysByClass, int | None], CompletePull | None]
"""Gets the keys of a batch while the one before is trained on, the keys of that one, and the number
of the batch if the loop makes a step of each. None: `Mode.pull` does the whole pull.
"""


class Mode(Protocol):
    """One worker's part of a mode. The training thread calls it, except where a thread is named.
    All workers call alike, but for rows, steps and flushes, as many as the data of each needs.
    """

    trains_in_threads: ClassVar[bool]  # several threads may each train on batches of their own
    saves_between_steps: ClassVar[bool]  # all workers wait at a step while a checkpoint is written
    holds_steps: ClassVar[bool] = False  # they do so when worker 0 has said it a step before
    trains_rows_on_device: ClassVar[bool] = False  # gradients of rows stay on their device
    deals_streams: ClassVar[bool] = False  # another number of workers may go on within an epoch
    steps_per_push: int = 1  # which a push has, unless it is the last one before a flush
    num_steps: int  # made by this worker; by the job if all workers make each step together
    last_push: StreamPosition  # of this worker; set when it takes a stream that workers share

    def __init__(self, setup: TrainingSetup) -> None:
        """Raises BadRequest: the mode cannot train this model in this job."""

    def open(self) -> None:
        """Create tables and dense parameters, or find them, and begin with their weights."""

    # ---- rows and dense weights: the training thread, or one that pulls ahead ----

    def pull_ahead(self, *, steps: bool) -> BeginPull | None:
        """What the pull thread begins the pull of the next batch with; None: nothing is ahead.
        steps: the loop makes one of each batch.
        """

    def lacking(self, keys: KeysByClass) -> KeysByClass:
        """Those of the keys of a batch to come whose rows servers may have used long ago."""

    def lookahead(self) -> int:
        """How many batches a pipeline has to plan ahead at least."""
        return 0

    def plan(self, keys: KeysByClass | None) -> None:
        """The keys of a batch to train on, in order, ahead of its `pull`, from the thread that
        plans; None: there are no more.
        """
        return

    def begin_run(self) -> None:
        """Number the batches that come now from 0."""

    def end_run(self) -> None:
        """There are no more batches to evaluate now, and no error."""
        return

    def pull(self, keys: KeysByClass, *, blocks: bool, number: int | None = None) -> Pulled:
        """Rows to train batch `number` on, with dense weights if asked, when the mode allows."""

    def read(self, keys: KeysByClass) -> Pulled:
        """Rows as they are now, for a forward pass without gradients."""

    def forget(self, table: str, keys: Keys) -> None:
        """The rows of these keys are gone: what this worker keeps of them goes too."""
        return

    # ---- the step ----

    def compute(self, model: nn.Module, batch: Batch, locally: Compute) -> Scored:
        """Forward and backward of a Trainer's batch. locally: computes them in this process."""
        return locally(model, batch)

    def begin_step(self) -> int:
        """The value of `num_steps` after this step. Raises BadRequest: it must not be made."""

    def clip(self, tables: TableGradients, dense: DenseParameters) -> TableGradients:
        """Clip what the worker clips before a step, whose gradients are finite."""

    def step(self, step: WorkerStep) -> None:
        """Make a step of the gradients, and leave none."""

    def note_interrupt(self, error: KeyboardInterrupt) -> None:
        """Ctrl-C has come in the middle of `step`: half of it may be made."""
        return

    def wait_for_step(self) -> None:
        """Let the next forward pass use the step, in a loop without a pipeline."""

    def flush(self) -> None:
        """Wait until all steps have left this worker; any thread. Raises the error of a step."""

    def refresh(self) -> None:
        """Flush, and bring the dense parameters up to date."""

    def hold_after_next_step(self) -> None:
        """Where the mode `holds_steps`: no step follows the next one until worker 0 makes it."""
        return

    def wait_for_all_steps(self) -> None:
        """Where the mode `holds_steps`: wait until servers have the last step of every worker."""
        return

    def has_stopped(self, reason: str = "") -> bool:
        """Whether this worker stops now. reason: why it was asked to; empty: it was not."""

    # ---- the pass ----

    def begin_pass(self) -> PredecessorProgress:
        """Enter the next pass; returns what a predecessor did in it."""

    def end_pass(self) -> None:
        """Leave the pass: this worker has no more batches in it."""

    def leave_pass(self) -> None:
        """Leave a pass that is open, before a load, whatever has failed in it."""

    def finish(self) -> None:
        """Leave what is still open, before the cluster closes or another optimizer begins."""

    # ---- a pass on a device, which is a mode in the place of another ----

    def check_device_pass(self) -> None:
        """Raises BadRequest: `begin_device_pass` cannot be called, for any keys."""
        raise BadRequest("begin_pass: expected a mode that has passes on a device, found none")

    def begin_device_pass(
        self, source: PassData | WindowSize, device: torch.device, following: PassData | None = None
    ) -> "Mode":
        """Bring the rows that the data needs to a device, or have a window there; returns the mode
        that trains there. following: what a pass that follows lacks is read in a thread. Raises as
        `check_device_pass`.
        """
        raise BadRequest(f"begin_pass: {device}: this mode has no passes on a device")

    def end_device_pass(self) -> "Mode":
        """Give the servers what the pass has trained, all or nothing; returns the mode that it was
        begun in. Raises BadRequest: there is no pass.
        """
        raise BadRequest("end_pass: expected begin_pass before, found no pass on a device")

    def abandon_device_pass(self) -> "Mode":
        """Forget what the pass has trained; as `end_device_pass`."""
        raise BadRequest("abandon_pass: expected begin_pass before, found no pass on a device")

    def check_between_passes(self, what: str) -> None:
        """Raises BadRequest: in a pass on a device `what` cannot be done."""
        return

    # ---- checkpoints ----

    def resume(self, steps_before: int | None = None) -> None:
        """Continue where the job stands. steps_before: in a loaded run, before its first push."""

    def set_num_steps(self, num_steps: int) -> None:
        """Count on from here, after a load."""

    def publish(self) -> None:
        """Copy to the servers what only workers have, before a save. Worker 0 alone calls it."""

    def adopt(self) -> None:
        """Take over what has been loaded."""
