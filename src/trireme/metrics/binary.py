"""Scores, labels and weights of a two-class problem, checked and brought into one form."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trireme.errors import BadRequest
from trireme.metrics.metric import Values


class Examples(NamedTuple):
    """B examples: scores (logits or probabilities), labels 0 or 1, weights or None for 1."""

    scores: NDArray[np.float32]
    labels: NDArray[np.float32]
    weights: NDArray[np.float32] | None


def binary_examples(
    subject: str, scores: Values, labels: Values, weights: Values | None, *, from_logits: bool
) -> Examples:
    """Check B examples and make them flat float32 arrays.

    Args:
        subject: begins the messages of errors.
        scores: (B,) or (B, 1); or (B, 2), one column per class: then the logit is the difference of
            the columns (as cross_entropy sees it), and the probability is the second one.
        labels: (B,) or (B, 1), each 0 or 1, of any numeric or boolean dtype.
        weights: (B,) or (B, 1), finite and not negative.
        from_logits: scores are finite logits; else probabilities in [0, 1].

    Raises:
        BadRequest: naming the first value or the shapes that are wrong.
    """
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
    if from_logits:
        _require(subject, "finite logits", scores_B, np.isfinite(scores_B))
    else:
        _require(
            subject,
            "probabilities in [0, 1] (for logits: from_logits=True)",
            scores_B,
            (scores_B >= 0) & (scores_B <= 1),
        )
    _require(subject, "labels 0 or 1", labels_B, (labels_B == 0) | (labels_B == 1))
    if weights_B is not None:
        right = np.isfinite(weights_B) & (weights_B >= 0)
        _require(subject, "finite weights >= 0", weights_B, right)
    return Examples(
        _float32(scores_B), _float32(labels_B), None if weights_B is None else _float32(weights_B)
    )


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


def _one_score(subject: str, scores: NDArray[Any], *, from_logits: bool) -> NDArray[Any]:
    if scores.ndim == 2 and scores.shape[1] == 2:
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


def _float32(array: NDArray[Any]) -> NDArray[np.float32]:
    return np.ascontiguousarray(array, dtype=np.float32)
