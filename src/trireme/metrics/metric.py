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
    """A number about scored examples, exact across any number of workers.

    Each worker updates its own; one of them merges the states of the others and computes. Merging
    the states of disjoint sets of examples gives the state of their union.

    Threads: one at a time.
    """

    name: str

    def update(self, scores: Values, labels: Values, weights: Values | None = None) -> None:
        """Add examples. On an error nothing is added."""

    def state(self) -> State:
        """A copy of all that was added, as arrays that can be sent."""

    def merge(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Add what another metric with the same options has counted."""

    def compute(self) -> float:
        """The value so far; NaN where it is not defined yet."""

    def reset(self) -> None:
        """Forget everything."""


def check_state(
    subject: str, mine: State, other: Mapping[str, NDArray[Any]], *, fixed: str
) -> None:
    """Refuse a state that is not of the same kind: `fixed` names the entry of the options."""
    if set(other) != set(mine):
        raise BadRequest(
            f"{subject}.merge: expected a state with {sorted(mine)}, found {sorted(other)}"
        )
    for name, array in mine.items():
        found = np.asarray(other[name])
        if (found.dtype, found.shape) != (array.dtype, array.shape):
            raise BadRequest(
                f"{subject}.merge: expected {name} as {array.dtype} {array.shape}, "
                f"found {found.dtype} {found.shape}"
            )
    if not np.array_equal(mine[fixed], other[fixed]):
        raise BadRequest(
            f"{subject}.merge: expected {fixed} {mine[fixed].tolist()}, "
            f"found {np.asarray(other[fixed]).tolist()}"
        )
