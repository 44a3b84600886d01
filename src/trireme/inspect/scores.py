"""How the scores of a table are spread, as they are at the data time of its newest push."""

from __future__ import annotations

import itertools

import numpy as np

from trireme.inspect.source import Rows
from trireme.policy import ScorePolicy
from trireme.protocol.row_selection import faded
from trireme.protocol.wire import Array

EDGES = tuple(step * 10.0**power for power in range(-2, 7) for step in (1, 2, 5))


class Scores:
    """Counts of rows by score: below 0, up to the first of EDGES, and so on."""

    def __init__(self, policy: ScorePolicy, time: int) -> None:
        self.policy, self.time = policy, time
        self._edges = np.array([0.0, *EDGES])
        self.counts = np.zeros(len(self._edges) + 1, np.int64)
        self.num_below_threshold = 0

    def add(self, rows: Rows) -> Array:
        """Count these rows; returns their scores (n,)."""
        show, click = faded(self.policy, rows.statistics, self.time, False)
        scores = self.policy.score(show, click)
        self.counts += np.bincount(
            np.searchsorted(self._edges, scores, side="right"), minlength=len(self.counts)
        )
        self.num_below_threshold += int((scores < self.policy.delete_threshold).sum())
        return np.asarray(scores)

    def bars(self) -> tuple[list[str], list[int]]:
        """Labels and counts, without the empty ones at both ends."""
        ends = [f"{edge:g}" for edge in self._edges]
        labels = [
            f"below {ends[0]}",
            *(f"{low} to {high}" for low, high in itertools.pairwise(ends)),
            f"{ends[-1]} and more",
        ]
        there = np.flatnonzero(self.counts)
        if not len(there):
            return [], []
        part = slice(int(there[0]), int(there[-1]) + 1)
        return labels[part], self.counts[part].tolist()
