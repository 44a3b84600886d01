"""Metrics as states that merge across workers."""

from trireme.metrics.auc import AUC
from trireme.metrics.log_loss import LogLoss
from trireme.metrics.metric import Metric

__all__ = ["AUC", "LogLoss", "Metric"]
