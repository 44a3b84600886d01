"""Slices of dense blocks: elements of a parameter with their optimizer state and marks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class BlockSlice:
    """Consecutive elements of a parameter, from `start`, that have seen the same pushes.

    tensors: "weights" and the optimizer's state: each one number, or one per element.
    marks: stream -> last sequence applied.
    """

    start: int
    tensors: Tensors
    marks: Mapping[int, int]

    @property
    def size(self) -> int:
        return self.tensors["weights"].numel()

    def sliced(self, start: int, end: int) -> BlockSlice:
        """Elements [start, end) of the parameter, which must be within this slice."""
        low, high = start - self.start, end - self.start
        if (low, high) == (0, self.size):
            return self
        tensors = {
            name: tensor if tensor.ndim == 0 else tensor.reshape(-1)[low:high]
            for name, tensor in self.tensors.items()
        }
        return BlockSlice(start, tensors, self.marks)


def merge_alike(slices: Sequence[BlockSlice]) -> list[BlockSlice]:
    """Join neighbours that have seen the same pushes and agree in all single numbers."""
    groups: list[list[BlockSlice]] = []
    for block_slice in slices:
        if groups and _are_alike(groups[-1][-1], block_slice):
            groups[-1].append(block_slice)
        else:
            groups.append([block_slice])
    return [join(group) for group in groups]


def join(slices: Sequence[BlockSlice]) -> BlockSlice:
    """Neighbours as one, with the tensors that all have; single numbers and marks of the first."""
    first = slices[0]
    if len(slices) == 1:
        return first
    tensors = {
        name: tensor
        if tensor.ndim == 0
        else torch.cat([other.tensors[name].reshape(-1) for other in slices])
        for name, tensor in first.tensors.items()
        if all(name in other.tensors for other in slices)
    }
    return BlockSlice(first.start, tensors, first.marks)


def _are_alike(one: BlockSlice, other: BlockSlice) -> bool:
    if one.marks != other.marks or one.tensors.keys() != other.tensors.keys():
        return False
    pairs = [(tensor, other.tensors[name]) for name, tensor in one.tensors.items()]
    return all(a.ndim == b.ndim and (a.ndim > 0 or torch.equal(a, b)) for a, b in pairs)
