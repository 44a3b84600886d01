"""What a mode trains, and the steps that it makes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from trireme.blocks import Blocks
from trireme.errors import NotFinite
from trireme.job.cluster import Cluster
from trireme.protocol.clipping import Clip
from trireme.strategy import Strategy
from trireme.table import RowClassId, Table
from trireme.train.data_time import DataTime
from trireme.train.loop.replica import Replica
from trireme.train.loop.timing import Timing
from trireme.worker.dense_parameters import DenseParameters
from trireme.worker.gradients import TableGradient

TableGradients: TypeAlias = dict[RowClassId, TableGradient]


@dataclass(frozen=True, kw_only=True)
class TrainingSetup:
    """What a DistributedOptimizer was made of."""

    strategy: Strategy
    cluster: Cluster
    tables: tuple[Table, ...]
    replica: Replica  # the model and its dense parameters
    optimizer: torch.optim.Optimizer | None  # of the dense parameters; None: there are none
    clip: Clip | None  # what gradients are clipped by
    drop: Callable[[NotFinite], None]  # counts a step that is not finite, or raises the error
    blocks: Blocks | None  # as the user gave them
    data_time: DataTime
    timing: Timing

    def pull_time(self) -> int:
        """The data time of what lookups return now; 0: it has none, without statistics."""
        has_statistics = any(table.schema.pulls_statistics for table in self.tables)
        return self.data_time.seconds() if has_statistics else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerStep:
    """The gradients of one step of this worker."""

    tables: TableGradients
    dense: DenseParameters  # the parameters, with their gradients
    push_counts: Sequence[int]  # of the pull that the gradients were computed from
    examples: int  # in the batch
    position: tuple[int, ...]  # of the stream after the batch
    stops: str  # why this worker was asked to stop; empty: it was not
    in_background: bool  # the mode may return when the step is on its way
    is_skipped: bool  # a gradient was not finite: there are none
