"""What a mode works on: one worker's model, its stream of pushes and its place in the passes."""

from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch

from trireme.blocks import Blocks
from trireme.dense.optimizers import GroupValues, group_values, optimizer_spec
from trireme.errors import BadRequest
from trireme.job.cluster import Cluster
from trireme.protocol.clipping import Clip
from trireme.strategy import Strategy
from trireme.table import RowClassId, Table
from trireme.train.loop.replica import Replica
from trireme.train.pass_state import PassState
from trireme.train.push_stream import PushStream
from trireme.train.stream_checks import agree_on_model
from trireme.worker.dense_parameters import DenseParameters
from trireme.worker.gradients import DenseGradient, Step, TableGradient

TableGradients: TypeAlias = dict[RowClassId, TableGradient]


@dataclass(frozen=True, slots=True)
class WorkerStep:
    """The gradients of one step of this worker."""

    header: Step  # what a push of the step says about it
    tables: TableGradients
    dense: DenseParameters  # the parameters, with their gradients
    behind: bool  # the mode may return when the step is on its way
    is_skipped: bool  # loss scaling found a gradient that is not finite: there are none


@dataclass(frozen=True, kw_only=True)
class LocalTraining:
    """One worker's side of training."""

    strategy: Strategy
    cluster: Cluster
    tables: tuple[Table, ...]
    replica: Replica  # the model and its dense parameters
    optimizer: torch.optim.Optimizer | None  # of the dense parameters; None: there are none
    clip: Clip | None  # what gradients are clipped by
    blocks: Blocks | None  # as the user gave them
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

    def create_on_servers(self) -> None:
        """Create the tables and blocks, with worker 0's weights. Every worker calls it. Raises
        SchemaMismatch: workers differ in the strategy, blocks or model, or the servers have another
        table of that name.
        """
        client, optimizer, dense = self.cluster.client, self.optimizer, self.replica.dense
        blocks = self.blocks or Blocks()
        client.coordinator.agree("strategy", repr(self.strategy))
        kind = "no optimizer" if optimizer is None else type(optimizer).__name__
        agree_on_model(self.cluster, self.tables, dense, kind)
        for table in self.tables:
            self.cluster.ensure_table(table)
        if optimizer is not None:
            client.coordinator.agree("blocks", repr(blocks))
            names = [block.param for block in dense.specs]
            owners = partial(blocks.owners, names)
            client.create_blocks(optimizer_spec(optimizer), self.group_values(), dense, owners)

    def group_values(self) -> list[GroupValues]:
        """The values of the optimizer's groups as they are now."""
        if self.optimizer is None:
            return []
        defaults = self.optimizer.defaults
        return [group_values(group, defaults) for group in self.optimizer.param_groups]

    def dense_gradient(self, dense: DenseParameters) -> DenseGradient | None:
        """Take the gradients of a replica's dense parameters away; None: it has none."""
        return DenseGradient(dense.take_gradients(), self.group_values()) if len(dense) else None
