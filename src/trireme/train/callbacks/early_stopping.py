"""Ends a fit whose figures no longer improve."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from trireme.errors import check_values
from trireme.metrics.metric import Better
from trireme.train.callbacks.callback import Callback, FitState
from trireme.train.callbacks.monitor import Monitor

log = logging.getLogger("trireme.train")


class EarlyStopping(Callback):
    """Ends the fit, on all workers, when a figure has not improved for `patience` epochs in a row.

    Each fit begins with full patience; one that resumes continues with that of the checkpoint. The
    model stays that of the last epoch: add a BestCheckpoint and load it for the best.

    Args:
        monitor: "loss" or a metric: of the fit's `valid` data, or of training if it has none.
        patience: epochs.
        mode: "min" if lower is better, "max" if higher is; may be left out for "loss" and the
            metrics of trireme that are one number.
        min_delta: an improvement is more than this.

    Attributes:
        best: the best figure of the fit; None: before the first epoch.
        best_epoch: of that figure, from 1; 0: before the first.

    Raises:
        BadRequest: an argument out of range; after the first epoch, an unknown figure.
    """

    on_all_workers = True

    def __init__(
        self, monitor: str, *, patience: int = 3, mode: Better | None = None, min_delta: float = 0.0
    ) -> None:
        check_values("EarlyStopping", patience=(patience >= 1, ">= 1", patience))
        self.monitor = Monitor.of("EarlyStopping", monitor, mode, min_delta)
        self.patience = patience
        self.best: float | None = None
        self.best_epoch = self._waited = 0

    def begin_fit(self, fit: FitState) -> None:
        self.best, self.best_epoch, self._waited = None, 0, 0

    def resume(self, fit: FitState, state: Mapping[str, Any]) -> None:
        self.best, self.best_epoch = state["best"], int(state["best_epoch"])
        self._waited = int(state["waited"])
        self._stop_if_over(fit)

    def epoch(self, fit: FitState) -> None:
        value = self.monitor.value("EarlyStopping", fit)
        if self.monitor.is_better(value, self.best):
            self.best, self.best_epoch, self._waited = value, fit.epoch, 0
            return
        self._waited += 1
        self._stop_if_over(fit)

    def _stop_if_over(self, fit: FitState) -> None:
        if self._waited < self.patience:
            return
        fit.stop()
        if fit.trainer.cluster.worker == 0:
            log.info(
                "EarlyStopping: %s has not improved on %s of epoch %d for %d epochs: training ends",
                *(self.monitor.figure, self.best, self.best_epoch, self._waited),
            )

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "best_epoch": self.best_epoch, "waited": self._waited}
