"""Tables of a checkpoint or an export, some thousand rows at a time: whatever their size, memory
stays bounded.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trireme import _core
from trireme.policy import ScorePolicy
from trireme.protocol.wire import Array


@dataclass(frozen=True)
class Rows:
    """Some rows, in the order of their buckets.

    keys, classes: (n,). weights: (n, D), state: (n, W) float32; parts that a row's class lacks are
    zeros. updates: (n, C), of rules that count them, which state is without.
    statistics: (n,) records, as RowLayout.statistics_type; of an export without fields.
    """

    keys: npt.NDArray[np.uint64]
    classes: npt.NDArray[np.uint8]
    weights: Array
    state: Array
    updates: npt.NDArray[np.uint32]
    statistics: Array

    def take(self, which: Array | slice) -> Rows:
        return Rows(
            self.keys[which],
            self.classes[which],
            self.weights[which],
            self.state[which],
            self.updates[which],
            self.statistics[which],
        )

    def narrowed(self, dim: int, num_planes: int) -> tuple[Array, Array]:
        """Weights and state of rows of a class of so many weights, without what it lacks.

        num_planes: floats of state that each weight has.
        """
        n, wide = self.weights.shape
        planes = self.state[:, : num_planes * wide].reshape(n, num_planes, wide)[:, :, :dim]
        rest = self.state[:, num_planes * wide :]
        return self.weights[:, :dim], np.concatenate([planes.reshape(n, -1), rest], axis=1)


class TableSource(ABC):
    """One table. What `comparable` differs in cannot be compared row by row.

    class_dims: weights of a row of each class; empty: all have all.
    state_planes: floats of state that each weight has; the others are the row's.
    """

    name: str
    num_rows: int
    num_removed: int
    num_bytes: int
    policy: ScorePolicy | None = None
    class_dims: tuple[int, ...] = ()
    state_planes: int = 0

    @property
    @abstractmethod
    def comparable(self) -> Any:
        """What two tables must share for their rows to be compared."""

    @abstractmethod
    def says(self) -> dict[str, str]:
        """What its manifest says besides, by heading."""

    @abstractmethod
    def rows(self, buckets: npt.NDArray[np.uint16] | None = None) -> Iterator[Rows]:
        """All rows, in the order of the buckets; if buckets are given, at least theirs.

        Raises:
            Corruption: a file is missing or damaged; names it.
        """

    def floats(self, rows: Rows) -> Iterator[tuple[Array, Array]]:
        """Weights and state of rows, as far as their classes have them."""
        if not self.class_dims:
            yield rows.weights, rows.state
            return
        for row_class in np.unique(rows.classes).tolist():
            of_class = rows.take(rows.classes == row_class)
            yield of_class.narrowed(self.class_dims[row_class], self.state_planes)

    def buckets(self) -> Iterator[tuple[int, Rows]]:
        """The rows of each bucket that has some, sorted by key."""
        for rows in self.rows():
            of = buckets_of(rows.keys)
            starts = [0, *(np.flatnonzero(np.diff(of)) + 1).tolist(), len(of)]
            for low, high in itertools.pairwise(starts):
                part = rows.take(slice(low, high))
                yield int(of[low]), part.take(np.argsort(part.keys))

    def find(self, keys: npt.NDArray[np.uint64]) -> dict[int, Rows]:
        """The rows of those keys that are there, one each."""
        wanted = np.unique(keys)
        found: dict[int, Rows] = {}
        for rows in self.rows(buckets_of(wanted)):
            for at in np.flatnonzero(np.isin(rows.keys, wanted)).tolist():
                found[int(rows.keys[at])] = rows.take(slice(at, at + 1))
        return found


class Source(ABC):
    """What a folder holds."""

    path: str
    version: int
    tables: Mapping[str, TableSource]

    @abstractmethod
    def headline(self) -> Iterator[str]:
        """Lines about the whole of it."""

    @abstractmethod
    def dense(self) -> Iterator[tuple[str, int, Array]]:
        """(parameter, first element, weights (n,)) of each part of the dense parameters."""


def buckets_of(keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint16]:
    of = np.empty(len(keys), np.uint16)
    _core.buckets(keys, of)
    return of
