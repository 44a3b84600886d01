"""A window: the device has the rows of the next batches of a stream, within a fixed memory.

Rows that leave the device are returned to the servers early, into the import that ends the pass:
nobody else sees them before, and this worker reads them again from there. So a window gives what a
pass over the same data does, and is all or nothing as that is.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import islice, tee

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trireme import _core
from trireme.device import BlockLayout, RowBlock
from trireme.device.block_layout import SLOTS_MAX
from trireme.errors import BadRequest, ResourceExhausted
from trireme.interchange.worker_side.import_requests import importing, new_id, send_wide_rows
from trireme.protocol.block_messages import BlockTensors
from trireme.protocol.pass_lease import PassLease
from trireme.protocol.routing import NO_KEYS, Keys
from trireme.rows.wide_rows import WideRows
from trireme.table import RowClassId, TableSchema
from trireme.train.modes.device_pass.block_of_keys import BlockOfKeys, rows_or_new
from trireme.train.modes.device_pass.key_slots import ABSENT, KeySlots
from trireme.train.modes.device_pass.rows_on_device import RowsOnDevice
from trireme.train.modes.setup import TrainingSetup
from trireme.train.pass_data import WindowSize
from trireme.worker.gradients import KeysByClass

log = logging.getLogger("trireme.train")

_NEVER = np.iinfo(np.int64).max
SPARE_SHARE = 16  # one of so many slots is freed at once, at least


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

    def bring(self, keys: Keys, following: Iterable[Keys], in_use: Sequence[Keys]) -> None:
        """Have the rows of a batch, and if one is lacking, those of as many of the following ones
        as there is room for. in_use: of earlier batches, whose rows the next step will update.
        Raises ResourceExhausted: these and the batch have more rows than the block.
        """
        self._number += 1
        if (self.find(keys) == ABSENT).any():
            first = _core.distinct([*in_use, keys], self._pool) if in_use else keys
            known = [first, *following]
            self._fill(self._fitting(known, 1 + len(in_use)), known)
        self._last_use[self.find(keys)] = self._number

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
        longest unused first, some more than wanted; then those that are used last.
        """
        next_use = np.full(len(self), _NEVER)
        for number, keys in reversed(list(enumerate(batches))):
            used = self.slots.find(keys)
            next_use[used[used != ABSENT]] = number
        next_use[kept] = 0
        slots = np.flatnonzero(self._is_filled & (next_use > 0))
        order = np.lexsort((self._last_use[slots], -next_use[slots]))
        num_unused = np.count_nonzero(next_use[slots] == _NEVER)
        freed = slots[order][: max(num, min(num_unused, len(self) // SPARE_SHARE))]
        changed = freed[self._block.is_changed[torch.from_numpy(freed)].cpu().numpy()]
        if len(changed):
            self._give_back(self.slots.keys[changed], self._block.raw_rows(self._as_slots(changed)))
        self._block.is_changed[torch.from_numpy(freed)] = False
        self.slots.remove(self.slots.keys[freed])
        self._is_filled[freed] = False
        self._free = np.concatenate([self._free, freed])


class RowsInWindow(RowsOnDevice):
    """The training thread uses it, and the thread that plans calls `plan`."""

    can_give_again = False

    def __init__(
        self,
        setup: TrainingSetup,
        size: WindowSize,
        device: torch.device,
        lease: PassLease | None,
        *,
        id: str | None = None,
        opens: bool = True,
    ) -> None:
        """id: of the import; default a new one. opens: whether this worker begins and ends it."""
        super().__init__(setup, device, lease)
        self._classes = [part.class_id for table in setup.tables for part in table.parts]
        self.lookahead = size.batches
        self._num_bytes = size.num_bytes
        self._planned = threading.Condition()
        self._plans: deque[KeysByClass] = deque()  # as many as the pipeline plans ahead
        self._is_complete = True  # no plans come
        self._pending = setup.replica.pending  # lookups that the next step updates
        self._id, self._opens, self._is_open = id or new_id(), opens, opens
        self._blocks_at_end: BlockTensors = {}
        self._decide: Callable[[str], bool] | None = None
        self._import = ExitStack()
        self.staged = self._id
        if opens:
            self._begin_import()

    def _begin_import(self) -> None:
        self._import.enter_context(
            importing(
                self._client,
                list(self._schemas),
                replace=False,
                blocks=self._blocks_at_end,
                id=self._id,
                decide=lambda id: self._decide is not None and self._decide(id),
                lease=self._lease,
            )
        )

    # ---- plans ----

    def begin_run(self) -> None:
        with self._planned:
            self._plans.clear()
            self._is_complete = False

    def plan(self, keys: KeysByClass | None) -> None:
        with self._planned:
            if keys is None:
                self._is_complete = True
            else:
                self._plans.append(keys)
            self._planned.notify_all()

    def bring(self, keys: KeysByClass) -> None:
        """Raises ResourceExhausted: the memory has no room for the rows of the batch."""
        known = self._known(keys)
        if not self.blocks:
            known = list(known)
            self._make_blocks([keys, *known])
        for class_id, block in self.blocks.items():
            if class_id in keys and len(keys[class_id]):
                assert isinstance(block, WindowBlock)
                known, own = tee(known)  # read where rows are lacking
                following = (batch[class_id] for batch in own if class_id in batch)
                block.bring(keys[class_id], following, self._in_use(class_id))

    def _in_use(self, class_id: RowClassId) -> list[Keys]:
        """The keys of batches before this one whose step has not been made."""
        lookups = self._pending.entries
        return [one.keys for one in lookups if one.table.class_id == class_id]

    def _known(self, keys: KeysByClass) -> Iterable[KeysByClass]:
        """The batches known to follow that of these keys. Waits for the thread that plans, as the
        loop does for its batches: as long as the data takes.
        """
        with self._planned:
            self._planned.wait_for(lambda: self._is_complete or len(self._plans) > self.lookahead)
            if self._plans and all(self._plans[0][c] is keys[c] for c in keys):
                self._plans.popleft()
                return list(islice(self._plans, self.lookahead))
            return []  # of a loop without a pipeline

    def _union(self, batches: Sequence[KeysByClass]) -> dict[RowClassId, Keys]:
        """The distinct keys of several batches."""
        return {
            class_id: _core.distinct([one.get(class_id, NO_KEYS) for one in batches], self._pool)
            for class_id in self._classes
        }

    # ---- blocks ----

    def _make_blocks(self, batches: list[KeysByClass]) -> None:
        """Divide the memory among the row classes as these batches need it. A class that they say
        nothing of, as of a loop that looks up one table after the other, gets room for as many rows
        as the others have on average.
        """
        num_keys = {class_id: len(keys) for class_id, keys in self._union(batches).items()}
        some = [num for num in num_keys.values() if num]
        usual = -(-sum(some) // max(1, len(some)))
        needs, row_bytes = {}, {}
        for class_id, num in num_keys.items():
            row_bytes[class_id] = self._layout(class_id).device_bytes
            needs[class_id] = max(1, num or usual) * row_bytes[class_id]
        for class_id, need in needs.items():
            num_rows = int(self._num_bytes * (need / sum(needs.values()))) // row_bytes[class_id]
            num_rows = min(num_rows, SLOTS_MAX)
            if num_rows == 0:
                raise ResourceExhausted(
                    f"window on a device: expected memory for rows of {row_bytes[class_id]} bytes"
                    f" of table {class_id.table!r}, found {self._num_bytes} bytes in all"
                )
            layout = self._layout(class_id)
            self.blocks[class_id] = WindowBlock(
                self._schemas[class_id.table],
                RowBlock(
                    layout, layout.zeros(num_rows, self._device), self._device, threads=self._pool
                ),
                self._begin.versions[class_id.table],
                self._pool,
                partial(self._fetch, class_id),
                partial(self._give_back, class_id),
            )

    def _layout(self, class_id: RowClassId) -> BlockLayout:
        return BlockLayout.of(self._schemas[class_id.table], class_id.row_class)

    def _fetch(self, class_id: RowClassId, keys_K: Keys) -> WideRows:
        read = self.read(class_id, keys_K).part()
        return rows_or_new(read, self._layout(class_id), keys_K, self._pool)

    def _give_back(self, class_id: RowClassId, keys_K: Keys, rows: WideRows) -> None:
        send_wide_rows(self._client, class_id, keys_K, rows, self._pool, self._id)

    def weights_elsewhere(self, class_id: RowClassId, keys_K: Keys) -> Tensor:
        return self._layout(class_id).split(self._fetch(class_id, keys_K), self._pool).weights

    # ---- the end ----

    def check_unchanged(self) -> None:
        """As there. Raises BadRequest: the end has failed before, and the servers have dropped
        all.
        """
        if self._opens and not self._is_open:
            raise BadRequest(
                "end_pass: expected a window whose end has not failed, found one that the servers"
                " have dropped: call abandon_pass, and train on its data again"
            )
        super().check_unchanged()

    def import_id(self) -> str:
        return self._id

    @contextmanager
    def ending(self, id: str, blocks: BlockTensors, decide: Callable[[str], bool]) -> Iterator[str]:
        """As there, of the import that has begun with the window."""
        self._is_open, self._decide = False, decide
        self._blocks_at_end.update(blocks)
        with self._import:
            yield id

    def close(self) -> None:
        """As there; rows that were given back without an end are dropped."""
        super().close()
        if not self._is_open:
            return
        self._is_open = False
        with suppress(_Abandoned), self._import:
            raise _Abandoned


class _Abandoned(Exception):
    """Ends the import of a window that does not come to its end."""
