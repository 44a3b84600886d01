"""The rows that a pass trains on a device: what all ways to bring them there share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor

from trireme.device import BlockLayout
from trireme.errors import BadRequest
from trireme.interchange.worker_side.import_requests import importing, new_id, send_wide_rows
from trireme.protocol.block_messages import BlockTensors
from trireme.protocol.pass_lease import PassLease
from trireme.protocol.routing import NO_KEYS, Keys
from trireme.table import RowClassId
from trireme.train.modes.device_pass.block_of_keys import BlockOfKeys
from trireme.train.modes.setup import TrainingSetup
from trireme.train.pass_data import PassData
from trireme.worker.gradients import KeysByClass
from trireme.worker.whole_rows import Marks, Reading, ReadRows, have_changed, never, read_wide_rows


class Moment(NamedTuple):
    """Of the tables: their marks, and the version that rows which change now are stamped with."""

    marks: dict[str, Marks]
    versions: dict[str, int]


class RowsOnDevice:
    """lease: of the pass; None: another worker has it for all.

    blocks: by row class.

    can_give_again: an end that failed may be repeated.
    lookahead: batches that are planned ahead of the one that is trained on, at least.
    staged: the id of an import which has some of the rows already.
    """

    can_give_again = True
    lookahead = 0
    staged: str | None = None

    def __init__(self, setup: TrainingSetup, device: torch.device, lease: PassLease | None) -> None:
        self._cluster, self._device, self._lease = setup.cluster, device, lease
        self._client, self._pool = setup.cluster.client, setup.cluster.pool
        self._schemas = {table.name: table.schema for table in setup.tables}
        self._begin = self._moment()
        self.blocks: dict[RowClassId, BlockOfKeys] = {}

    # ---- the batches ----

    def begin_run(self) -> None:
        """Batches come now whose keys are planned ahead."""

    def plan(self, keys: KeysByClass | None) -> None:
        """The keys of a batch to come, in order; None: there are no more. Any thread."""

    def bring(self, keys: KeysByClass) -> None:
        """Have the rows of the next batch."""

    def read_ahead(self, data: PassData) -> None:
        """Read for the pass that follows, during training. Raises BadRequest: this one cannot."""
        raise BadRequest(f"begin_pass: expected a pass to follow one, found none ({data})")

    # ---- the servers ----

    def read(
        self,
        class_id: RowClassId,
        keys_K: Keys,
        stop: Callable[[], bool] = never,
        *,
        aside: bool = False,
    ) -> ReadRows:
        """Read rows from the servers, see `read_wide_rows`."""
        return read_wide_rows(self._reading(class_id, stop, aside=aside), keys_K)

    def _reading(
        self, class_id: RowClassId, stop: Callable[[], bool] = never, *, aside: bool = False
    ) -> Reading:
        return Reading(
            client=self._client,
            table=class_id.table,
            row_bytes=BlockLayout.of(self._schemas[class_id.table]).wide.row_bytes,
            pool=self._pool,
            aside=aside,
            stop=stop,
            staged=self.staged,
        )

    def weights_elsewhere(self, class_id: RowClassId, keys_K: Keys) -> Tensor | None:
        """(K, D) on the CPU: of keys that the blocks lack; None: as outside of the pass."""
        return None

    def _moment(self) -> Moment:
        read = {name: self.read(RowClassId(name, 0), NO_KEYS) for name in self._schemas}
        return Moment(
            {name: one.marks for name, one in read.items()},
            {name: one.version for name, one in read.items()},
        )

    def check_unchanged(self) -> None:
        """Raises BadRequest: rows have changed since the beginning, as by a push that a server was
        applying when it gave the lease.
        """
        now = self._moment().marks
        if changed := [n for n, marks in self._begin.marks.items() if have_changed(marks, now[n])]:
            raise BadRequest(
                f"end_pass: expected rows of tables {changed} that nobody else changes within a"
                " pass on a device, found that somebody did, by an import, say, which the end would"
                " overwrite: call abandon_pass"
            )

    # ---- the end ----

    def import_id(self) -> str:
        """The id of the import that the next end makes."""
        return new_id()

    def ending(
        self, id: str, blocks: BlockTensors, decide: Callable[[str], bool]
    ) -> AbstractContextManager[str]:
        """The import that ends the pass, to which the block sends rows. decide: see `importing`."""
        return importing(
            self._client,
            list(self._schemas),
            replace=False,
            blocks=blocks,
            id=id,
            decide=decide,
            is_read=False,
            lease=self._lease,
        )

    def send(self, id: str) -> None:
        """Send the rows that have changed to the servers, for the import `id`."""
        for class_id, block in self.blocks.items():
            for keys, rows in block.changed():
                send_wide_rows(self._client, class_id, keys, rows, self._pool, id)

    def note_end(self) -> None:
        """The servers have the rows now."""
        self.close()

    def close(self) -> None:
        """Give the device's memory back."""
        self.blocks = {}
