"""Metrics, whose states merge across workers."""

from trireme.metrics.auc import AUC, PRAUC
from trireme.metrics.ctr import COPC, MAE, RMSE, ActualCTR, CTRMetricBundle, PredictedCTR
from trireme.metrics.gauc import GAUC
from trireme.metrics.histogram import BucketError
from trireme.metrics.log_loss import LogLoss, NormalizedEntropy
from trireme.metrics.metric import Metric
from trireme.metrics.threshold import Accuracy, PrecisionRecall

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
]
