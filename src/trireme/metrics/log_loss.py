"""The mean negative log-likelihood of labels 0 and 1, absolute and relative to a constant."""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from trireme.metrics.binary import Examples
from trireme.metrics.sums import SumMetric

# A probability of exactly 0 or 1 would make the loss infinite; this is float32's distance below 1.
_SMALLEST = 2.0**-24


class LogLoss(SumMetric):
    """Weighted mean of -log(probability given to the label), in nats.

    With from_logits the value equals the loss of the training. Probabilities are clipped to
    [2^-24, 1 - 2^-24]; treated as logits they give a wrong value without an error. Args as of
    `PredictedCTR`.
    """

    NAME = "log_loss"
    SUMS: ClassVar[tuple[str, ...]] = ("loss", "weight")

    def _terms(self, examples: Examples) -> Sequence[NDArray[Any]]:
        x, y = examples.scores.astype(np.float64), examples.labels
        if self._from_logits:  # -log sigmoid(x) without overflow
            losses = np.maximum(x, 0) - x * y + np.log1p(np.exp(-np.abs(x)))
        else:
            p = np.clip(x, _SMALLEST, 1 - _SMALLEST)
            losses = -np.where(y == 1, np.log(p), np.log1p(-p))
        return losses, np.ones_like(x)

    def compute(self) -> float:
        """The mean loss; NaN until there is an example with weight."""
        return self._ratio("loss", "weight")


class NormalizedEntropy(LogLoss):
    """The log-loss divided by that of the best constant, the click rate of the same examples.

    Below 1 is better than the constant. Args as of `LogLoss`.
    Source: He et al., Practical Lessons from Predicting Clicks on Ads at Facebook, 2014, section 3.
    """

    NAME = "normalized_entropy"
    SUMS = ("loss", "weight", "clicks")

    def _terms(self, examples: Examples) -> Sequence[NDArray[Any]]:
        return *super()._terms(examples), examples.labels

    def compute(self) -> float:
        """NaN until there are both labels."""
        rate = self._ratio("clicks", "weight")
        if not 0 < rate < 1:
            return float("nan")
        entropy = -(rate * math.log(rate) + (1 - rate) * math.log1p(-rate))
        return super().compute() / entropy
