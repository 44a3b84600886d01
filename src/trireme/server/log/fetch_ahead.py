"""Reads rows on SSD that records of the log will change, before these are replayed.

Many records are looked at together, and the pages of all their rows are read at once, in the order
in which they lie: of many rows, many share a page or lie in neighbouring ones. Read for one record
after the other, each row would cost a read of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

import numpy as np

from trireme import _core
from trireme.errors import BadRequest, TriremeError
from trireme.protocol.wire import Array, Push
from trireme.server.log.segment import Record
from trireme.server.state import ServerState

log = logging.getLogger("trireme.server")

_RECORDS_MAX = 4096  # of a window
_FETCHED_SHARE = 4  # of a table's memory for rows: what those that are fetched take of it

_KEEPS_TABLES = ("log.step", "log.version", "log.forget", "ps.group", "server.alive")
"""Other records than pushes that a window may have before its end: they make no table."""


def fetch_ahead(
    server: ServerState, records: Iterable[tuple[int, Record]]
) -> Iterator[tuple[int, Record]]:
    """The same records, in the same order. Before those of a window are returned, the rows that
    they push to are in memory, as far as the tables exist and there is room.
    """
    if server.tier is None:
        yield from records
        return
    window = _RecordsAhead(server)
    for at, record in records:
        window.add(at, record)
        if window.is_full:
            yield from window.fetched()
            window = _RecordsAhead(server)
    yield from window.fetched()


class _RecordsAhead:
    """is_full: it has as many records, or keys of a table, as it may."""

    def __init__(self, server: ServerState) -> None:
        self._server = server
        self._records: list[tuple[int, Record]] = []
        self._tables: dict[_core.Table, _Wanted] = {}
        self.is_full = False

    def add(self, at: int, record: Record) -> None:
        self._records.append((at, record))
        self.is_full |= len(self._records) >= _RECORDS_MAX
        if record[0] != "ps.push":
            self.is_full |= record[0] not in _KEEPS_TABLES
            return
        try:
            push = Push.from_wire(*record[1:])
        except BadRequest:  # whoever replays it gets the error too
            return
        for part in push.tables:
            table = self._server.tables.get(part.table)
            if table is not None and table.rows.tier is not None:
                if table.rows not in self._tables:
                    self._tables[table.rows] = _Wanted(table.rows)
                wanted = self._tables[table.rows]
                wanted.add(part.keys, self._server.pool)
                self.is_full |= wanted.is_full

    def fetched(self) -> Iterator[tuple[int, Record]]:
        if len(self._records) > 1:  # else the replay itself fetches the same
            for wanted in self._tables.values():
                wanted.fetch(self._server.pool)
        yield from self._records


class _Wanted:
    """Rows of one table that the records of a window push to."""

    def __init__(self, rows: _core.Table) -> None:
        use = rows.tier
        assert use is not None
        self._rows = rows
        self._keys: list[Array] = []  # of those on SSD
        # More rows of all kinds than fit into memory would drive out those that are fetched.
        self._num_left = max(use["memory_bytes"] - use["own_bytes"], 0) // rows.row_bytes
        self._num_fetched_left = self._num_left // _FETCHED_SHARE

    @property
    def is_full(self) -> bool:
        return self._num_left <= 0 or self._num_fetched_left <= 0

    def add(self, keys: Array, pool: _core.Pool) -> None:
        on_ssd = self._rows.note_uses(keys, pool)
        self._keys.append(on_ssd)
        self._num_left -= len(keys)
        self._num_fetched_left -= len(on_ssd)

    def fetch(self, pool: _core.Pool) -> None:
        """The order of buckets is about that in which their pages lie."""
        keys = _core.unique(np.concatenate(self._keys), pool)[0]
        self._keys.clear()
        try:
            self._rows.fetch(keys, pool)
        except TriremeError as error:  # the record that needs the rows gets it too
            log.warning("log: rows cannot be read ahead: %s", error)
