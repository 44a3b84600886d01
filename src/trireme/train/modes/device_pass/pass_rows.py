"""The rows of a pass over known data: brought to the device from the servers, or from the pass
before.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from trireme.bounded_queue import ReadAhead
from trireme.device import BlockLayout, RowBlock
from trireme.errors import Unavailable
from trireme.job.cluster import Cluster
from trireme.protocol.pass_lease import PassLease
from trireme.protocol.routing import Keys
from trireme.rows.wide_rows import WideRows
from trireme.table import RowClassId
from trireme.train.modes.device_pass.block_of_keys import BlockOfKeys, rows_or_new
from trireme.train.modes.device_pass.key_slots import KeySlots
from trireme.train.modes.device_pass.rows_on_device import Moment, RowsOnDevice
from trireme.train.modes.setup import TrainingSetup
from trireme.train.pass_data import PassData
from trireme.worker.gradients import KeysByClass
from trireme.worker.whole_rows import ReadPart, ReadRows, read_parts

log = logging.getLogger("trireme.train")

Stop: TypeAlias = Callable[[], bool]


@dataclass(frozen=True, eq=False)
class RowsAhead:
    """Rows of U distinct keys. lacking: (n,) positions of keys that the pass under way lacks.
    read: their rows.
    """

    keys: Keys
    lacking: npt.NDArray[np.intp]
    read: ReadRows


class NextPass:
    """The pass that follows: its keys, and the rows that the pass under way does not have, are read
    in a thread while that one trains.

    held: the keys of the pass under way. read: reads rows from the servers.
    """

    def __init__(
        self,
        cluster: Cluster,
        data: PassData,
        held: KeysByClass,
        read: Callable[[RowClassId, Keys, Stop], ReadRows],
    ) -> None:
        self.data = data
        self._cluster, self._held, self._read = cluster, held, read
        self._stop = threading.Event()
        self._ahead = ReadAhead(
            self._prepare(), depth=1, name="trireme-next-pass", stop=self._stop.set
        )
        cluster.add_running(self.close)

    def _prepare(self) -> Iterator[dict[RowClassId, RowsAhead]]:
        prepared, stop = {}, self._stop.is_set
        for class_id, keys_U in self.data.keys(stop).items():
            held = self._held.get(class_id, keys_U[:0])
            lacking = np.flatnonzero(~np.isin(keys_U, held, assume_unique=True))
            prepared[class_id] = RowsAhead(
                keys_U, lacking, self._read(class_id, keys_U[lacking], stop)
            )
        yield prepared

    def wait(self) -> dict[RowClassId, RowsAhead] | None:
        """What was read, once; None: servers could not be read. Raises the error of the data."""
        try:
            return next(self._ahead)
        except Unavailable as error:
            log.info("pass on a device: its rows were not read ahead: %s", error)
            return None
        finally:
            self.close()

    def close(self) -> None:
        """End the thread after what it reads now."""
        self._cluster.take_back(self.close)
        self._ahead.close()


class PassRows(RowsOnDevice):
    """Reads all that the data needs.

    before: of the last pass, which gives up its rows; None: it had none.

    Raises BadRequest: a row does not fit into a block. Unavailable: somebody changes the rows.
    """

    def __init__(
        self,
        setup: TrainingSetup,
        data: PassData,
        device: torch.device,
        before: RowsOnDevice | None,
        lease: PassLease | None,
    ) -> None:
        super().__init__(setup, device, lease)
        self._next: NextPass | None = None
        self._end: Moment | None = None  # where a pass follows
        self._memory: dict[RowClassId, WideRows] = {}  # for the blocks; then those of this pass
        ahead = None
        if isinstance(before, PassRows):
            self._memory, before._memory = before._memory, {}
            ahead = before._take_ahead(data, self._begin)
        if before is None or ahead is None:
            for class_id, keys_U in data.keys().items():
                self.blocks[class_id] = self._new(class_id, keys_U)
        else:
            for class_id, rows in ahead.items():
                old = before.blocks.get(class_id)
                self.blocks[class_id] = self._following(old, class_id, rows)
        self._memory.clear()
        if before is not None:
            before.close()

    # ---- blocks ----

    def _new(self, class_id: RowClassId, keys_U: Keys, read: ReadRows | None = None) -> BlockOfKeys:
        """read: the rows of the keys; None: they are to be read."""
        schema = self._schemas[class_id.table]
        layout = BlockLayout.of(schema, class_id.row_class)
        memory = self._memory.pop(class_id, None)
        room = layout.room(len(keys_U), self._device, memory)
        block = RowBlock(layout, room, self._device, threads=self._pool)
        wide = block.wide_rows

        def take(part: ReadPart) -> None:
            rows = rows_or_new(part, layout, keys_U, self._pool)
            if wide is None or not np.may_share_memory(rows, wide):
                block.fill(torch.from_numpy(part.positions).to(self._device), rows)

        if read is None:
            read_parts(self._reading(class_id), keys_U, take, wide)
        else:
            take(read.part())
        version = self._begin.versions[class_id.table]
        return BlockOfKeys(schema, KeySlots(keys_U, self._pool), block, version, self._pool)

    def _following(
        self, old: BlockOfKeys | None, class_id: RowClassId, ahead: RowsAhead
    ) -> BlockOfKeys:
        if old is None:
            return self._new(class_id, ahead.keys, ahead.read)
        layout = BlockLayout.of(self._schemas[class_id.table], class_id.row_class)
        keys = ahead.keys[ahead.lacking]
        rows = rows_or_new(ahead.read.part(), layout, keys, self._pool)
        version = self._begin.versions[class_id.table]
        return old.following(ahead.keys, ahead.lacking, rows, version)

    # ---- the batches ----

    def begin_run(self) -> None:
        for block in self.blocks.values():
            block.forget_plans()

    def plan(self, keys: KeysByClass | None) -> None:
        """Find the slots of the batch, while an earlier one is trained on."""
        for class_id, keys_K in (keys or {}).items():
            if class_id in self.blocks and len(keys_K):
                self.blocks[class_id].plan(keys_K)

    # ---- the next pass ----

    def read_ahead(self, data: PassData) -> None:
        held = {class_id: block.slots.keys for class_id, block in self.blocks.items()}
        self._next = NextPass(self._cluster, data, held, partial(self.read, aside=True))

    def _take_ahead(self, data: PassData, now: Moment) -> dict[RowClassId, RowsAhead] | None:
        """What was read for a pass over this data, if it is as of `now`."""
        following, self._next = self._next, None
        if following is None:
            return None
        if following.data.dataset is not data.dataset:
            log.info("pass on a device: begun with other data than its rows were read ahead for")
            following.close()
            return None
        ahead = following.wait()
        if ahead is None:
            return None
        # What this pass lacked, it has not changed: it may have been read before the end, or after.
        are_as_now = all(
            one.read.marks in (self._begin.marks[class_id.table], now.marks[class_id.table])
            for class_id, one in ahead.items()
        )
        if are_as_now and self._end is not None and self._end.marks == now.marks:
            return ahead
        log.info("pass on a device: its rows are read again, they may have changed meanwhile")
        return None

    # ---- the end ----

    def note_end(self) -> None:
        """As there; but rows stay if a pass follows, else on the CPU their memory: the system would
        clear other memory for the next pass.
        """
        if self._next is None:
            memory = {class_id: block.wide_rows for class_id, block in self.blocks.items()}
            self._memory = {class_id: rows for class_id, rows in memory.items() if rows is not None}
            self.close()
            return
        self._end = end = self._moment()
        if end.versions != self._begin.versions:  # the servers have stamped them otherwise
            self.close()

    def close(self) -> None:
        """As there; and read no more."""
        super().close()
        if self._next is not None:
            self._next.close()
            self._next = None
