"""Metrics, whose states merge across workers."""

from trireme.errors import BadRequest
from trireme.metrics.gauc import GAUC
from trireme.metrics.histogram import AUC, PRAUC, BucketError
from trireme.metrics.metric import Metric
from trireme.metrics.sums import (
    COPC,
    MAE,
    RMSE,
    Accuracy,
    ActualCTR,
    CTRMetricBundle,
    LogLoss,
    NormalizedEntropy,
    PrecisionRecall,
    PredictedCTR,
)
from trireme.metrics.top_k import TopK

__all__ = [
    "AUC",
    "Accuracy",
    "ActualCTR",
    "BucketError",
    "COPC",
    "CTRMetricBundle",
    "GAUC",
    "LogLoss",
    "MAE",
    "Metric",
    "NormalizedEntropy",
    "PRAUC",
    "PrecisionRecall",
    "PredictedCTR",
    "RMSE",
    "TopK",
    "metric_of",
]


def metric_of(metric: Metric | str) -> Metric:
    """The metric of a name, such as "auc", with its defaults; a metric is returned as it is. Raises
    BadRequest: an unknown name.
    """
    if not isinstance(metric, str):
        return metric
    classes = [value for value in globals().values() if hasattr(value, "NAME")]
    made = {cls.NAME: cls for cls in classes}
    if metric not in made:
        raise BadRequest(
            f"metrics: expected one of {', '.join(sorted(made))}, or one with options such as"
            f" tr.metrics.AUC(label='click'), found {metric!r}"
        )
    named: Metric = made[metric]()
    return named
