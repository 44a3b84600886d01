"""GAUC: the area under the ROC curve within each user, averaged over users."""

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from trireme import _core
from trireme.data.batch import Ragged, Strings
from trireme.errors import BadRequest, ResourceExhausted, check_counts
from trireme.metrics.binary import ScoredMetric
from trireme.metrics.metric import State, Values, check_state

Users: TypeAlias = Values | Ragged | Strings

# Examples are collected before they are sorted into the pairs.
_WAITING_MIN = 1 << 16
_COLUMNS = ("users", "scores", "positives", "negatives")


class GAUC(ScoredMetric):
    """Mean of each user's AUC, weighted by the user's impressions: examples, or their weights.

    Users with only one kind of label are left out. The result is exact: the state holds, for each
    user and score, the weight of its positives and negatives, 28 bytes for each pair. So the
    examples of a user may be on any workers. Merging is exact in any order if weights are whole
    numbers (or absent), else to the rounding of float64.

    Args:
        users: the column of the user of each example: int64 keys, a sparse feature of one key per
            example, or strings (of which a 64-bit hash is kept).
        max_pairs: maximum of distinct (user, score) pairs, of all workers together after a merge.
            Up to half as many again may wait to be counted.
        from_logits, name, output, label, weights: as of `AUC`.

    Cost: an update copies; from time to time, and to compute, all pairs are sorted: one second per
    million.
    Source: Zhou et al., Deep Interest Network, KDD 2018, section 6.3 (weights: impressions).
    """

    NAME, BETTER = "gauc", "max"

    def __init__(self, users: str = "user", *, max_pairs: int = 1 << 23, **options: Any) -> None:
        check_counts("GAUC", max_pairs=max_pairs)
        self._max_pairs = max_pairs
        self._pairs: tuple[NDArray[Any], ...]
        self._waiting: list[tuple[NDArray[Any], ...]]
        super().__init__(**options)
        self.columns = {"users": users, **self.columns}

    def update(
        self, scores: Values, labels: Values, weights: Values | None = None, *, users: Users
    ) -> None:
        """Add B examples; see `ScoredMetric`.

        Args:
            users: (B,) or (B, 1) integers, Ragged bags of one key each, or B Strings.

        Raises:
            ResourceExhausted: more than max_pairs pairs; nothing is added.
        """
        examples = self._read(scores, labels, weights)
        keys_B = _user_keys(users)
        if len(keys_B) != len(examples.scores):
            raise BadRequest(
                f"GAUC.update: expected {len(examples.scores)} users, one per score,"
                f" found {len(keys_B)}"
            )
        is_positive = examples.labels == 1
        weights_B = np.ones(len(keys_B)) if examples.weights is None else examples.weights
        zero = examples.scores == 0  # -0.0 and 0.0 are one score
        self._add(
            "update",
            keys_B.copy(),
            np.where(zero, np.float32(0), examples.scores),
            np.where(is_positive, weights_B, 0.0).astype(np.float64),
            np.where(is_positive, 0.0, weights_B).astype(np.float64),
        )

    def _add(self, method: str, *columns: NDArray[Any], at_once: bool = False) -> None:
        """Collect rows of _COLUMNS, and count them at once or when there are many."""
        self._waiting.append(columns)
        waiting = sum(len(chunk[0]) for chunk in self._waiting)
        if not at_once and waiting < max(_WAITING_MIN, len(self._pairs[0]) // 2):
            return
        try:
            self._count(method)
        except ResourceExhausted:
            self._waiting.pop()
            raise

    def _count(self, method: str) -> None:
        """Sort the waiting rows into the pairs."""
        if not self._waiting:
            return
        parts = [self._pairs, *self._waiting]
        pairs = _by_user_and_score(*(np.concatenate(column) for column in zip(*parts, strict=True)))
        if len(pairs[0]) > self._max_pairs:
            raise ResourceExhausted(
                f"GAUC.{method}: expected at most max_pairs={self._max_pairs} distinct"
                f" (user, score) pairs, found {len(pairs[0])}; raise max_pairs (28 bytes"
                " each) or score fewer examples"
            )
        self._pairs, self._waiting = pairs, []

    def state(self) -> State:
        """users: (N,) uint64, scores: (N,) float32, positives, negatives: (N,) float64, sorted by
        user and score, each pair once; from_logits: (1,).
        """
        self._count("state")
        pairs = {name: array.copy() for name, array in zip(_COLUMNS, self._pairs, strict=True)}
        return {**pairs, **self._options()}

    def merge(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Add the state of another GAUC.

        Raises:
            BadRequest: its options differ, or it is not a state of GAUC.
            ResourceExhausted: more than max_pairs pairs together; nothing is added.
        """
        check_state("GAUC", self._empty(), state, fixed=tuple(self._options()), is_sized=False)
        self._add("merge", *(np.array(state[name]) for name in _COLUMNS), at_once=True)

    def compute(self) -> float:
        """0..1; NaN until a user has both positives and negatives."""
        self._count("compute")
        users, _, positives, negatives = self._pairs
        if len(users) == 0:
            return float("nan")
        begins = np.flatnonzero(np.diff(users, prepend=~users[:1]))
        below = np.cumsum(negatives) - negatives
        below -= np.repeat(below[begins], np.diff(begins, append=len(users)))
        area = np.add.reduceat(positives * (below + 0.5 * negatives), begins)
        clicks = np.add.reduceat(positives, begins)
        others = np.add.reduceat(negatives, begins)
        both = (clicks > 0) & (others > 0)
        if not both.any():
            return float("nan")
        impressions = (clicks + others)[both]
        areas = area[both] / (clicks * others)[both]
        return float((areas * impressions).sum() / impressions.sum())

    def reset(self) -> None:
        empty = self._empty()
        self._pairs = tuple(empty[name] for name in _COLUMNS)
        self._waiting = []

    def _empty(self) -> State:
        dtypes = (np.uint64, np.float32, np.float64, np.float64)
        columns = {name: np.empty(0, dt) for name, dt in zip(_COLUMNS, dtypes, strict=True)}
        return {**columns, **self._options()}


def _by_user_and_score(
    users: NDArray[Any], scores: NDArray[Any], positives: NDArray[Any], negatives: NDArray[Any]
) -> tuple[NDArray[Any], ...]:
    """The rows sorted by user and score; the weights of equal pairs are added."""
    order = np.lexsort((scores, users))
    users, scores = users[order], scores[order]
    is_first = np.ones(len(users), np.bool_)
    is_first[1:] = (users[1:] != users[:-1]) | (scores[1:] != scores[:-1])
    begins = np.flatnonzero(is_first)
    if len(begins) == 0:
        return users, scores, positives, negatives
    weights = (np.add.reduceat(weights[order], begins) for weights in (positives, negatives))
    return users[begins], scores[begins], *weights


def _user_keys(users: Users) -> NDArray[np.uint64]:
    """(B,) keys. Raises BadRequest unless each example has one key or string."""
    if isinstance(users, Strings):
        keys = np.empty(len(users.offsets) - 1, np.uint64)
        _core.hash_strings(users.data.numpy(), users.offsets.numpy(), "", keys)
        return keys
    if isinstance(users, Ragged):
        sizes = users.offsets.diff()
        if not bool((sizes == 1).all()):
            at = int((sizes != 1).int().argmax())
            raise BadRequest(
                f"GAUC.update: expected one user per example, found {int(sizes[at])} at {at};"
                " fill in those that are missing, or leave their examples out"
            )
        users = users.values[users.offsets[:-1]]
    array = users.detach().cpu().numpy() if isinstance(users, Tensor) else np.asarray(users)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise BadRequest(
            "GAUC.update: expected users as integers of shape (B,) or (B, 1), bags of one key, or"
            f" strings; found {array.dtype} of shape {array.shape}"
        )
    return array.astype(np.int64 if array.dtype.kind == "i" else np.uint64).view(np.uint64)
