"""The rows of a pass on a device: brought there from the servers, or from the pass before."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from trireme.device import BlockLayout, RowBlock
from trireme.errors import BadRequest
from trireme.protocol.routing import Keys
from trireme.rows.wide_rows import WideRows
from trireme.table import RowClassId
from trireme.train.modes.device_pass.block_of_keys import BlockOfKeys, rows_or_new
from trireme.train.modes.device_pass.next_pass import NextPass, RowsAhead, Stop
from trireme.train.modes.setup import TrainingSetup
from trireme.train.pass_data import PassData
from trireme.worker.whole_rows import Marks, ReadRows, have_changed, never, read_wide_rows

log = logging.getLogger("trireme.train")

NO_KEYS = np.empty(0, np.uint64)


class Moment(NamedTuple):
    """Of the tables: their marks, and the version that rows which change now are stamped with."""

    marks: dict[str, Marks]
    versions: dict[str, int]


class PassRows:
    """Reads what the data needs.

    blocks: by row class.
    before: of the last pass; gives up its rows.

    Raises BadRequest: a row does not fit into a block. Unavailable: somebody changes the rows.
    """

    def __init__(
        self, setup: TrainingSetup, data: PassData, device: torch.device, before: PassRows | None
    ) -> None:
        self._client, self._pool = setup.cluster.client, setup.cluster.pool
        self._cluster, self._device = setup.cluster, device
        self._schemas = {table.name: table.schema for table in setup.tables}
        self._next: NextPass | None = None
        self._begin = self._moment()
        self._end: Moment | None = None  # where a pass follows
        ahead = None if before is None else before._take_ahead(data, self._begin)
        self.blocks: dict[RowClassId, BlockOfKeys] = {}
        if ahead is None:
            for class_id, keys_U in data.keys().items():
                self.blocks[class_id] = self._new(class_id, keys_U, self._read(class_id, keys_U))
        else:
            old = {} if before is None else before.blocks
            for class_id, rows in ahead.items():
                self.blocks[class_id] = self._following(old.get(class_id), class_id, rows)
        if before is not None:
            before.close()

    # ---- blocks ----

    def _new(self, class_id: RowClassId, keys_U: Keys, read: ReadRows) -> BlockOfKeys:
        schema = self._schemas[class_id.table]
        rows = rows_or_new(read, schema, class_id, keys_U, self._pool)
        block = RowBlock(BlockLayout.of(schema, class_id.row_class), rows, self._device)
        version = self._begin.versions[class_id.table]
        return BlockOfKeys(schema, keys_U, block, version, self._pool)

    def _following(
        self, old: BlockOfKeys | None, class_id: RowClassId, ahead: RowsAhead
    ) -> BlockOfKeys:
        if old is None:
            return self._new(class_id, ahead.keys, ahead.read)
        schema, keys = self._schemas[class_id.table], ahead.keys[ahead.lacking]
        rows = rows_or_new(ahead.read, schema, class_id, keys, self._pool)
        version = self._begin.versions[class_id.table]
        return old.following(ahead.keys, ahead.lacking, rows, version)

    # ---- the servers ----

    def _read(
        self, class_id: RowClassId, keys_K: Keys, stop: Stop = never, *, aside: bool = False
    ) -> ReadRows:
        row_bytes = BlockLayout.of(self._schemas[class_id.table]).wide.row_bytes
        return read_wide_rows(
            self._client, class_id.table, keys_K, row_bytes, self._pool, aside=aside, stop=stop
        )

    def _moment(self) -> Moment:
        read = {name: self._read(RowClassId(name, 0), NO_KEYS) for name in self._schemas}
        return Moment(
            {name: one.marks for name, one in read.items()},
            {name: one.version for name, one in read.items()},
        )

    # ---- the next pass ----

    def read_ahead(self, data: PassData) -> None:
        """Read for the pass that follows, beside training."""
        held = {class_id: block.slots.keys for class_id, block in self.blocks.items()}
        self._next = NextPass(self._cluster, data, held, partial(self._read, aside=True))

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
        marks = {class_id.table: one.read.marks for class_id, one in ahead.items()}
        are_as_begun = all(self._begin.marks[name] == mark for name, mark in marks.items())
        if are_as_begun and self._end is not None and self._end.marks == now.marks:
            return ahead
        log.info("pass on a device: its rows are read again, they may have changed meanwhile")
        return None

    # ---- the end ----

    def check_unchanged(self) -> None:
        """Raises BadRequest: somebody else has changed rows since the beginning."""
        now = self._moment().marks
        if changed := [n for n, marks in self._begin.marks.items() if have_changed(marks, now[n])]:
            raise BadRequest(
                f"end_pass: expected rows of tables {changed} that nobody else changes within a"
                " pass on a device, found that somebody did, by an import, say, which the end would"
                " overwrite: call abandon_pass"
            )

    def changed(self) -> Iterator[tuple[RowClassId, Keys, WideRows]]:
        """The rows that the pass has updated."""
        for class_id, block in self.blocks.items():
            yield (class_id, *block.changed())

    def note_end(self) -> None:
        """The servers have the rows now. They stay here if a pass follows."""
        if self._next is None:
            self.close()
            return
        self._end = end = self._moment()
        if end.versions != self._begin.versions:  # the servers have stamped them otherwise
            self.close()

    def close(self) -> None:
        """Give the device's memory back, and read no more."""
        if self._next is not None:
            self._next.close()
            self._next = None
        self.blocks = {}
