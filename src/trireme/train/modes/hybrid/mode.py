"""Mode hybrid: rows as in async; dense parameters are equal on all workers after every step."""

from trireme.dense.optimizers import needs_whole
from trireme.errors import BadRequest
from trireme.train.clipping import clip_gradients
from trireme.train.modes.base import Mode
from trireme.train.modes.hybrid.replicated_dense import ReplicatedDense
from trireme.train.modes.local_dense import LocalDense
from trireme.train.modes.local_training import LocalTraining, TableGradients, WorkerStep
from trireme.train.predecessor import PredecessorProgress, check_loop
from trireme.worker.dense_parameters import DenseParameters
from trireme.worker.gradients import KeysByClass
from trireme.worker.pull import Pulled


class Hybrid(Mode):
    """The servers have the dense parameters too, for checkpoints, but no push changes them."""

    trains_in_threads = False
    why_not_shared = "the workers that sum their gradients are the same to the end"

    def __init__(self, local: LocalTraining) -> None:
        super().__init__(local)
        _check(local)

    def open(self) -> None:
        """Begin, and find the other workers."""
        if self.client.script.is_successor:
            raise BadRequest(
                "DistributedOptimizer: expected all workers to begin together in mode 'hybrid',"
                " whose dense weights are in them, found one that was restarted: start the job"
                " again and load the newest checkpoint"
            )
        super().open()
        local = self.local
        parameters = local.replica.dense
        self._dense = ReplicatedDense(self.cluster, parameters, local.optimizer, local.clip)
        self._local_dense = LocalDense(self.client, parameters, local.optimizer)

    def pull(self, keys: KeysByClass, *, blocks: bool, number: int | None = None) -> Pulled:
        return super().pull(keys, blocks=False, number=number)

    def refresh(self) -> None:
        """Wait for all pushes; the dense weights are here."""
        self.flush()

    def clip(self, tables: TableGradients, dense: DenseParameters) -> TableGradients:
        """Clip the rows; dense gradients are clipped after the all-reduce."""
        return clip_gradients(self.local.clip, tables, ())

    def step(self, step: WorkerStep) -> None:
        self.stream.push(step.header, step.tables, None, behind=step.behind)
        # While the rows are on their way:
        self._dense.step(step.header.examples, is_skipped=step.is_skipped)

    # ---- the pass ----

    def join_pass(self) -> None:
        if self.passes.entered is None:
            check_loop(self.begin_pass())
        else:
            self._dense.begin()

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

    # ---- checkpoints ----

    def publish(self) -> None:
        self._local_dense.publish(weights=True)

    def adopt(self) -> None:
        self._local_dense.adopt()
        self.refresh()


def _check(local: LocalTraining) -> None:
    if local.clip is not None and local.clip.kind == "norm":
        raise BadRequest(
            "DistributedOptimizer: expected clip_value or none in mode 'hybrid', found clip_norm:"
            " its dense gradient is of all workers and that of rows of one, so they have no norm in"
            " common"
        )
    if local.blocks is not None:
        raise BadRequest(
            "DistributedOptimizer: expected no blocks in mode 'hybrid', whose dense parameters are"
            f" in the workers, found {local.blocks}"
        )
    if local.optimizer is not None and needs_whole(local.optimizer):
        raise BadRequest(
            f"DistributedOptimizer: {type(local.optimizer).__name__} needs whole parameters; in"
            " mode 'hybrid' servers keep them in blocks, for checkpoints"
        )
