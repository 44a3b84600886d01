"""Which slot of a block the row of each key has; planned on the CPU."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from trireme import _core
from trireme.protocol.routing import Keys

Slots: TypeAlias = npt.NDArray[np.int32]

ABSENT = -1


class KeySlots:
    """Any threads may find; one thread changes it, alone.

    keys: (num_slots,) uint64: of each slot.
    """

    def __init__(self, keys_U: Keys, pool: _core.Pool, num_slots: int | None = None) -> None:
        """Key i has slot i. num_slots: for keys to come; None: U, in the memory of `keys_U`."""
        self.keys = keys_U if num_slots is None else np.empty(num_slots, np.uint64)
        self._index, self._pool = _core.SlotIndex(self.keys, pool), pool
        self._index.assign(keys_U, None, pool)

    def assign(self, keys_N: Keys, slots_N: npt.NDArray[np.intp]) -> None:
        """Give keys, which have none, slots that no key has."""
        self._index.assign(keys_N, slots_N.astype(np.int32), self._pool)

    def remove(self, keys_N: Keys) -> None:
        """Take the slots of these keys away."""
        self._index.remove(keys_N)

    def find(self, keys_K: Keys) -> Slots:
        """(K,): the slot of each key, ABSENT if it has none."""
        slots = np.empty(len(keys_K), np.int32)
        self._index.find(keys_K, slots, self._pool)
        return slots
