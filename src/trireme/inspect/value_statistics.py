"""Statistics of many numbers, and the distribution of scores, in one pass and constant memory."""

import itertools
import math

import numpy as np

from trireme.inspect.saved_model import RowBatch
from trireme.policy import ScorePolicy
from trireme.protocol.wire import Array
from trireme.rows.row_statistics import faded, scores

QUANTILES = (0.01, 0.25, 0.5, 0.75, 0.99)


class ValueStatistics:
    """Count, mean, standard deviation, extremes and quantiles of finite numbers; counts of the
    others.

    Quantiles come from counts of the upper 16 bits of each float32, so they are too near to 0, by
    at most 1 part in 128.
    """

    def __init__(self) -> None:
        self.count = self.num_nan = self.num_infinite = 0
        self.lowest, self.highest = math.inf, -math.inf
        self._mean = self._squares = 0.0  # of deviations from the mean
        self._bins = np.zeros(1 << 16, np.int64)

    def add(self, values: Array) -> None:
        """values: any shape; converted to float32."""
        flat = np.ascontiguousarray(values, np.float32).reshape(-1)
        is_finite = np.isfinite(flat)
        if not is_finite.all():
            num_nan = int(np.isnan(flat).sum())
            self.num_nan += num_nan
            self.num_infinite += int((~is_finite).sum()) - num_nan
            flat = flat[is_finite]
        if not flat.size:
            return
        self.lowest = min(self.lowest, float(flat.min()))
        self.highest = max(self.highest, float(flat.max()))
        mean = float(flat.mean(dtype=np.float64))
        squares = float(np.square(flat - np.float64(mean)).sum())
        # Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm", 1979.
        total, step = self.count + flat.size, mean - self._mean
        self._squares += squares + step * step * self.count * flat.size / total
        self._mean += step * flat.size / total
        self.count = total
        self._bins += np.bincount(flat.view(np.uint32) >> 16, minlength=1 << 16)

    @property
    def is_used(self) -> bool:
        return self.count + self.num_nan + self.num_infinite > 0

    @property
    def mean(self) -> float:
        return self._mean if self.count else math.nan

    @property
    def std(self) -> float:
        """Of the population (divided by n)."""
        return math.sqrt(self._squares / self.count) if self.count else math.nan

    def quantiles(self) -> list[float]:
        """The values at QUANTILES; NaN without numbers."""
        if not self.count:
            return [math.nan] * len(QUANTILES)
        # Bins in the order of their values: negative ones by falling magnitude.
        order = np.concatenate([np.arange(0xFFFF, 0x7FFF, -1), np.arange(0x8000)])
        upto = np.cumsum(self._bins[order])
        ranks = [min(math.floor(q * self.count), self.count - 1) for q in QUANTILES]
        bins = order[np.searchsorted(upto, ranks, side="right")].astype(np.uint32)
        values = (bins << 16).view(np.float32).tolist()
        return [min(max(value, self.lowest), self.highest) for value in values]


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
        shows, clicks = faded(self.policy, rows.statistics, self.time, False)
        scores_N = scores(self.policy, shows, clicks)
        self.counts += np.bincount(
            np.searchsorted(self._edges, scores_N, side="right"), minlength=len(self.counts)
        )
        self.num_below_threshold += int((scores_N < self.policy.delete_threshold).sum())
        return scores_N

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
