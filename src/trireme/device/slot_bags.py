"""Which rows of a block the bags of a batch use, and where each row occurs.

The CPU plans slots: int32 numbers of rows in a block. On the block's device one stable sort of a
batch's slots gives the order in which gradients are summed, so it never depends on timing.

Shapes: B examples, F features, N ids, K distinct slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from trireme.errors import BadRequest

CHUNK = 256
"""How many gradients of a row are summed one after the other. Each chunk of a row that occurs more
often is summed for itself, then the sums of its chunks in their order.
"""


class Occurrences(NamedTuple):
    """Where each distinct slot occurs.

    slots: (K,) int32, ascending.
    order, starts: (N,), (K + 1,) int32; slots[k] is at positions order[starts[k]:starts[k + 1]],
        which ascend. Padding is before starts[0].
    """

    slots: Tensor
    order: Tensor
    starts: Tensor


class Chunks(NamedTuple):
    """Occurrences cut into C chunks of at most CHUNK.

    starts: (C + 1,) int64 in `Occurrences.order`.
    first: (K + 1,) int64: slot k has chunks first[k]:first[k + 1].
    """

    starts: Tensor
    first: Tensor


def occurrences(slots: Tensor) -> Occurrences:
    """Where each distinct slot of (N,) int32 slots occurs; -1 is padding. Waits for the device, to
    learn K.
    """
    ascending, order = torch.sort(slots, stable=True)
    is_first = ascending >= 0
    is_first[1:] &= ascending[1:] != ascending[:-1]
    firsts = torch.nonzero(is_first).flatten()
    starts = torch.cat([firsts, firsts.new_full((1,), len(slots))]).to(torch.int32)
    return Occurrences(ascending[firsts], order.to(torch.int32), starts)


def chunks_of(starts: Tensor) -> Chunks:
    """Cut the occurrences with these starts, (K + 1,) int32, into chunks."""
    begins = starts.long()
    counts = begins.diff()
    first = torch.zeros_like(begins)
    torch.cumsum((counts + CHUNK - 1) // CHUNK, 0, out=first[1:])
    row = torch.repeat_interleave(torch.arange(len(counts), device=starts.device), first.diff())
    within = torch.arange(len(row), device=starts.device) - first[row]
    return Chunks(torch.cat([begins[row] + within * CHUNK, begins[-1:]]), first)


@dataclass(frozen=True, eq=False)
class SlotBags:
    """The ids of a batch as slots of a block.

    slots: (N,) int32 on the block's device; -1 is padding, which adds nothing.
    offsets: (F*B + 1,) int64, where each bag begins, feature-major, from 0; None: N = F*B, one id
        per bag.
    weights: (N,) float32 factor of each id; None: 1.
    num_features: F.

    Raises BadRequest: dtypes, devices or sizes do not agree.
    """

    slots: Tensor
    offsets: Tensor | None = None
    weights: Tensor | None = None
    num_features: int = 1

    def __post_init__(self) -> None:
        _check("slots", self.slots, torch.int32, self.slots)
        num_bags = len(self.slots)
        if self.offsets is not None:
            _check("offsets", self.offsets, torch.int64, self.slots)
            num_bags = len(self.offsets) - 1
        if self.weights is not None:
            _check("weights", self.weights, torch.float32, self.slots)
            if len(self.weights) != len(self.slots):
                raise BadRequest(
                    f"SlotBags: expected a weight for each of {len(self.slots)} slots, found"
                    f" {len(self.weights)}"
                )
        if self.num_features < 1 or num_bags < 0 or num_bags % self.num_features:
            raise BadRequest(
                f"SlotBags: expected bags of {self.num_features} features for each example, found"
                f" {num_bags} bags"
            )

    @property
    def num_examples(self) -> int:
        """B."""
        num_bags = len(self.slots) if self.offsets is None else len(self.offsets) - 1
        return num_bags // self.num_features

    @cached_property
    def occurrences(self) -> Occurrences:
        return occurrences(self.slots)

    @cached_property
    def bag_of(self) -> Tensor:
        """(N,) int32: the bag of each id."""
        numbers = torch.arange(
            self.num_features * self.num_examples, dtype=torch.int32, device=self.slots.device
        )
        if self.offsets is None:
            return numbers
        return torch.repeat_interleave(
            numbers, self.offsets.diff(), output_size=self.slots.shape[0]
        )

    def mean(self) -> SlotBags:
        """These bags with weights 1 / n for the n ids of a bag; padding does not count. Raises
        BadRequest: the ids have weights already.
        """
        if self.weights is not None:
            raise BadRequest("SlotBags.mean: expected ids without weights, found weights")
        num_bags = self.num_features * self.num_examples
        counts = torch.zeros(num_bags, dtype=torch.int32, device=self.slots.device)
        counts.index_add_(0, self.bag_of, (self.slots >= 0).to(torch.int32))
        weights = 1.0 / counts.clamp(min=1).to(torch.float32)
        return SlotBags(self.slots, self.offsets, weights[self.bag_of.long()], self.num_features)


def _check(name: str, tensor: Tensor, dtype: torch.dtype, like: Tensor) -> None:
    is_right = tensor.dtype == dtype and tensor.dim() == 1 and tensor.device == like.device
    if not is_right or not tensor.is_contiguous():
        raise BadRequest(
            f"SlotBags: expected {name} as contiguous {dtype} of one dimension on {like.device},"
            f" found {tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}"
        )
