"""The protocol of metrics: a state to which examples are added, and which can be merged."""

from abc import abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from trireme.errors import BadRequest

Values: TypeAlias = Tensor | NDArray[Any]
State: TypeAlias = dict[str, NDArray[Any]]
Better: TypeAlias = Literal["min", "max"]


class Metric(Protocol):
    """One or several numbers computed from scored examples, exact for any number of workers.

    Each worker updates its own metric; one worker merges the states of all and computes.
    Merging the states of disjoint sets of examples gives the state of their union. A metric of
    one's own derives from this class, and needs a name and the five methods (docs/callbacks.md).

    A metric may have an attribute SUMMED: names of entries of its state that merge() adds element
    by element; the others are options, equal on all workers. Servers then add the states, and
    worker 0 merges their sum. Without it, worker 0 receives the states of all workers.

    Attributes:
        name: shown by a trainer.
        output: the named output of the model that it scores; None: the only one.
        label: the label column; None: the trainer's.
        columns: keyword of update() -> column of the batch, {"weights": "weight"} say.

    Threads: one at a time.
    """

    name: str
    output: str | None = None
    label: str | None = None
    columns: Mapping[str, str] = MappingProxyType({})

    @abstractmethod
    def update(self, scores: Values, labels: Values, *args: Any, **columns: Any) -> None:
        """Add examples. On an error nothing is added."""

    @abstractmethod
    def state(self) -> State:
        """A copy of the state, as arrays that can be sent."""

    @abstractmethod
    def merge(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Add the state of another metric with the same options."""

    @abstractmethod
    def compute(self) -> float | dict[str, float]:
        """The current value, or several by name; NaN while not defined."""

    @abstractmethod
    def reset(self) -> None:
        """Remove all examples."""


def check_state(
    subject: str,
    mine: State,
    other: Mapping[str, NDArray[Any]],
    *,
    fixed: tuple[str, ...],
    is_sized: bool = True,
) -> None:
    """Check that another state is of the same kind.

    Args:
        fixed: names of the entries that are options.
        is_sized: arrays have the sizes of mine; False: all arrays but options have one length.

    Raises:
        BadRequest: names, dtypes, shapes or options differ.
    """
    if set(other) != set(mine):
        raise BadRequest(
            f"{subject}.merge: expected a state with {sorted(mine)}, found {sorted(other)}"
        )
    length = max((len(np.atleast_1d(other[name])) for name in mine if name not in fixed), default=0)
    for name, array in mine.items():
        received = np.asarray(other[name])
        shape = array.shape if is_sized or name in fixed else (length,)
        if (received.dtype, received.shape) != (array.dtype, shape):
            raise BadRequest(
                f"{subject}.merge: expected {name} as {array.dtype} {shape}, "
                f"found {received.dtype} {received.shape}"
            )
    for name in fixed:
        if not np.array_equal(mine[name], other[name]):
            raise BadRequest(
                f"{subject}.merge: expected {name} {mine[name].tolist()}, "
                f"found {np.asarray(other[name]).tolist()}"
            )
