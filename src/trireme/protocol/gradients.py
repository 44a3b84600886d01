"""What a worker pushes: the gradients of one step, and the facts that go with them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from trireme.protocol.clipping import Clip
from trireme.protocol.columns import KeyColumns
from trireme.protocol.dense_optimizers import GroupValues
from trireme.protocol.routing import Floats, Keys
from trireme.table import RowClassId

KeysByClass = Mapping[RowClassId, Keys]
"""The keys of a pull: (K,) per table and row class, distinct, in bucket order."""


@dataclass(frozen=True)
class Step:
    """The facts of one push.

    Attributes:
        sequence: number of the batch in its stream, from 1.
        step: of the running pass in sync and bounded; 0 in async.
        versions: `Pulled.versions` of the pull that the gradients were computed from.
        examples: in the batch; the weight of its gradient in sync.
        position: of the stream after the batch.
        time: data time in seconds, 0 if the data has none.
        clip: how servers clip the sum of a sync step.
        stops: why all workers stop after a sync step; empty: they do not.
    """

    sequence: int
    step: int
    versions: Sequence[int]
    examples: int
    position: tuple[int, ...] = ()
    time: int = 0
    clip: Clip | None = None
    stops: str = ""


@dataclass(frozen=True)
class TableGradient:
    """The gradient of one row class in one step: keys (K,) distinct, gradients (K, D), the rule's
    values, and the columns that the table's schema declares (trireme.protocol.columns).
    """

    keys: Keys
    gradients: Floats
    values: dict[str, float | int]
    columns: KeyColumns = field(default_factory=dict)


@dataclass(frozen=True)
class DenseGradient:
    """The gradient of the dense parameters in one step, and the values of the param groups."""

    gradients: Mapping[str, Tensor | None]
    groups: list[GroupValues]
