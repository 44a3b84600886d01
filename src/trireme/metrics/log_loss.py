"""The mean negative log-likelihood of labels 0 and 1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trireme.metrics.binary import binary_examples
from trireme.metrics.metric import State, Values, check_state

# A probability of exactly 0 or 1 would make the loss infinite; this is float32's distance below 1.
_SMALLEST = 2.0**-24


class LogLoss:
    """Weighted mean of -log(probability given to the label).

    Computed and summed in float64. States merge in the order in which merge() is called; another
    order differs by the rounding of float64 at most.

    Args:
        from_logits: True: scores are logits: what a model trained with
            binary_cross_entropy_with_logits gives, or the (B, 2) output of one trained with
            cross_entropy. The value equals that loss. False: probabilities in [0, 1], clipped to
            [2^-24, 1 - 2^-24]. Probabilities taken for logits give a wrong value without an error.
        name: under which a trainer shows it.
    """

    def __init__(self, *, from_logits: bool = True, name: str = "log_loss") -> None:
        self.name = name
        self._from_logits = from_logits
        self.reset()

    def update(self, scores: Values, labels: Values, weights: Values | None = None) -> None:
        """Add B examples.

        Args:
            scores: (B,) or (B, 1); or (B, 2) with a column per class.
            labels: (B,) or (B, 1), 0 or 1.
            weights: (B,) or (B, 1), finite and not negative; None for 1.

        Raises:
            BadRequest: shapes that do not fit or a value out of range; nothing is added.
        """
        scores_B, labels_B, weights_B = binary_examples(
            "LogLoss.update", scores, labels, weights, from_logits=self._from_logits
        )
        x = scores_B.astype(np.float64)
        y = labels_B.astype(np.float64)
        if self._from_logits:  # -log sigmoid(x) without overflow
            losses = np.maximum(x, 0) - x * y + np.log1p(np.exp(-np.abs(x)))
        else:
            p = np.clip(x, _SMALLEST, 1 - _SMALLEST)
            losses = -np.where(y == 1, np.log(p), np.log1p(-p))
        if weights_B is None:
            self._sum += float(losses.sum())
            self._weight += len(losses)
        else:
            w = weights_B.astype(np.float64)
            self._sum += float((w * losses).sum())
            self._weight += float(w.sum())

    def state(self) -> State:
        """sum, weight: (1,) float64; from_logits: (1,)."""
        return {
            "sum": np.array([self._sum]),
            "weight": np.array([self._weight]),
            "from_logits": np.array([self._from_logits]),
        }

    def merge(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Add the state of another LogLoss. Raises BadRequest if its options differ."""
        check_state("LogLoss", self.state(), state, fixed="from_logits")
        self._sum += float(state["sum"].item())
        self._weight += float(state["weight"].item())

    def compute(self) -> float:
        """The mean loss in nats; NaN until there is an example with weight."""
        return self._sum / self._weight if self._weight > 0 else float("nan")

    def reset(self) -> None:
        self._sum = 0.0
        self._weight = 0.0
