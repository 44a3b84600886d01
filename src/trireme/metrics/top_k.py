"""Metrics of recall: whether what is right is among the k highest scores of an example."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trireme.data.batch import Ragged
from trireme.errors import BadRequest, check_counts
from trireme.metrics.metric import State, Values, check_state


class TopK:
    """Recall, hit rate, NDCG and MRR of the k highest scores of each example.

    update() takes (B, C) scores of C candidates, and what is right: (B,) or (B, 1) places of
    candidates, 0 <= place < C; or Ragged places, any number of them for each example, of which
    examples without any are left out. Of equal scores those of wrong candidates are higher.

    Args:
        k: >= 1; all candidates if there are fewer.
        name: shown by a trainer; default top_K.
        output, label: as of `AUC`.

    Raises:
        BadRequest: k below 1; of update, shapes that do not fit, or places out of range.
    """

    SUMMED: ClassVar[tuple[str, ...]] = ("sums",)

    def __init__(
        self,
        k: int,
        *,
        name: str | None = None,
        output: str | None = None,
        label: str | None = None,
    ) -> None:
        check_counts("TopK", k=k)
        self.k, self.name = k, f"top_{k}" if name is None else name
        self.output, self.label = output, label
        self.columns: Mapping[str, str] = {}
        self.reset()

    def reset(self) -> None:
        """Remove all examples."""
        self._sums = np.zeros(5, np.float64)

    def update(self, scores: Values, labels: Values | Ragged) -> None:
        """Add B examples."""
        scores = torch.as_tensor(scores)
        labels = labels if isinstance(labels, Ragged) else torch.as_tensor(labels)
        if scores.dim() != 2 or not torch.isfinite(scores).all():
            raise BadRequest(
                f"TopK.update: expected finite (B, C) scores, found shape {tuple(scores.shape)}"
            )
        num, num_candidates = scores.shape
        examples, places = _right(labels, num)
        if len(places) and not 0 <= int(places.min()) <= int(places.max()) < num_candidates:
            raise BadRequest(
                f"TopK.update: expected places from 0 to {num_candidates - 1}, found"
                f" {int(places.min())} to {int(places.max())}"
            )
        is_right = torch.zeros(num, num_candidates, dtype=torch.bool)
        is_right[examples, places] = True
        counted = is_right.any(1)
        if counted.any():
            self._sums += _figures(is_right[counted], scores.detach().cpu()[counted], self.k)

    def state(self) -> State:
        """sums: (5,) float64; k: (1,)."""
        return {"sums": self._sums.copy(), "k": np.array([self.k], np.int64)}

    def merge(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Add the state of another one. Raises BadRequest if its k differs."""
        check_state("TopK", self.state(), state, fixed=("k",))
        self._sums += state["sums"]

    def compute(self) -> dict[str, float]:
        """Means over the examples, NaN without any. recall: of what is right, the part among the k;
        hit_rate: whether any is; ndcg; mrr: 1 / the place of the first among the k, else 0.
        """
        *sums, num = self._sums.tolist()
        names = ("recall", "hit_rate", "ndcg", "mrr")
        return {
            name: value / num if num else float("nan")
            for name, value in zip(names, sums, strict=True)
        }


def _right(labels: Values | Ragged, num: int) -> tuple[Tensor, Tensor]:
    """The examples and the places of what is right."""
    if isinstance(labels, Ragged):
        sizes = labels.offsets.diff()
        begin, end = int(labels.offsets[0]), int(labels.offsets[-1])
        places = labels.values[begin:end]
    else:
        places = torch.as_tensor(labels).flatten()
        sizes = torch.ones(num, dtype=torch.int64)
    if len(sizes) != num or len(places) != int(sizes.sum()):
        raise BadRequest(
            f"TopK.update: expected the places of {num} examples, found {len(places)} of"
            f" {len(sizes)}"
        )
    whole = places.cpu().to(torch.int64)
    if not torch.equal(whole.to(places.dtype), places.cpu()):
        raise BadRequest(f"TopK.update: expected whole numbers as places, found {places!r:.200}")
    return torch.arange(num).repeat_interleave(sizes.cpu()), whole


def _figures(is_right_BC: Tensor, scores_BC: Tensor, k: int) -> NDArray[np.float64]:
    """Sums over B of recall, hit rate, NDCG, MRR and 1."""
    scores_BC = scores_BC.double() if scores_BC.is_floating_point() else scores_BC.long()
    wrong_BC, num_B1 = ~is_right_BC, is_right_BC.sum(1, keepdim=True)
    lowest = -math.inf if scores_BC.is_floating_point() else torch.iinfo(torch.int64).min
    k = min(k, scores_BC.shape[1])
    right_BK = scores_BC.masked_fill(wrong_BC, lowest).topk(k).values
    wrong_BK = scores_BC.masked_fill(is_right_BC, lowest).topk(k).values.flip(1)
    above_BK = k - torch.searchsorted(wrong_BK, right_BK)  # wrong ones, with those of equal score
    places_K = torch.arange(1, k + 1)
    ranks_BK = places_K + above_BK.minimum(wrong_BC.sum(1, keepdim=True))
    hits_BK = ((places_K <= num_B1) & (ranks_BK <= k)).double()
    ideal_B = (1 / torch.log2(places_K.double() + 1)).cumsum(0)[num_B1.flatten().clamp(max=k) - 1]
    sums = (
        (hits_BK.sum(1) / num_B1.flatten()).sum(),
        hits_BK.amax(1).sum(),
        ((hits_BK / torch.log2(ranks_BK.double() + 1)).sum(1) / ideal_B).sum(),
        (hits_BK / ranks_BK).amax(1).sum(),
        torch.tensor(float(len(num_B1))),
    )
    return np.array([float(value) for value in sums])
