"""The area under the ROC curve, from histograms that add up across workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trireme import _core
from trireme.errors import BadRequest
from trireme.metrics.binary import binary_examples
from trireme.metrics.metric import State, Values, check_state


class AUC:
    """Share of the pairs (positive, negative) whose scores are in the right order; ties count half.

    Scores are counted in buckets, even in the exponent of the logit (or of p and of 1 - p), so that
    scores tie when they are closer than 32 / num_buckets of a power of two: with the default, when
    they differ by less than about one part in 6000. Merging is exact in any order while weights are
    whole numbers (or there are none), else to the rounding of float64.

    Args:
        from_logits: True: scores are logits, any finite number: what a model trained with
            binary_cross_entropy_with_logits gives, or the (B, 2) output of one trained with
            cross_entropy. False: probabilities in [0, 1], after a sigmoid or softmax. The area is
            the same for both; the buckets and the check of the values differ.
        num_buckets: an even number >= 2. The state takes 16 bytes for each.
        name: under which a trainer shows it.
    """

    def __init__(
        self, *, from_logits: bool = True, num_buckets: int = 1 << 18, name: str = "auc"
    ) -> None:
        if num_buckets < 2 or num_buckets % 2:
            raise BadRequest(f"AUC: expected an even num_buckets >= 2, found {num_buckets}")
        self.name = name
        self._from_logits = from_logits
        self._positives: NDArray[np.float64] = np.zeros(num_buckets)
        self._negatives: NDArray[np.float64] = np.zeros(num_buckets)

    def update(self, scores: Values, labels: Values, weights: Values | None = None) -> None:
        """Add B examples.

        Args:
            scores: (B,) or (B, 1); or (B, 2) with a column per class.
            labels: (B,) or (B, 1), 0 or 1.
            weights: (B,) or (B, 1), finite and not negative; None for 1.

        Raises:
            BadRequest: shapes that do not fit or a value out of range; nothing is added.
        """
        examples = binary_examples(
            "AUC.update", scores, labels, weights, from_logits=self._from_logits
        )
        _core.auc_add(*examples, self._from_logits, self._positives, self._negatives)

    def state(self) -> State:
        """positives, negatives: (num_buckets,) float64, weight per bucket; from_logits: (1,)."""
        return {
            "positives": self._positives.copy(),
            "negatives": self._negatives.copy(),
            "from_logits": np.array([self._from_logits]),
        }

    def merge(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Add the state of another AUC. Raises BadRequest if its options differ."""
        check_state("AUC", self.state(), state, fixed="from_logits")
        self._positives += state["positives"]
        self._negatives += state["negatives"]

    def compute(self) -> float:
        """The area, 0..1; NaN until there are both positives and negatives."""
        return _core.auc_area(self._positives, self._negatives)

    def reset(self) -> None:
        self._positives[:] = 0
        self._negatives[:] = 0
