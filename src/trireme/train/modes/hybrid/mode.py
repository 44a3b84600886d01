"""Mode hybrid: rows as in async; dense parameters are equal on all workers after every step."""

import threading
import time

from trireme.dense.optimizers import needs_whole
from trireme.errors import BadRequest, DeadlineExceeded
from trireme.train.clipping import clip_gradients
from trireme.train.modes.hybrid.replicated_dense import ReplicatedDense
from trireme.train.modes.on_servers.mode import OnServers
from trireme.train.modes.on_servers.worker_trained_dense import WorkerTrainedDense
from trireme.train.modes.setup import TableGradients, TrainingSetup, WorkerStep
from trireme.train.predecessor import PredecessorProgress
from trireme.worker.dense_parameters import DenseParameters

_PAUSE_S = 0.005


class Hybrid(OnServers):
    """The servers have the dense parameters too, for checkpoints, but no push changes them."""

    trains_in_threads = False
    has_device_passes = False
    pushes_dense = False
    holds_steps = True
    enters_passes = True
    why_not_shared = "the workers that sum their gradients are the same to the end"

    def __init__(self, setup: TrainingSetup) -> None:
        super().__init__(setup)
        _check(setup)
        self._worker_dense = WorkerTrainedDense(self.client, setup.replica.dense, setup.optimizer)

    def open(self) -> None:
        """Begin, and find the other workers."""
        if self.client.script.is_successor:
            raise BadRequest(
                "DistributedOptimizer: expected all workers to begin together in mode 'hybrid',"
                " whose dense weights are in them, found one that was restarted: start the job"
                " again and load the newest checkpoint"
            )
        super().open()
        self._dense = ReplicatedDense(self.setup)

    def refresh(self) -> None:
        """Wait for all pushes; the dense weights are here."""
        self.forget_ahead()
        self.flush()

    def clip(self, tables: TableGradients, dense: DenseParameters) -> TableGradients:
        """Clip the rows; dense gradients are clipped after the all-reduce."""
        return clip_gradients(self.setup.clip, tables, ())

    def step(self, step: WorkerStep) -> None:
        header = self.header(step)
        self._dense.wait_for_save()
        following = self.following(step)
        self.stream.push(
            header, step.tables, None, in_background=step.in_background, following=following
        )
        # While the rows are on their way:
        self._dense.step(step.examples, is_skipped=step.is_skipped)

    def hold_after_next_step(self) -> None:
        self._dense.saves_next = True

    def wait_for_all_steps(self) -> None:
        """Raises DeadlineExceeded: a push of another worker has not arrived in time."""
        self.flush()
        client, deadline = self.client, time.monotonic() + self.client.timeout_s
        while self.cluster.num_workers > 1:
            streams = client.stream_positions(range(self.cluster.num_workers))
            missing = self._dense.num_pushes - sum(stream.sequence for stream in streams)
            if missing <= 0:
                return
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"hybrid: expected the pushes of all workers' last steps within"
                    f" {client.timeout_s:.0f} s, found {missing} missing"
                )
            threading.Event().wait(_PAUSE_S)

    # ---- the pass ----

    def begin_pass(self) -> PredecessorProgress:
        self._dense.begin()
        return super().begin_pass()

    def end_pass(self) -> None:
        """Leave the pass, having taken part in the others' steps to the last."""
        self.flush()
        self._dense.end()
        super().end_pass()

    def finish(self) -> None:
        self._dense.end()
        super().finish()

    # ---- checkpoints ----

    def publish(self) -> None:
        self._worker_dense.publish(weights=True)

    def adopt(self) -> None:
        self._worker_dense.adopt()
        self.refresh()


def _check(setup: TrainingSetup) -> None:
    if setup.clip is not None and setup.clip.kind == "norm":
        raise BadRequest(
            "DistributedOptimizer: expected clip_value or none in mode 'hybrid', found clip_norm:"
            " its dense gradient is of all workers and that of rows of one, so they have no norm in"
            " common"
        )
    if setup.blocks is not None:
        raise BadRequest(
            "DistributedOptimizer: expected no blocks in mode 'hybrid', whose dense parameters are"
            f" in the workers, found {setup.blocks}"
        )
    if setup.optimizer is not None and needs_whole(setup.optimizer):
        raise BadRequest(
            f"DistributedOptimizer: {type(setup.optimizer).__name__} needs whole parameters; in"
            " mode 'hybrid' servers keep them in blocks, for checkpoints"
        )
