"""What a worker pushes: the gradients of one step, and the facts that go with them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from trireme.dense.optimizers import GroupValues
from trireme.protocol.clipping import Clip
from trireme.protocol.columns import KeyColumns
from trireme.protocol.routing import Keys
from trireme.table import RowClassId

KeysByClass = Mapping[RowClassId, Keys]
"""The keys of a pull: (K,) per table and row class, distinct, in bucket order."""


@dataclass(frozen=True)
class PushHeader:
    """The facts of one push."""

    sequence: int  # number of the push in its stream, from 1
    step: int  # of the running pass in sync and bounded; 0 in async
    push_counts: Sequence[int]  # of the pull that the gradients were computed from
    examples: int  # in the batch; the weight of its gradient in sync
    position: tuple[int, ...] = ()  # of the stream after the batch
    time: int = 0  # data time in seconds; 0: the data has none
    clip: Clip | None = None  # how servers clip the sum of a sync step
    stops: str = ""  # why all workers stop after a sync step; empty: they do not


@dataclass(frozen=True)
class TableGradient:
    """The gradient of one row class in one step."""

    keys: Keys  # (K,) distinct
    gradients: Tensor  # (K, D) float32
    values: dict[str, float | int]  # of the rule
    columns: KeyColumns = field(default_factory=dict)  # that the table's schema declares


@dataclass(frozen=True)
class DenseGradient:
    """The gradient of the dense parameters in one step, and the values of the param groups."""

    gradients: Mapping[str, Tensor | None]
    groups: list[GroupValues]
