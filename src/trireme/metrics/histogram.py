"""Metrics computed from histograms of scores: areas under curves, and the bucket error."""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from trireme import _core
from trireme.errors import check_kind, check_values
from trireme.metrics.binary import ScoredMetric
from trireme.metrics.metric import State, Values, check_state

# Paddle's kMaxSpan and kRelativeErrorBound.
BUCKET_SPAN_MAX = 0.01
BUCKET_ERROR_MAX = 0.05


class HistogramMetric(ScoredMetric):
    """Base of metrics over the order of scores, up to ties within a bucket. Args as of `AUC`."""

    SUMMED: ClassVar[tuple[str, ...]] = ("positives", "negatives")

    def __init__(self, *, num_buckets: int = 1 << 18, **options: Any) -> None:
        check_kind(type(self).__name__, "num_buckets", num_buckets, int, "a whole number")
        is_even = num_buckets >= 2 and num_buckets % 2 == 0
        check_values(type(self).__name__, num_buckets=(is_even, ">= 2 and even", num_buckets))
        self._positives: NDArray[np.float64] = np.zeros(num_buckets)
        self._negatives: NDArray[np.float64] = np.zeros(num_buckets)
        super().__init__(**options)

    def update(self, scores: Values, labels: Values, weights: Values | None = None) -> None:
        """Add B examples; see `ScoredMetric`."""
        examples = self._read(scores, labels, weights)
        _core.histogram_add(*examples, bool(self._from_logits), self._positives, self._negatives)

    def state(self) -> State:
        """positives, negatives: (num_buckets,) float64, weight per bucket; from_logits: (1,)."""
        return {
            "positives": self._positives.copy(),
            "negatives": self._negatives.copy(),
            **self._options(),
        }

    def merge(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Add the state of another one. Raises BadRequest if its class or options differ."""
        check_state(type(self).__name__, self.state(), state, fixed=tuple(self._options()))
        self._positives += state["positives"]
        self._negatives += state["negatives"]

    def reset(self) -> None:
        self._positives[:] = 0
        self._negatives[:] = 0


class BucketError(HistogramMetric):
    """Mean of |actual / predicted click rate - 1| over groups of examples with similar predictions.

    Groups are formed in the order of the predictions. A group is complete when
    sqrt((1 - p) / (p * n)) < 0.05 for its mean prediction p and number n (or weight): the noise of
    its click rate is small. A group is left out if its predictions differ by more than 0.01 before.
    The groups' errors are weighted by n.

    Source: Paddle's bucket error, whose buckets are even in p and represented by their lower edge;
    those here are finer (see `AUC`) and represented by their middle. Args as of `AUC`.
    """

    NAME, BETTER = "bucket_error", "min"

    def compute(self) -> float:
        """>= 0; NaN until a group is complete."""
        return _core.bucket_error(
            self._positives,
            self._negatives,
            bool(self._from_logits),
            BUCKET_SPAN_MAX,
            BUCKET_ERROR_MAX,
        )


class AUC(HistogramMetric):
    """Fraction of pairs (positive, negative) with scores in the right order; ties count half.

    Scores are counted in buckets, even in the exponent of the logit (or of p and of 1 - p). So
    scores tie if they are closer than 128 / num_buckets of a power of two: with the default, if
    they differ by less than about one part in 3000; and so do logits beyond 2^32, or nearer to 0
    than 2^-32. Merging is exact in any order if weights are whole numbers (or absent), else to the
    rounding of float64.

    Args:
        from_logits: see `ScoredMetric`. The area is the same for both; the buckets and the check of
            the values differ.
        num_buckets: an even number >= 2. The state takes 16 bytes for each.
        name, output, label, weights: see `ScoredMetric`.
    """

    NAME, BETTER = "auc", "max"

    def compute(self) -> float:
        """The area, 0..1; NaN until there are both positives and negatives."""
        return _core.auc_area(self._positives, self._negatives)


class PRAUC(HistogramMetric):
    """Average precision: the mean, over the positives, of the precision at each one's score.

    It is the sum of precision * (rise of recall) over the scores in descending order, without
    interpolation; equal scores, and those of one bucket, are one step. Args as of `AUC`.
    """

    NAME, BETTER = "pr_auc", "max"

    def compute(self) -> float:
        """0..1; NaN until there is a positive."""
        hits = np.cumsum(self._positives[::-1])
        if hits[-1] == 0:
            return float("nan")
        above = hits + np.cumsum(self._negatives[::-1])
        rises = np.flatnonzero(self._positives[::-1])
        risen = self._positives[::-1][rises]
        return float((hits[rises] / above[rises] * risen).sum() / hits[-1])
