"""Scores, labels and weights of examples, checked and brought into one form."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trireme.errors import BadRequest, check_flags
from trireme.metrics.metric import Better, State, Values


class ScoredMetric(ABC):
    """Base of the metrics of scored examples.

    update() takes scores: (B,) or (B, 1), or (B, 2) with a column per class; labels 0 or 1 and
    weights, finite and not negative, None for 1: (B,) or (B, 1). It raises BadRequest for shapes
    that do not fit or a value out of range; then nothing is added.

    Args:
        from_logits: True: scores are logits, any finite number: what a model trained with
            binary_cross_entropy_with_logits gives, or the (B, 2) output of one trained with
            cross_entropy. False: probabilities in [0, 1], after a sigmoid or softmax. None, in some
            metrics: any finite numbers, also as labels.
        name: shown by a trainer; default the class' own.
        output: which of a model's named outputs; None: the only one.
        label: the label column of a batch; None: the trainer's.
        weights: the column of the examples' weights; None: no weights.

    Raises:
        BadRequest: the metric needs from_logits.
    """

    NAME: ClassVar[str]
    BETTER: ClassVar[Better | None] = None
    """Whether a lower or a higher number is better, of a metric that is one number; None: neither
    is, or it is several numbers."""
    TAKES_ANY_NUMBERS: ClassVar[bool] = False

    def __init__(
        self,
        *,
        from_logits: bool | None = True,
        name: str | None = None,
        output: str | None = None,
        label: str | None = None,
        weights: str | None = None,
    ) -> None:
        check_flags(type(self).__name__, from_logits=from_logits)
        if from_logits is None and not self.TAKES_ANY_NUMBERS:
            raise BadRequest(
                f"{type(self).__name__}: expected from_logits True or False, found None"
            )
        self.name = self.NAME if name is None else name
        self.output, self.label = output, label
        self.columns: Mapping[str, str] = {} if weights is None else {"weights": weights}
        self._from_logits = from_logits
        self.reset()

    @abstractmethod
    def reset(self) -> None:
        """Remove all examples."""

    def _read(self, scores: Values, labels: Values, weights: Values | None) -> Examples:
        """Check B examples, and make them flat float32 arrays. Of two columns of scores the logit
        is the difference, as cross_entropy sees it, and the probability is the second column.
        """
        subject, from_logits = f"{type(self).__name__}.update", self._from_logits
        scores_B = _one_score(subject, _array(subject, "scores", scores), from_logits=from_logits)
        labels_B = _flat(subject, "labels", _array(subject, "labels", labels))
        weights_B = None
        if weights is not None:
            weights_B = _flat(subject, "weights", _array(subject, "weights", weights))
        for name, array in (("labels", labels_B), ("weights", weights_B)):
            if array is not None and len(array) != len(scores_B):
                raise BadRequest(
                    f"{subject}: expected {len(scores_B)} {name}, one per score, found {len(array)}"
                )
        if from_logits is False:
            what = "probabilities in [0, 1] (for logits: from_logits=True)"
            _require(subject, what, scores_B, (scores_B >= 0) & (scores_B <= 1))
        else:
            what = "finite logits" if from_logits else "finite scores"
            _require(subject, what, scores_B, _is_finite(scores_B))
        if from_logits is None:
            _require(subject, "finite labels", labels_B, _is_finite(labels_B))
        else:
            _require(subject, "labels 0 or 1", labels_B, (labels_B == 0) | (labels_B == 1))
        if weights_B is not None:
            right = _is_finite(weights_B) & (weights_B >= 0)
            _require(subject, "finite weights >= 0", weights_B, right)
        return Examples(
            _float32(scores_B),
            _float32(labels_B),
            None if weights_B is None else _float32(weights_B),
        )

    def _options(self) -> State:
        """Options that must be equal in a merge, part of every state: from_logits as (1,) int8, 1
        for logits, 0 for probabilities, 2 for any numbers.
        """
        kind = 2 if self._from_logits is None else int(self._from_logits)
        return {"from_logits": np.array([kind], np.int8)}


class Examples(NamedTuple):
    """B examples: scores, labels, weights or None for 1."""

    scores: NDArray[np.float32]
    labels: NDArray[np.float32]
    weights: NDArray[np.float32] | None


def _array(subject: str, name: str, values: Values) -> NDArray[Any]:
    if isinstance(values, Tensor):
        values = values.detach()
        if values.is_floating_point():  # NumPy knows no bfloat16
            values = values.to(torch.float64 if values.dtype == torch.float64 else torch.float32)
        values = values.cpu().numpy()
    array = np.asarray(values)
    if array.dtype.kind not in ("fiu" if name == "scores" else "fiub"):
        raise BadRequest(f"{subject}: expected numbers as {name}, found {array.dtype}")
    return array


def _one_score(subject: str, scores: NDArray[Any], *, from_logits: bool | None) -> NDArray[Any]:
    if from_logits is not None and scores.ndim == 2 and scores.shape[1] == 2:
        second: NDArray[Any] = scores[:, 1]
        return second - scores[:, 0] if from_logits else second
    return _flat(subject, "scores", scores)


def _flat(subject: str, name: str, array: NDArray[Any]) -> NDArray[Any]:
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1:
        two = ", (B, 1) or (B, 2)" if name == "scores" else " or (B, 1)"
        raise BadRequest(f"{subject}: expected {name} of shape (B,){two}, found {array.shape}")
    return array


def _require(subject: str, expected: str, array: NDArray[Any], right: NDArray[np.bool_]) -> None:
    if not right.all():
        i = int(np.argmin(right))
        raise BadRequest(f"{subject}: expected {expected}, found {array[i]} at {i}")


def _is_finite(array: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether each is finite in float32, the type of the examples."""
    with np.errstate(over="ignore"):
        return np.isfinite(_float32(array))


def _float32(array: NDArray[Any]) -> NDArray[np.float32]:
    return np.ascontiguousarray(array, dtype=np.float32)
