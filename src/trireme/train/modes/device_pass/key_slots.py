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
    """Key i of `keys` has slot i. One thread uses it at a time."""

    def __init__(self, keys_U: Keys, pool: _core.Pool) -> None:
        self.keys, self._pool = keys_U, pool
        self._slots = make_core_table(_SLOTS)
        numbers = np.arange(len(keys_U))
        parts_U2 = np.stack([numbers // _PART, numbers % _PART], 1).astype(np.float32)
        self._slots.update(keys_U, parts_U2, [(0, 1)], _NO_STEP, pool, change="assign")

    def find(self, keys_K: Keys) -> Slots:
        """(K,): the slot of each key, ABSENT if it has none."""
        parts_K2 = np.empty((len(keys_K), 2), np.float32)
        self._slots.lookup(keys_K, parts_K2, self._pool)
        high, low = parts_K2.astype(np.int32).T
        slots: Slots = np.where(high < 0, np.int32(ABSENT), high * np.int32(_PART) + low)
        return slots
