"""Metrics, whose states merge across workers."""

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
]
