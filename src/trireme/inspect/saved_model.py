"""A checkpoint or an export with its tables, read some thousand rows at a time: memory stays
bounded whatever the size.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trireme.policy import ScorePolicy
from trireme.protocol.routing import buckets_of
from trireme.protocol.wire import Array


class RowBatch(NamedTuple):
    """Some rows, in the order of their buckets.

    keys (n,) uint64, classes (n,) uint8. weights (n, D), state (n, W) float32; what a row's class
    lacks is 0. updates: (n, C) uint32 counts of rules that have them, which are not in state.
    statistics: (n,) records, as RowLayout.statistics_type; without fields in an export.
    """

    keys: Array
    classes: Array
    weights: Array
    state: Array
    updates: Array
    statistics: Array

    def take(self, which: Array | slice) -> RowBatch:
        return RowBatch(*(column[which] for column in self))

    def narrowed(self, dim: int, num_planes: int) -> tuple[Array, Array]:
        """Weights and state of rows whose class has `dim` weights, without what it lacks.

        num_planes: floats of state per weight.
        """
        n, wide = self.weights.shape
        planes = self.state[:, : num_planes * wide].reshape(n, num_planes, wide)[:, :, :dim]
        rest = self.state[:, num_planes * wide :]
        return self.weights[:, :dim], np.concatenate([planes.reshape(n, -1), rest], axis=1)


class SavedTable(ABC):
    """One table.

    class_dims: weights of a row of each class; empty: all rows have all weights.
    state_planes: floats of state per weight; the other floats are per row.
    salt: whether each feature has keys of its own; None: the checkpoint is older than that note.
    features: that read it, as far as is known; has_all_features: these are all.
    string_features: those that took strings in training.
    """

    name: str
    num_rows: int
    num_removed: int
    num_bytes: int
    policy: ScorePolicy | None = None
    class_dims: tuple[int, ...] = ()
    state_planes: int = 0
    salt: bool | None = None
    features: tuple[str, ...] = ()
    string_features: frozenset[str] = frozenset()
    has_all_features: bool = False

    @property
    @abstractmethod
    def comparable(self) -> Any:
        """Tables can be compared row by row if these are equal."""

    @abstractmethod
    def properties(self) -> dict[str, str]:
        """Further values of the manifest, by heading."""

    @abstractmethod
    def rows(self, buckets: npt.NDArray[np.uint16] | None = None) -> Iterator[RowBatch]:
        """All rows, in the order of the buckets; at least those of `buckets` if given. Raises
        Corruption: a file is missing or damaged; names it.
        """

    def floats(self, rows: RowBatch) -> Iterator[tuple[Array, Array]]:
        """Weights and state of rows, without what their classes lack."""
        if not self.class_dims:
            yield rows.weights, rows.state
            return
        for row_class in np.unique(rows.classes).tolist():
            of_class = rows.take(rows.classes == row_class)
            yield of_class.narrowed(self.class_dims[row_class], self.state_planes)

    def buckets(self) -> Iterator[tuple[int, RowBatch]]:
        """The rows of each bucket that has some, sorted by key."""
        for rows in self.rows():
            buckets = buckets_of(rows.keys)
            starts = [0, *(np.flatnonzero(np.diff(buckets)) + 1).tolist(), len(buckets)]
            for low, high in itertools.pairwise(starts):
                part = rows.take(slice(low, high))
                yield int(buckets[low]), part.take(np.argsort(part.keys))

    def find(self, keys: npt.NDArray[np.uint64]) -> dict[int, RowBatch]:
        """The row of each of these keys that has one."""
        wanted = np.unique(keys)
        of_key: dict[int, RowBatch] = {}
        for rows in self.rows(buckets_of(wanted)):
            for at in np.flatnonzero(np.isin(rows.keys, wanted)).tolist():
                of_key[int(rows.keys[at])] = rows.take(slice(at, at + 1))
        return of_key


class SavedModel(ABC):
    """What a checkpoint or an export holds."""

    path: str
    version: int
    tables: Mapping[str, SavedTable]

    @abstractmethod
    def headline(self) -> Iterator[str]:
        """Lines about the whole checkpoint or export."""

    @abstractmethod
    def dense(self) -> Iterator[tuple[str, int, Array]]:
        """(parameter, first element, weights (n,)) of each block of the dense parameters."""
