"""The areas under the ROC curve and under the precision-recall curve."""

import numpy as np

from trireme import _core
from trireme.metrics.histogram import HistogramMetric


class AUC(HistogramMetric):
    """Fraction of pairs (positive, negative) with scores in the right order; ties count half.

    Scores are counted in buckets, even in the exponent of the logit (or of p and of 1 - p). So
    scores tie if they are closer than 64 / num_buckets of a power of two: with the default, if they
    differ by less than about one part in 6000. Merging is exact in any order if weights are whole
    numbers (or absent), else to the rounding of float64.

    Args:
        from_logits: see `ScoredMetric`. The area is the same for both; the buckets and the check of
            the values differ.
        num_buckets: an even number >= 2. The state takes 16 bytes for each.
        name, output, label, weights: see `ScoredMetric`.
    """

    NAME = "auc"

    def compute(self) -> float:
        """The area, 0..1; NaN until there are both positives and negatives."""
        return _core.auc_area(self._positives, self._negatives)


class PRAUC(HistogramMetric):
    """Average precision: the mean, over the positives, of the precision at each one's score.

    It is the sum of precision * (rise of recall) over the scores in descending order, without
    interpolation; equal scores, and those of one bucket, are one step. Args as of `AUC`.
    """

    NAME = "pr_auc"

    def compute(self) -> float:
        """0..1; NaN until there is a positive."""
        hits = np.cumsum(self._positives[::-1])
        if hits[-1] == 0:
            return float("nan")
        above = hits + np.cumsum(self._negatives[::-1])
        rises = np.flatnonzero(self._positives[::-1])
        risen = self._positives[::-1][rises]
        return float((hits[rises] / above[rises] * risen).sum() / hits[-1])
