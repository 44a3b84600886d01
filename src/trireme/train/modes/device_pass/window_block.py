"""The rows of a window in a block of a fixed size: which slots are filled, and which are freed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from trireme import _core
from trireme.device import RowBlock
from trireme.errors import ResourceExhausted
from trireme.protocol.routing import NO_KEYS, Keys
from trireme.rows.wide_rows import WideRows
from trireme.table import TableSchema
from trireme.train.modes.device_pass.block_of_keys import BlockOfKeys
from trireme.train.modes.device_pass.key_slots import ABSENT, KeySlots

_NEVER = np.iinfo(np.int64).max


class WindowBlock(BlockOfKeys):
    """Rows of the next batches, and as many others as there is room for.

    read: the rows of keys. give_back: takes changed rows.
    """

    def __init__(
        self,
        schema: TableSchema,
        block: RowBlock,
        version: int,
        pool: _core.Pool,
        read: Callable[[Keys], WideRows],
        give_back: Callable[[Keys, WideRows], None],
    ) -> None:
        super().__init__(schema, KeySlots(NO_KEYS, pool, len(block)), block, version, pool)
        self._read, self._give_back = read, give_back
        self._free = np.arange(len(block))
        self._is_filled = np.zeros(len(block), np.bool_)
        self._last_use = np.zeros(len(block), np.int64)
        self._number = 0  # of the batch

    def bring(self, batches: Sequence[Keys], in_use: Sequence[Keys] = ()) -> None:
        """Have the rows of a batch, the first one, and if one is lacking, those of as many of the
        others, which follow it, as there is room for. in_use: of earlier batches, whose rows the
        next step will update. Raises ResourceExhausted: these and the first one have more rows than
        the block.
        """
        self._number += 1
        if (self.find(batches[0]) == ABSENT).any():
            first = _core.distinct([*in_use, batches[0]], self._pool) if in_use else batches[0]
            known = [first, *batches[1:]]
            self._fill(self._fitting(known, 1 + len(in_use)), known)
        self._last_use[self.find(batches[0])] = self._number

    def _fitting(self, known: Sequence[Keys], num_batches: int) -> Keys:
        """The distinct keys of the first of the known ones, as many as fit into the block.
        num_batches: that the very first are of.
        """
        first = known[0]
        if len(first) > len(self):
            what = "a batch" if num_batches == 1 else f"{num_batches} batches, of one step,"
            raise ResourceExhausted(
                f"window on a device: expected {what} of at most {len(self)} rows of table"
                f" {self._schema.name!r}, which its part of the memory has room for, found"
                f" {len(first)} rows: give the window at least {len(first) / len(self):.2f} times"
                " the memory, or take smaller batches"
            )
        needed = first
        for keys in known[1:]:
            more = _core.distinct([needed, keys], self._pool)
            if len(more) > len(self):
                break
            needed = more
        return needed

    def _fill(self, needed: Keys, batches: Sequence[Keys]) -> None:
        slots = self.slots.find(needed)
        lacking = needed[slots == ABSENT]
        if (num_freed := len(lacking) - len(self._free)) > 0:
            self._evict(num_freed, slots[slots != ABSENT], batches)
        to, self._free = self._free[: len(lacking)], self._free[len(lacking) :]
        self._block.fill(self._as_slots(to), self._read(lacking))
        self.slots.assign(lacking, to)
        self._is_filled[to] = True
        self._last = None

    def _evict(self, num: int, kept: npt.NDArray[np.int32], batches: Sequence[Keys]) -> None:
        """Free slots whose rows are not needed now: first those that no known batch uses, the
        longest unused first, then those that are used last.
        """
        next_use = np.full(len(self), _NEVER)
        for number, keys in reversed(list(enumerate(batches))):
            used = self.slots.find(keys)
            next_use[used[used != ABSENT]] = number
        may_leave = self._is_filled.copy()
        may_leave[kept] = False
        slots = np.flatnonzero(may_leave)
        freed = slots[np.lexsort((self._last_use[slots], -next_use[slots]))][:num]
        is_changed = self._block.is_changed[torch.from_numpy(freed)].cpu().numpy()
        changed = freed[is_changed]
        if len(changed):
            rows = self._block.raw_rows(self._as_slots(changed))
            self._give_back(self.slots.keys[changed], rows)
        self._block.is_changed[torch.from_numpy(freed)] = False
        self.slots.remove(self.slots.keys[freed])
        self._is_filled[freed] = False
        self._free = np.concatenate([self._free, freed])
