"""Metrics computed from histograms of scores, one of positives and one of negatives."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trireme import _core
from trireme.errors import BadRequest
from trireme.metrics.binary import ScoredMetric
from trireme.metrics.metric import State, Values, check_state

# Paddle's kMaxSpan and kRelativeErrorBound.
BUCKET_SPAN_MAX = 0.01
BUCKET_ERROR_MAX = 0.05


class HistogramMetric(ScoredMetric):
    """Base of metrics over the order of scores, up to ties within a bucket. Args as of `AUC`."""

    def __init__(self, *, num_buckets: int = 1 << 18, **options: Any) -> None:
        if num_buckets < 2 or num_buckets % 2:
            raise BadRequest(
                f"{type(self).__name__}: expected an even num_buckets >= 2, found {num_buckets}"
            )
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

    NAME = "bucket_error"

    def compute(self) -> float:
        """>= 0; NaN until a group is complete."""
        return _core.bucket_error(
            self._positives,
            self._negatives,
            bool(self._from_logits),
            BUCKET_SPAN_MAX,
            BUCKET_ERROR_MAX,
        )
