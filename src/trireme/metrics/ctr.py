"""Errors of predictions, click rates, and Paddle's bundle of them."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trireme.metrics.binary import Examples
from trireme.metrics.sums import SumMetric


class MAE(SumMetric):
    """Weighted mean of |prediction - label|.

    Args as of `PredictedCTR`; with from_logits None predictions and labels are any finite numbers,
    as in regression.
    """

    NAME = "mae"
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

    NAME = "rmse"
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
