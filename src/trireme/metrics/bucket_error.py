"""Bucket error: the difference of click rates and predictions in groups of equal predictions."""

from trireme import _core
from trireme.metrics.histogram import HistogramMetric

# Paddle's kMaxSpan and kRelativeErrorBound.
SPAN_MAX = 0.01
RELATIVE_ERROR_MAX = 0.05


class BucketError(HistogramMetric):
    """Mean of |actual / predicted click rate - 1| over groups of examples with similar predictions.

    Groups are formed in the order of the predictions. A group is complete when
    sqrt((1 - p) / (p * n)) < 0.05 for its mean prediction p and number n (or weight): the noise of
    its click rate is small. A group is left out if its predictions differ by more than 0.01 before.
    The groups' errors are weighted by n.

    Source: Paddle's bucket error, whose buckets are even in p and represented by their lower edge;
    those here are finer (see `AUC`) and represented by their middle. Args as of `AUC`.
    """

    NAME = "bucket_error"

    def compute(self) -> float:
        """>= 0; NaN until a group is complete."""
        return _core.bucket_error(
            self._positives,
            self._negatives,
            bool(self._from_logits),
            SPAN_MAX,
            RELATIVE_ERROR_MAX,
        )
