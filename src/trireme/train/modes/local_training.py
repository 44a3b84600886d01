"""What a mode works on: one worker's model, its stream of pushes and its place in the passes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trireme.blocks import Blocks
from trireme.errors import BadRequest
from trireme.job.cluster import Cluster
from trireme.protocol.clipping import Clip
from trireme.protocol.dense_optimizers import GroupValues, group_values
from trireme.protocol.gradients import DenseGradient
from trireme.strategy import Strategy
from trireme.table import Table
from trireme.train.loop.replica import Replica
from trireme.train.pass_state import PassState
from trireme.train.push_stream import PushStream
from trireme.worker.dense_parameters import DenseParameters


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
