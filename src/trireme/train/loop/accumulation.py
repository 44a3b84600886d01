"""Gradients of several batches that make one step, as if they were one batch."""

from torch import Tensor

from trireme.train.loop.replica import Replica
from trireme.train.loop.scoring import Scored


class Accumulated:
    """The batches of a replica since its last step, whose gradient is that of the mean over all
    their examples. size: batches of a step.
    """

    def __init__(self, replica: Replica, size: int) -> None:
        self._replica, self._size = replica, size
        self._num_batches = self._num_lookups = self._num_examples = 0
        self._sums: dict[str, Tensor] = {}  # of dense gradients, times their examples
        self.last: Scored | None = None  # None: no batch since the step

    def add(self, scored: Scored) -> bool:
        """Take the gradients of a batch; returns whether a step is due."""
        self.last, num_examples = scored, scored.batch.num_examples
        self._num_batches += 1
        self._num_examples += num_examples
        if self._size > 1:
            lookups = self._replica.pending.entries
            for entry in lookups[self._num_lookups :]:
                if entry.rows.grad is not None:
                    entry.rows.grad.mul_(num_examples)
            self._num_lookups = len(lookups)
            for name, gradient in self._replica.dense.take_gradients().items():
                if gradient is not None:
                    gradient.mul_(num_examples)
                    self._sums[name] = gradient.add_(self._sums.get(name, 0.0))
        return self._num_batches == self._size

    def finish(self) -> int:
        """Leave the gradients to the step; returns of how many examples they are."""
        num_examples = self._num_examples
        if self._size > 1:
            for name, total in self._sums.items():
                self._replica.dense.parameters[name].grad = total.div_(max(1, num_examples))
            for entry in self._replica.pending.entries:
                if entry.rows.grad is not None:
                    entry.rows.grad.div_(max(1, num_examples))
        self._num_batches = self._num_lookups = self._num_examples = 0
        self._sums, self.last = {}, None
        return num_examples
