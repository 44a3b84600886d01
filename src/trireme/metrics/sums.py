"""Metrics that are formulas over weighted sums, which do not depend on the order of adding."""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from trireme import _core
from trireme.errors import check_numbers
from trireme.metrics.binary import Examples, ScoredMetric
from trireme.metrics.metric import State, Values, check_state


class SumMetric(ScoredMetric):
    """Base of metrics over weighted sums of one number per example.

    The numbers are computed in float64 and summed without rounding (core/metrics/exact_sum.h). So
    the state has the same bits however the examples are split and merged.
    """

    SUMS: ClassVar[tuple[str, ...]]
    """Names of the sums."""
    SUMMED: ClassVar[tuple[str, ...]] = ("sums",)

    @abstractmethod
    def _terms(self, examples: Examples) -> Sequence[NDArray[Any]]:
        """The term of each example in each of SUMS, without its weight: (B,) each."""

    def update(self, scores: Values, labels: Values, weights: Values | None = None) -> None:
        """Add B examples; see `ScoredMetric`."""
        examples = self._read(scores, labels, weights)
        terms = [np.asarray(term, np.float64) for term in self._terms(examples)]
        if examples.weights is not None:
            w = examples.weights.astype(np.float64)
            terms = [term * w for term in terms]
        for limbs, term in zip(self._limbs, terms, strict=True):
            _core.exact_add(term, limbs)

    def _probabilities(self, examples: Examples) -> NDArray[np.float64]:
        """(B,); logits go through a sigmoid that does not overflow."""
        x = examples.scores.astype(np.float64)
        if not self._from_logits:
            return x
        small = np.exp(-np.abs(x))
        p: NDArray[np.float64] = np.where(x >= 0, 1, small) / (1 + small)
        return p

    def sums(self) -> dict[str, float]:
        """The sums by name, each rounded once."""
        return {
            # Python divides integers with one rounding.
            name: sum(digit << (32 * i) for i, digit in enumerate(limbs)) / (1 << 1074)
            for name, limbs in zip(self.SUMS, self._limbs.tolist(), strict=True)
        }

    def _ratio(self, above: str, below: str) -> float:
        """The ratio of two sums; NaN if the second is 0."""
        sums = self.sums()
        return sums[above] / sums[below] if sums[below] else float("nan")

    def state(self) -> State:
        """sums: (number of SUMS, EXACT_LIMBS) int64; the options: (1,) each."""
        return {"sums": self._limbs.copy(), **self._options()}

    def merge(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Add the state of another one. Raises BadRequest if its class or options differ."""
        check_state(type(self).__name__, self.state(), state, fixed=tuple(self._options()))
        self._limbs += state["sums"]
        for limbs in self._limbs:
            _core.exact_add(np.empty(0), limbs)  # carries

    def reset(self) -> None:
        self._limbs = np.zeros((len(self.SUMS), _core.EXACT_LIMBS), np.int64)


class MAE(SumMetric):
    """Weighted mean of |prediction - label|.

    Args as of `PredictedCTR`; with from_logits None predictions and labels are any finite numbers,
    as in regression.
    """

    NAME, BETTER = "mae", "min"
    TAKES_ANY_NUMBERS = True
    SUMS = ("error", "weight")

    def _terms(self, examples: Examples) -> Sequence[NDArray[Any]]:
        p = self._probabilities(examples)
        return np.abs(p - examples.labels), np.ones_like(p)

    def compute(self) -> float:
        """NaN until there is an example with weight."""
        return self._ratio("error", "weight")


class RMSE(SumMetric):
    """Square root of the weighted mean of (prediction - label)^2. Args as of `MAE`."""

    NAME, BETTER = "rmse", "min"
    TAKES_ANY_NUMBERS = True
    SUMS = ("squared_error", "weight")

    def _terms(self, examples: Examples) -> Sequence[NDArray[Any]]:
        p = self._probabilities(examples)
        return (p - examples.labels) ** 2, np.ones_like(p)

    def compute(self) -> float:
        """NaN until there is an example with weight."""
        return math.sqrt(self._ratio("squared_error", "weight"))


class _Rates(SumMetric):
    """Base of metrics computed from clicks, expected clicks and weight."""

    SUMS = ("clicks", "expected_clicks", "weight")

    def _terms(self, examples: Examples) -> Sequence[NDArray[Any]]:
        p = self._probabilities(examples)
        return examples.labels, p, np.ones_like(p)


class PredictedCTR(_Rates):
    """Weighted mean of the predicted probabilities. Args as of `AUC`, without num_buckets."""

    NAME = "predicted_ctr"

    def compute(self) -> float:
        """0..1; NaN until there is an example with weight."""
        return self._ratio("expected_clicks", "weight")


class ActualCTR(_Rates):
    """Weighted fraction of the examples whose label is 1. Args as of `PredictedCTR`."""

    NAME = "actual_ctr"

    def compute(self) -> float:
        """0..1; NaN until there is an example with weight."""
        return self._ratio("clicks", "weight")


class COPC(_Rates):
    """Clicks over predicted clicks: actual divided by predicted click rate; 1 is calibrated.

    Args as of `PredictedCTR`.
    """

    NAME = "copc"

    def compute(self) -> float:
        """NaN until a click is expected."""
        return self._ratio("clicks", "expected_clicks")


class CTRMetricBundle(SumMetric):
    """The six sums of Paddle's ctr_metric_bundle, and the metrics computed from them.

    As in Paddle, q is the sum of sigmoid(p) of the probability p: one sigmoid too many, kept so
    that figures can be compared. A weight applies to all six sums here; in Paddle, ins_tag_weight
    applies to two of them.

    Args as of `PredictedCTR`; Paddle takes probabilities.
    """

    NAME = "ctr_metric_bundle"
    SUMS = ("sqrerr", "abserr", "prob", "q", "pos_num", "ins_num")

    def _terms(self, examples: Examples) -> Sequence[NDArray[Any]]:
        p = self._probabilities(examples)
        q = 1 / (1 + np.exp(-p))
        error = p - examples.labels
        return error**2, np.abs(error), p, q, examples.labels, np.ones_like(p)

    def compute(self) -> dict[str, float]:
        """mae, rmse, predicted_ctr, actual_ctr, copc, mean_q, ins_num; NaN where not defined."""
        return {
            "mae": self._ratio("abserr", "ins_num"),
            "rmse": math.sqrt(self._ratio("sqrerr", "ins_num")),
            "predicted_ctr": self._ratio("prob", "ins_num"),
            "actual_ctr": self._ratio("pos_num", "ins_num"),
            "copc": self._ratio("pos_num", "prob"),
            "mean_q": self._ratio("q", "ins_num"),
            "ins_num": self.sums()["ins_num"],
        }


# A probability of exactly 0 or 1 would make the loss infinite; this is float32's distance below 1.
_SMALLEST = 2.0**-24


class LogLoss(SumMetric):
    """Weighted mean of -log(probability given to the label), in nats.

    With from_logits the value equals the loss of the training. Probabilities are clipped to
    [2^-24, 1 - 2^-24]; treated as logits they give a wrong value without an error. Args as of
    `PredictedCTR`.
    """

    NAME, BETTER = "log_loss", "min"
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

    NAME, BETTER = "normalized_entropy", "min"
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


class _ThresholdMetric(SumMetric):
    """Base of metrics that count an example as predicted if its probability >= threshold.

    Args as of `PrecisionRecall`. Raises BadRequest: a threshold out of range.
    """

    def __init__(self, threshold: float = 0.5, **options: Any) -> None:
        check_numbers(type(self).__name__, "in [0, 1]", threshold=threshold)
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

    NAME, BETTER = "accuracy", "max"
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
