"""Rows of an import: they gather in a table of their own, which nobody reads, and come into the
served table when all of them are valid.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from trireme import _core
from trireme.errors import BadRequest, DataError
from trireme.protocol.routing import NUM_BUCKETS, Keys, buckets_of
from trireme.rows.wide_rows import RowLayout, WideRows
from trireme.server.served_tables import ServedTable
from trireme.server.state import ServerState
from trireme.table import TableSchema

KeyedRows = tuple[Keys, npt.NDArray[np.uint8], WideRows]  # keys, row classes, wide rows

PENDING_BYTES = 32 << 20
NO_KEYS = np.empty(0, np.uint64)


class DuplicateKey(DataError):
    """A key occurs twice; its bucket, where it is known."""

    def __init__(self, message: str, bucket: int | None) -> None:
        super().__init__(message)
        self.bucket = bucket


@dataclass
class StagedRows:
    """Imported rows of one table on one server. Threads: any may put.

    with_room: of the server.
    id: of the import, where its worker has named it.
    is_of_pass: the import ends a pass on a device, so that others may not add to it.
    wanted: (4096,) uint8: 1 for the buckets that this server owns.
    num_put: rows put so far; a key that comes twice counts twice. files: where they are from.
    """

    schema: TableSchema
    rows: _core.Table
    with_room: Callable[[Callable[[], object]], object]
    wanted: npt.NDArray[np.uint8]
    id: str = ""
    is_of_pass: bool = False
    num_put: int = 0
    files: list[str] = field(default_factory=list)
    _pending: list[KeyedRows] = field(default_factory=list)
    _pending_bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def of(cls, server: ServerState, table: ServedTable, id: str) -> StagedRows:
        wanted = np.zeros(NUM_BUCKETS, np.uint8)
        wanted[server.assignment.owned_buckets()] = 1
        return cls(table.schema, server.make_rows(table.schema), server.with_room, wanted, id)

    def is_named(self, id: object) -> bool:
        """Whether a request with this id, None where it has none, is of this import."""
        return id == self.id or (id is None and not self.is_of_pass)

    @property
    def layout(self) -> RowLayout:
        return RowLayout.of(self.schema, self.rows)

    def put(self, keys: Keys, classes: npt.NDArray[np.uint8], rows: WideRows) -> None:
        """Add rows of keys that this server owns. Raises DataError: a key occurs twice, as far as
        that is known already.
        """
        with self._lock:
            self._pending.append((keys, classes, rows))
            self._pending_bytes += rows.nbytes
            self.num_put += len(keys)
            is_full = self._pending_bytes >= PENDING_BYTES
        if is_full:
            self.flush()

    def flush(self) -> None:
        """Put all pending rows into the table, bucket by bucket. Raises DataError as `put`."""
        with self._lock:
            ready, self._pending, self._pending_bytes = self._pending, [], 0
        if not sum(len(keys) for keys, _, _ in ready):
            return
        keys, classes, rows = (np.concatenate(arrays) for arrays in zip(*ready, strict=True))
        buckets = buckets_of(keys)
        order = np.argsort(buckets, kind="stable")
        keys, classes, rows, buckets = keys[order], classes[order], rows[order], buckets[order]
        ends = np.flatnonzero(np.diff(buckets)) + 1
        for low, high in pairwise([0, *ends.tolist(), len(keys)]):
            one, bucket = slice(low, high), int(buckets[low])
            try:
                columns = (keys[one], classes[one], rows[one])
                self.with_room(partial(self.rows.apply, bucket, *columns, NO_KEYS))
            except BadRequest as error:
                message = f"import of table {self.schema.name!r}: {error}"
                raise DuplicateKey(message, bucket) from error
