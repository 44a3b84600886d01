"""Columns of batches: read as models need them, checked, and made of others.

Shapes: B examples.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from trireme.data.batch import Batch, Ragged
from trireme.errors import BadRequest
from trireme.train.loop.scoring import column_of

ALL_ITEMS, PLACE = "all_items", "place"


@dataclass(eq=False)
class Draws:
    """A generator for each batch. It depends on the seed and on the batch's place in the data:
    epoch, stream and position. So a batch is sampled anew in every epoch and pass, and as before
    in a run that is repeated or resumed. Batches without a position are counted instead.

    Threads: one at a time.
    """

    seed: int = 0
    _num_unplaced: int = field(default=0, init=False)

    def of(self, batch: Batch) -> np.random.Generator:
        place = batch.position
        if not place:
            place, self._num_unplaced = (self._num_unplaced,), self._num_unplaced + 1
        return np.random.default_rng([self.seed, batch.epoch, batch.stream, *place])


def tensor_of(batch: Batch, name: str) -> Tensor:
    """A column with a first dimension B. Raises BadRequest: none, ragged, or of strings."""
    column = column_of(batch, name, "tensor_of")
    if not isinstance(column, Tensor):
        raise BadRequest(f"tensor_of: expected {name!r} as Tensor, found {type(column).__name__}")
    return column


def numbers_of(batch: Batch, name: str, width: int) -> Tensor:
    """A (B, width) column of numbers. Raises BadRequest: another column."""
    column = tensor_of(batch, name)
    if column.shape[1:] != (width,):
        raise BadRequest(
            f"numbers_of: expected {width} numbers in {name!r} of every example, found a column of"
            f" shape {tuple(column.shape)}"
        )
    return column


def ragged_of(batch: Batch, name: str) -> Ragged:
    """A column of bags. Raises BadRequest: another column, or none."""
    column = column_of(batch, name, "ragged_of")
    if not isinstance(column, Ragged):
        raise BadRequest(f"ragged_of: expected {name!r} as Ragged, found {type(column).__name__}")
    return column


def expect_sizes(batch: Batch, name: str, size: int) -> None:
    """Raise BadRequest for a column in which an example has another number of ids."""
    column = ragged_of(batch, name)
    if torch.compiler.is_compiling():  # a graph cannot look at values
        return
    sizes_B = column.offsets.diff()
    if (differs := sizes_B != size).any():
        i = int(differs.int().argmax())
        raise BadRequest(
            f"expect_sizes: expected {size} ids in {name!r} of every example, found"
            f" {int(sizes_B[i])} in example {i}"
        )


def expect_same_sizes(batch: Batch, names: Sequence[str], factors: Sequence[int] = ()) -> None:
    """Raise BadRequest where an example has not as many ids in one column as in the others, or not
    that many times as many as in the first: what is laid side by side belongs together.

    factors: of the columns behind the first, default 1.
    """
    columns = [ragged_of(batch, name) for name in names]
    if torch.compiler.is_compiling():  # a graph cannot look at values
        return
    first, *others = (column.offsets.diff() for column in columns)
    for name, sizes_B, factor in zip(names[1:], others, factors or [1] * len(others), strict=True):
        if (differs := sizes_B != factor * first).any():
            i = int(differs.int().argmax())
            share = "as many" if factor == 1 else f"{factor} times as many"
            raise BadRequest(
                f"expect_same_sizes: expected {share} ids in {name!r} as in {names[0]!r} of every"
                f" example, found {int(sizes_B[i])} and {int(first[i])} in example {i}"
            )


def expect_within(
    batch: Batch, name: str, limits: int | Tensor, why: str, *, least: int = 0
) -> None:
    """Raise BadRequest for an id of a column of bags below `least`, or not below its limit.

    limits: one for all, or (N,), one for each of the ids of all examples. why: where they come
    from, for the message.
    """
    column = ragged_of(batch, name)
    if torch.compiler.is_compiling():  # a graph cannot look at values
        return
    ids_N = values_of(batch, name)
    if (is_wrong := (ids_N < least) | (ids_N >= limits)).any():
        at = int(is_wrong.int().argmax())
        limit = int(limits[at]) if isinstance(limits, Tensor) else limits
        example = int(examples_of(column.offsets, len(ids_N))[at])
        raise BadRequest(
            f"expect_within: expected {name!r} of {least} to {limit - 1}, as {why}, found"
            f" {int(ids_N[at])} in example {example}"
        )


def values_of(batch: Batch, name: str) -> Tensor:
    """The ids of a column of all examples. Raises BadRequest: the column is not ragged."""
    column = ragged_of(batch, name)
    if torch.compiler.is_compiling():  # an exported program gets no others
        return column.values
    return column.values[int(column.offsets[0]) : int(column.offsets[-1])]


def examples_of(offsets_B1: Tensor, num: int) -> Tensor:
    """(num,): the number of the example of each of this many ids, of which the first is that at
    offsets[0].
    """
    places_N = torch.arange(num, device=offsets_B1.device) + offsets_B1[0]
    return torch.searchsorted(offsets_B1, places_N, right=True) - 1


def ids_of(batch: Batch, name: str, width: int) -> Tensor:
    """The (B, width) ids of a column of bags of the same size. Raises BadRequest: other bags."""
    expect_sizes(batch, name, width)
    return values_of(batch, name).view(-1, width)


@dataclass(frozen=True)
class SplitIds:
    """Makes one column for each of `names` of a column that has their ids, one of each."""

    column: str
    names: tuple[str, ...]

    def __call__(self, batch: Batch) -> Batch:
        """Raises BadRequest: another number of ids."""
        ids_FB = ids_of(batch, self.column, len(self.names)).T.contiguous()
        places = torch.arange(ids_FB.shape[1] + 1)
        split = {name: Ragged(own, places) for name, own in zip(self.names, ids_FB, strict=True)}
        return Batch({**batch.columns, **split}, batch.bags)


def with_items(batch: Batch, name: str, items: Tensor) -> Batch:
    """The batch with a column of items, all of them as if they were of its first example."""
    ends = torch.full((batch.num_examples + 1,), len(items))
    ends[0] = 0
    return Batch({**batch.columns, name: Ragged(items, ends)}, batch.bags)


@dataclass(frozen=True)
class AllIds:
    """Adds columns of ids to a batch, this many from 0 on, to look their rows up once."""

    nums: Mapping[str, int]

    def __call__(self, batch: Batch) -> Batch:
        for column, num in self.nums.items():
            batch = with_items(batch, column, torch.arange(num))
        return batch


def first_is_right(batch: Batch) -> Batch:
    """Adds "place" to a batch: of each example the first candidate is the right one."""
    return Batch({**batch.columns, PLACE: torch.zeros(batch.num_examples)}, batch.bags)
