"""A window: the device has the rows of the next batches of a stream, within a fixed memory.

Rows that leave the device are returned to the servers early, into the import that ends the pass:
nobody else sees them before, and this worker reads them again from there. So a window gives what a
pass over the same data does, and is all or nothing as that is.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import islice

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
from trireme.table import RowClassId
from trireme.train.modes.device_pass.block_of_keys import rows_or_new
from trireme.train.modes.device_pass.rows_on_device import RowsOnDevice
from trireme.train.modes.device_pass.window_block import WindowBlock
from trireme.train.modes.setup import TrainingSetup
from trireme.train.pass_data import WindowSize
from trireme.worker.gradients import KeysByClass

log = logging.getLogger("trireme.train")


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
        batches = self._known(keys)
        if not self.blocks:
            self._make_blocks(batches)
        for class_id, block in self.blocks.items():
            of_class = [batch[class_id] for batch in batches if class_id in batch]
            if class_id in keys and len(keys[class_id]):
                assert isinstance(block, WindowBlock)
                block.bring(of_class, self._in_use(class_id))

    def _in_use(self, class_id: RowClassId) -> list[Keys]:
        """The keys of batches before this one whose step has not been made."""
        lookups = self._pending.entries
        return [one.keys for one in lookups if one.table.class_id == class_id]

    def _known(self, keys: KeysByClass) -> list[KeysByClass]:
        """The batch of these keys, and those known to follow. Waits for the thread that plans, as
        the loop does for its batches: as long as the data takes.
        """
        with self._planned:
            self._planned.wait_for(lambda: self._is_complete or len(self._plans) > self.lookahead)
            if not self._plans or any(self._plans[0][c] is not keys[c] for c in keys):
                return [keys]  # of a loop without a pipeline
            known = list(islice(self._plans, self.lookahead + 1))
            self._plans.popleft()
            return known

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
    def ending(
        self, id: str, blocks: BlockTensors, decide: Callable[[str], bool]
    ) -> Iterator[None]:
        """As there, of the import that has begun with the window."""
        self._is_open, self._decide = False, decide
        self._blocks_at_end.update(blocks)
        with self._import:
            yield

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
