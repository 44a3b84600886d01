"""Which worker has the rows of a key on its device: that of its bucket."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from trireme import _core
from trireme.protocol.routing import NO_KEYS, BucketMap, Keys, Split
from trireme.table import RowClassId, Table
from trireme.worker.gradients import KeysByClass


class Owners:
    """Buckets are divided among the workers in contiguous ranges, as among servers.

    size: how many workers there are.
    classes: the row classes of all tables with their dims, in an order that all workers have.
    """

    def __init__(self, size: int, tables: Sequence[Table], pool: _core.Pool) -> None:
        self._map = BucketMap.even(tuple(map(str, range(size))))
        self.size, self._pool = size, pool
        self.classes: list[tuple[RowClassId, int]] = [
            (part.class_id, part.dim) for table in tables for part in table.parts
        ]

    def split(self, keys_K: Keys) -> Split:
        """The keys, in bucket order, by owner."""
        return Split(keys_K, self._map, self._pool)

    def by_owner(self, keys: KeysByClass) -> tuple[list[list[int]], list[list[Keys]]]:
        """Of each row class how many of its keys each owner has; and for each owner its keys, class
        by class.
        """
        of_class = [keys.get(class_id, NO_KEYS) for class_id, _ in self.classes]
        splits = [self.split(keys_K) for keys_K in of_class]
        parts = [split.parts(keys_K) for split, keys_K in zip(splits, of_class, strict=True)]
        counts = [sizes_of(split).tolist() for split in splits]
        return counts, [
            [np.ascontiguousarray(one[owner]) for one in parts] for owner in range(self.size)
        ]


def sizes_of(split: Split) -> npt.NDArray[np.int64]:
    """(size,): how many of the keys each owner has."""
    return np.diff(split.bounds)
