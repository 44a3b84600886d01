"""A worker's rows of all tables within a budget: the least recently touched leave first."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from trireme import _core
from trireme.errors import ResourceExhausted
from trireme.protocol.gradients import KeysByClass, TableGradient
from trireme.protocol.routing import Floats, Keys
from trireme.table import RowClassId, Table
from trireme.train.modes.geo.rows import CachedRows, Found

WINDOWS_MAX = 1 << 24  # clocks are floats


class RowCache:
    """Rows of several tables, by `Table.class_id`. One thread uses it, `find` any.

    Args:
        budget: bytes that all rows may take. The rows of one window stay until it has ended.

    Attributes:
        window: number of the window, from 1.
        budget: as given.
        num_evicted: rows that have left, with or without optimizer state; num_lost: with it.
    """

    def __init__(self, tables: Iterable[Table], pool: _core.Pool, budget: int) -> None:
        self.tables = {
            part.class_id: CachedRows(part, pool) for table in tables for part in table.parts
        }
        self.window, self.num_evicted, self.num_lost = 1, 0, 0
        self.budget = budget
        # (window, part, keys) of the windows that have ended, the oldest first; a key that was
        # touched again later is also in a later one, which counts.
        self._queue: deque[tuple[int, RowClassId, Keys]] = deque()
        self._num_queued = 0

    @property
    def num_bytes(self) -> int:
        """What the rows count for."""
        return sum(rows.num_rows * rows.row_bytes for rows in self.tables.values())

    @property
    def has_touched(self) -> bool:
        """Whether the window has rows."""
        return any(rows.num_touched for rows in self.tables.values())

    def find(self, keys: KeysByClass) -> dict[RowClassId, Found]:
        """Per part what the window has, until rows are touched or it ends."""
        return {part: self.tables[part].find(keys_K, self.window) for part, keys_K in keys.items()}

    def make_room(self, found: Mapping[RowClassId, Found]) -> bool:
        """Let rows go until all that are missing fit; False: the window must end first.

        Raises:
            ResourceExhausted: they do not fit into the whole budget.
        """
        needed = sum(len(of.missing) * self.tables[part].row_bytes for part, of in found.items())
        while self.num_bytes + needed > self.budget and self._queue:
            self._evict(self.num_bytes + needed - self.budget)
        if self.num_bytes + needed <= self.budget:
            return True
        if self.has_touched:
            return False
        raise ResourceExhausted(
            f"geo: expected room for the rows of a batch, {needed} bytes, found cache_bytes"
            f" {self.budget}; use smaller batches or Strategy('geo', cache_bytes=...)"
        )

    def touch(
        self, found: Mapping[RowClassId, Found], weights: Mapping[RowClassId, Floats]
    ) -> None:
        """The window has these rows from now on. weights: per part those that were missing."""
        for part, of in found.items():
            self.tables[part].touch(of, weights[part], self.window)

    def differences(self) -> dict[RowClassId, TableGradient]:
        """Per part, of the rows that the window has updated."""
        found = {part: rows.differences() for part, rows in self.tables.items()}
        return {part: gradient for part, gradient in found.items() if gradient is not None}

    def end_window(self) -> None:
        """The differences have been exchanged."""
        for part, rows in self.tables.items():
            if len(keys := rows.end_window()):
                self._queue.append((self.window, part, keys))
                self._num_queued += len(keys)
        self.window += 1
        if self.window == WINDOWS_MAX:
            self.clear()
        if self._num_queued > 2 * sum(rows.num_rows for rows in self.tables.values()):
            self._compact()

    def clear(self) -> None:
        """Let all rows go, none being in a window; they count as evicted."""
        while self._queue:
            self._evict(self.num_bytes)
        self.window = 1

    def _evict(self, num_bytes: int) -> None:
        """Let the rows of the oldest window go whom no later one has touched, or as many of them as
        make so many bytes.
        """
        window, part, keys = self._queue.popleft()
        self._num_queued -= len(keys)
        rows = self.tables[part]
        keys = keys[rows.touched_at(keys) == window]
        count = -(-num_bytes // rows.row_bytes)
        if count < len(keys):
            rest = keys[count:]
            self._queue.appendleft((window, part, rest))
            self._num_queued += len(rest)
        erased = rows.erase(keys[:count])
        self.num_evicted += erased
        self.num_lost += erased * rows.has_state

    def _compact(self) -> None:
        """Forget in the queue what later windows have touched."""
        compacted: deque[tuple[int, RowClassId, Keys]] = deque()
        for window, part, keys in self._queue:
            kept = keys[self.tables[part].touched_at(keys) == window]
            if len(kept):
                compacted.append((window, part, kept))
        self._queue = compacted
        self._num_queued = sum(len(keys) for _, _, keys in compacted)
