"""One figure of each epoch, and which of two is better."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trireme.errors import BadRequest, check_choice, check_numbers
from trireme.metrics.by_name import better_of
from trireme.metrics.metric import Better
from trireme.train.callbacks.callback import FitState


@dataclass(frozen=True)
class Monitor:
    """A figure of `valid` data, or of training if the fit has none.

    mode: whether it is to fall or to rise. min_delta: by more than this.
    """

    figure: str
    mode: Better
    min_delta: float

    @classmethod
    def of(cls, who: str, figure: str, mode: Better | None, min_delta: float) -> Monitor:
        """mode None: as the metric of that name has it. Raises BadRequest: it is unknown, or an
        argument is out of range.
        """
        if mode is None:
            mode = "min" if figure == "loss" else better_of(figure)
        if mode not in ("min", "max"):
            raise BadRequest(
                f"{who}: expected mode 'min' or 'max', whether a lower or a higher {figure!r} is"
                f" better, found {mode!r}; a figure has its metric's name, also of valid=: 'auc'"
            )
        check_numbers(who, ">= 0", min_delta=min_delta)
        return cls(figure, mode, min_delta)

    def value(self, who: str, fit: FitState) -> float:
        """Of this epoch. Raises BadRequest: there is no figure of that name."""
        figures = fit.valid or fit.figures
        check_choice(who, figures, monitor=self.figure)
        return figures[self.figure]

    def is_better(self, value: float, best: float | None) -> bool:
        """Whether a value improves on the best so far, None: there is none. What is not finite
        never does, and checkpoints could not note it.
        """
        if best is None or not math.isfinite(value):
            return math.isfinite(value)
        gain = best - value if self.mode == "min" else value - best
        return gain > self.min_delta
