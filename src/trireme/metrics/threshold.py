"""Metrics of decisions at a threshold of the probability."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trireme.errors import BadRequest
from trireme.metrics.binary import Examples
from trireme.metrics.metric import State
from trireme.metrics.sums import SumMetric


class _ThresholdMetric(SumMetric):
    """Base of metrics that count an example as predicted if its probability >= threshold.

    Args as of `PrecisionRecall`. Raises BadRequest: a threshold out of range.
    """

    def __init__(self, threshold: float = 0.5, **options: Any) -> None:
        if not 0 <= threshold <= 1:
            raise BadRequest(
                f"{type(self).__name__}: expected a threshold in [0, 1], found {threshold}"
            )
        self._threshold = float(threshold)
        super().__init__(**options)

    def _is_predicted(self, examples: Examples) -> NDArray[np.bool_]:
        return self._probabilities(examples) >= self._threshold

    def _options(self) -> State:
        return {**super()._options(), "threshold": np.array([self._threshold])}


class Accuracy(_ThresholdMetric):
    """Weighted fraction of the examples that are predicted if and only if their label is 1.

    Args as of `PrecisionRecall`.
    """

    NAME = "accuracy"
    SUMS = ("right", "weight")

    def _terms(self, examples: Examples) -> Sequence[NDArray[Any]]:
        right = self._is_predicted(examples) == (examples.labels == 1)
        return right, np.ones(len(right))

    def compute(self) -> float:
        """0..1; NaN until there is an example with weight."""
        return self._ratio("right", "weight")


class PrecisionRecall(_ThresholdMetric):
    """Precision and recall: an example is predicted if its probability is at least `threshold`.

    Args:
        threshold: in [0, 1].
        from_logits, name, output, label, weights: as of `AUC`.
    """

    NAME = "at_threshold"
    SUMS = ("hits", "predicted", "positives")

    def _terms(self, examples: Examples) -> Sequence[NDArray[Any]]:
        predicted = self._is_predicted(examples)
        return predicted & (examples.labels == 1), predicted, examples.labels

    def compute(self) -> dict[str, float]:
        """precision: fraction of the predicted with label 1; NaN until one is predicted. recall:
        fraction of label 1 that is predicted; NaN until there is a label 1.
        """
        return {
            "precision": self._ratio("hits", "predicted"),
            "recall": self._ratio("hits", "positives"),
        }
