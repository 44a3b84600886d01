"""Rows of an import: they gather in a table of their own, which nobody reads, and come into the
served table when all of them are valid.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np
import numpy.typing as npt

from trireme import _core
from trireme.protocol.routing import NUM_BUCKETS, Keys
from trireme.rows.wide_rows import RowLayout, WideRows
from trireme.server.prepared_import import RowPart
from trireme.server.served_tables import ServedTable
from trireme.server.state import ServerState

PENDING_BYTES = 32 << 20


@dataclass
class StagedRows:
    """Imported rows of one table on one server. Threads: any may put.

    table: where they will come. id: of the import.
    is_read: whether rows are read, or come twice, before the end of the import.
    parts: rows as they came, with those that are not in `rows`.
    wanted: (4096,) uint8: 1 for the buckets that this server owns.
    num_put: rows put so far; a key that comes twice counts twice. files: where they are from.
    """

    server: ServerState
    table: ServedTable
    rows: _core.Table
    wanted: npt.NDArray[np.uint8]
    id: str
    is_read: bool
    parts: list[RowPart] = field(default_factory=list)
    num_put: int = 0
    files: list[str] = field(default_factory=list)
    _pending: list[RowPart] = field(default_factory=list)
    _pending_bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def of(cls, server: ServerState, table: ServedTable, id: str, *, is_read: bool) -> StagedRows:
        wanted = np.zeros(NUM_BUCKETS, np.uint8)
        wanted[server.assignment.owned_buckets()] = 1
        rows = server.make_rows(table.schema)
        rows.raise_version(table.rows.version)  # of all that comes
        return cls(server, table, rows, wanted, id, is_read)

    @cached_property
    def wants_all(self) -> bool:
        return bool(self.wanted.all())

    @property
    def layout(self) -> RowLayout:
        return RowLayout.of(self.table.schema, self.rows)

    def put(self, keys: Keys, classes: npt.NDArray[np.uint8], rows: WideRows) -> None:
        """Add rows of keys that this server owns."""
        with self._lock:
            self._pending.append(RowPart(keys, classes, rows))
            self._pending_bytes += rows.nbytes
            self.num_put += len(keys)
            is_full = self._pending_bytes >= PENDING_BYTES
        if is_full:
            self.flush()

    def put_part(self, part: RowPart) -> None:
        """Add rows, which may replace others of the same keys. Those that nobody reads wait as they
        came, unless they belong on SSD.
        """
        if self.is_read or self.rows.tier is not None:
            self.server.with_room(partial(part.write_to, self.rows, self.server.pool))
            return
        self.rows.check_wide(part.keys, part.classes, part.rows, self.server.pool)
        with self._lock:
            self.parts.append(part)

    @property
    def bytes(self) -> int:
        """Of memory."""
        with self._lock:
            return self.rows.bytes + sum(part.rows.nbytes for part in self.parts)

    def flush(self) -> None:
        """Put all pending rows into the table. A key that occurs twice gets one row, so the table
        has fewer than were put.
        """
        with self._lock:
            ready, self._pending, self._pending_bytes = self._pending, [], 0
        if ready:
            part = RowPart(*(np.concatenate(arrays) for arrays in zip(*ready, strict=True)))
            self.server.with_room(partial(part.write_to, self.rows, self.server.pool))
