"""What a metric is: a state that examples are added to, and that merges with those of others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from trireme.errors import BadRequest

Values: TypeAlias = Tensor | NDArray[Any]
State: TypeAlias = dict[str, NDArray[Any]]


class Metric(Protocol):
    """A number about scored examples, or several, exact across any number of workers.

    Each worker updates its own; one of them merges the states of the others and computes. Merging
    the states of disjoint sets of examples gives the state of their union.

    Attributes:
        name: under which a trainer shows it.
        output: which of a model's named outputs it scores; None: the only one.
        label: the label column; None: the trainer's.
        columns: keyword of update() -> column of the batch, {"weights": "weight"} say.

    Threads: one at a time.
    """

    name: str
    output: str | None
    label: str | None
    columns: Mapping[str, str]

    def update(self, scores: Values, labels: Values, *args: Any, **columns: Any) -> None:
        """Add examples. On an error nothing is added."""

    def state(self) -> State:
        """A copy of all that was added, as arrays that can be sent."""

    def merge(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Add what another metric with the same options has counted."""

    def compute(self) -> float | dict[str, float]:
        """The value so far, or several by name; NaN where one is not defined yet."""

    def reset(self) -> None:
        """Forget everything."""


def check_state(
    subject: str,
    mine: State,
    other: Mapping[str, NDArray[Any]],
    *,
    fixed: tuple[str, ...],
    is_sized: bool = True,
) -> None:
    """Refuse a state that is not of the same kind.

    Args:
        fixed: names of the entries that are options.
        is_sized: arrays have the sizes of mine; False: any, but all of one length, except options.

    Raises:
        BadRequest: names, dtypes, shapes or options differ.
    """
    if set(other) != set(mine):
        raise BadRequest(
            f"{subject}.merge: expected a state with {sorted(mine)}, found {sorted(other)}"
        )
    length = max((len(np.atleast_1d(other[name])) for name in mine if name not in fixed), default=0)
    for name, array in mine.items():
        found = np.asarray(other[name])
        shape = array.shape if is_sized or name in fixed else (length,)
        if (found.dtype, found.shape) != (array.dtype, shape):
            raise BadRequest(
                f"{subject}.merge: expected {name} as {array.dtype} {shape}, "
                f"found {found.dtype} {found.shape}"
            )
    for name in fixed:
        if not np.array_equal(mine[name], other[name]):
            raise BadRequest(
                f"{subject}.merge: expected {name} {mine[name].tolist()}, "
                f"found {np.asarray(other[name]).tolist()}"
            )
