"""The state of Fleet's rules: its order in Fleet's text and in our rows.

Head and tail of a row each have a rule's state. In text, for a part with n weights:

    SparseNaiveSGDRule       nothing
    SparseAdaGradSGDRule     g2sum; likewise SparseAdaGradV2SGDRule
    StdAdaGradSGDRule        g2sum[n]
    SparseAdamSGDRule        m[n] v[n] beta1^(t+1) beta2^(t+1), after t updates
    SparseSharedAdamSGDRule  m v beta1^(t+1) beta2^(t+1)

Ours counts updates instead of keeping powers (core/optim/fleet.cc). Source: files that
paddlepaddle 2.6.2 writes.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trireme.errors import BadRequest
from trireme.protocol.wire import Array
from trireme.table import TableSchema

Betas = tuple[float, float]

WITHOUT_POWERS = ("fleet_sgd", "fleet_adagrad", "fleet_adagrad_v2")
WITH_POWERS = ("fleet_adam", "fleet_shared_adam")


@dataclass(frozen=True)
class PartState:
    """The state of one part of a row, head or tail, as numbers in text and as floats of our state.

    unsigned: from this number on (sums of squares, powers) none may be negative.
    copies: (position in the part's numbers, position in our state, how many).
    powers: position of the two powers in the part's numbers; None: the rule has none.
    count: position of the number of updates in our state; None: the head's counts for both.
    """

    num_numbers: int
    unsigned: int
    copies: tuple[tuple[int, int, int], ...]
    powers: int | None
    count: int | None

    def read(self, numbers: Array, state: Array, betas: Betas) -> None:
        """Copy numbers (n, num_numbers) into our state (n, W). A rule without powers has made one
        update.
        """
        for source, target, size in self.copies:
            state[:, target : target + size] = numbers[:, source : source + size]
        if self.count is not None:
            counts = np.ones(len(state), np.uint32)
            if self.powers is not None:
                counts = _counts(numbers[:, self.powers : self.powers + 2], betas)
            state[:, self.count] = counts.view(np.float32)

    def write(self, state: Array, numbers: Array, betas: Betas) -> None:
        """The inverse of `read`."""
        for source, target, size in self.copies:
            numbers[:, source : source + size] = state[:, target : target + size]
        if self.powers is not None and self.count is not None:
            counts = np.ascontiguousarray(state[:, self.count]).view(np.uint32).astype(np.float64)
            for i, beta in enumerate(betas):
                numbers[:, self.powers + i] = np.power(float(beta), counts + 1)


def head_and_tail(schema: TableSchema) -> tuple[PartState, PartState]:
    """The states of both parts of a row. Raises BadRequest for a rule that Fleet does not have."""
    name, dim = str(schema.rule["name"]), schema.wide_dim
    tail = dim - 1
    if name == "fleet_sgd":
        return PartState(0, 0, (), None, 0), PartState(0, 0, (), None, None)
    if name == "fleet_adagrad_v2" or (name == "fleet_adagrad" and schema.rule["shared"]):
        head = PartState(1, 0, ((0, 0, 1),), None, 2)
        return head, PartState(1, 0, ((0, 1, 1),), None, None)
    if name == "fleet_adagrad":
        head = PartState(1, 0, ((0, 0, 1),), None, dim)
        return head, PartState(tail, 0, ((0, 1, tail),), None, None)
    if name == "fleet_adam":
        head = PartState(4, 1, ((0, 0, 1), (1, dim, 1)), 2, 2 * dim)
        copies = ((0, 1, tail), (tail, dim + 1, tail))
        return head, PartState(2 * tail + 2, tail, copies, 2 * tail, 2 * dim + 1)
    if name == "fleet_shared_adam":
        return PartState(4, 1, ((0, 0, 2),), 2, 4), PartState(4, 1, ((0, 2, 2),), 2, 5)
    raise BadRequest(
        f"table {schema.name!r}: expected one of Fleet's rules,"
        f" {', '.join((*WITHOUT_POWERS, *WITH_POWERS))}, found {name!r}"
    )


def _counts(powers: Array, betas: Betas) -> npt.NDArray[np.uint32]:
    """The number of updates that gave these powers, from the one that decays slower. Once that is
    0, the bias correction has no effect any more.
    """
    slower = max(range(2), key=lambda i: betas[i])
    beta = betas[slower]
    if beta == 0:
        return np.ones(len(powers), np.uint32)
    least = float(np.finfo(np.float32).tiny)
    logs = np.log(np.clip(powers[:, slower].astype(np.float64), least, 1.0)) / math.log(beta)
    counts: npt.NDArray[np.uint32] = np.maximum(np.rint(logs) - 1, 0).astype(np.uint32)
    return counts
