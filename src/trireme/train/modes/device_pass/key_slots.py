"""Which slot of a block the row of each key has; planned on the CPU."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from trireme import _core
from trireme.protocol.routing import Keys
from trireme.rows.core_table import make_core_table
from trireme.table import TableSchema

Slots: TypeAlias = npt.NDArray[np.int32]

ABSENT = -1
# A slot is two whole numbers below 2^20, which float32 holds exactly; an absent key has -1.
_PART = 1 << 20
_SLOTS = TableSchema("slots", (2,), "float32", {"name": "sgd"}, ("constant", -1.0, 0.0), 0)
_NO_STEP = _core.RuleValues(lr=0.0)


class KeySlots:
    """One thread uses it at a time.

    keys: (U,) uint64: of each slot.
    """

    def __init__(self, keys_U: Keys, pool: _core.Pool) -> None:
        """Key i has slot i."""
        self.keys, self._pool, self._num_changes = keys_U, pool, 0
        self._slots = make_core_table(_SLOTS)
        self._put(keys_U, np.arange(len(keys_U)))

    @classmethod
    def empty(cls, num_slots: int, pool: _core.Pool) -> KeySlots:
        """No key has one of these slots yet."""
        slots = cls(np.empty(0, np.uint64), pool)
        slots.keys = np.zeros(num_slots, np.uint64)
        return slots

    def assign(self, keys_N: Keys, slots_N: npt.NDArray[np.intp]) -> None:
        """Give keys, which have none, slots that no key has."""
        self.keys[slots_N] = keys_N
        self._put(keys_N, slots_N)

    def _put(self, keys_N: Keys, slots_N: npt.NDArray[np.intp]) -> None:
        parts_N2 = np.stack([slots_N // _PART, slots_N % _PART], 1).astype(np.float32)
        self._num_changes += 1
        ids = [(0, self._num_changes)]
        self._slots.update(keys_N, parts_N2, ids, _NO_STEP, self._pool, change="assign")

    def remove(self, keys_N: Keys) -> None:
        """Take the slots of these keys away."""
        self._slots.erase(keys_N, self._pool)
        self._slots.forget_removed(self._slots.version)

    def find(self, keys_K: Keys) -> Slots:
        """(K,): the slot of each key, ABSENT if it has none."""
        parts_K2 = np.empty((len(keys_K), 2), np.float32)
        self._slots.lookup(keys_K, parts_K2, self._pool)
        high, low = parts_K2.astype(np.int32).T
        slots: Slots = np.where(high < 0, np.int32(ABSENT), high * np.int32(_PART) + low)
        return slots
