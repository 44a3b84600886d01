"""What a mode works on: one worker's model, its stream of pushes and its place in the passes."""

from dataclasses import dataclass
from typing import TypeAlias

import torch

from trireme.blocks import Blocks
from trireme.errors import BadRequest
from trireme.job.cluster import Cluster
from trireme.protocol.clipping import Clip
from trireme.protocol.dense_optimizers import GroupValues, group_values
from trireme.protocol.gradients import DenseGradient, Step, TableGradient
from trireme.strategy import Strategy
from trireme.table import RowClassId, Table
from trireme.train.loop.replica import Replica
from trireme.train.pass_state import PassState
from trireme.train.push_stream import PushStream
from trireme.worker.dense_parameters import DenseParameters

TableGradients: TypeAlias = dict[RowClassId, TableGradient]


@dataclass(frozen=True, slots=True)
class WorkerStep:
    """The gradients of one step of this worker.

    Attributes:
        header: what a push of the step says about it.
        dense: the parameters, with their gradients.
        behind: the mode may return when the step is on its way.
        is_skipped: loss scaling found a gradient that is not finite, so there are none.
    """

    header: Step
    tables: TableGradients
    dense: DenseParameters
    behind: bool
    is_skipped: bool


@dataclass(frozen=True, kw_only=True)
class LocalTraining:
    """One worker's side of training.

    Attributes:
        replica: the model and its dense parameters.
        optimizer: of the dense parameters, as the user made it; None: there are none.
        groups: the param groups of `optimizer`. defaults: what groups leave out.
        clip: what gradients are clipped by. blocks: as the user gave them.
    """

    strategy: Strategy
    cluster: Cluster
    tables: tuple[Table, ...]
    replica: Replica
    optimizer: torch.optim.Optimizer | None
    clip: Clip | None
    blocks: Blocks | None
    stream: PushStream
    passes: PassState

    def check_shared_streams(self, why_not: str) -> None:
        """Raises BadRequest: the workers of the job share streams, and the mode says why not."""
        if self.cluster.num_streams and why_not:
            raise BadRequest(
                f"DistributedOptimizer: expected mode 'async' in a job whose workers share out"
                f" {self.cluster.num_streams} streams, found {self.strategy.mode!r}, in which"
                f" {why_not}"
            )

    def group_values(self) -> list[GroupValues]:
        """The values of the optimizer's groups as they are now."""
        if self.optimizer is None:
            return []
        defaults = self.optimizer.defaults
        return [group_values(group, defaults) for group in self.optimizer.param_groups]

    def dense_gradient(self, dense: DenseParameters) -> DenseGradient | None:
        """The gradients of a replica's dense parameters, which are left without; None: it has no
        dense parameters.
        """
        if len(dense) == 0:
            return None
        return DenseGradient(dense.take_gradients(), self.group_values())
