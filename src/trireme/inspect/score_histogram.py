"""The distribution of a table's scores at the data time of its newest push."""

import itertools

import numpy as np

from trireme.inspect.saved_model import RowBatch
from trireme.policy import ScorePolicy
from trireme.protocol.row_selection import faded
from trireme.protocol.wire import Array

EDGES = tuple(step * 10.0**power for power in range(-2, 7) for step in (1, 2, 5))


class ScoreHistogram:
    """Counts of rows by score: below 0, up to the first of EDGES, and so on."""

    def __init__(self, policy: ScorePolicy, time: int) -> None:
        self.policy, self.time = policy, time
        self._edges = np.array([0.0, *EDGES])
        self.counts = np.zeros(len(self._edges) + 1, np.int64)
        self.num_below_threshold = 0

    def add(self, rows: RowBatch) -> Array:
        """Count these rows; returns their scores (n,)."""
        show, click = faded(self.policy, rows.statistics, self.time, False)
        scores = self.policy.score(show, click)
        self.counts += np.bincount(
            np.searchsorted(self._edges, scores, side="right"), minlength=len(self.counts)
        )
        self.num_below_threshold += int((scores < self.policy.delete_threshold).sum())
        return np.asarray(scores)

    def bars(self) -> tuple[list[str], list[int]]:
        """Labels and counts, without empty bars at both ends."""
        ends = [f"{edge:g}" for edge in self._edges]
        labels = [
            f"below {ends[0]}",
            *(f"{low} to {high}" for low, high in itertools.pairwise(ends)),
            f"{ends[-1]} and more",
        ]
        used = np.flatnonzero(self.counts)
        if not len(used):
            return [], []
        shown = slice(int(used[0]), int(used[-1]) + 1)
        return labels[shown], self.counts[shown].tolist()
