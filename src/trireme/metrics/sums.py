"""Metrics that are a formula over weighted sums, which do not depend on the order of adding."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from trireme import _core
from trireme.metrics.binary import Examples, ScoredMetric
from trireme.metrics.metric import State, Values, check_state


class SumMetric(ScoredMetric):
    """Base of metrics over weighted sums of one number per example.

    The numbers are computed in float64 and summed without rounding (core/metrics/exact_sum.h). So
    the state has the same bits however the examples are split and merged.
    """

    SUMS: ClassVar[tuple[str, ...]]
    """Names of the sums."""

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
