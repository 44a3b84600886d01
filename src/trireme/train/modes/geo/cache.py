"""A worker's rows of all tables within a budget: the least recently touched rows leave first."""

from collections import deque
from collections.abc import Iterable, Mapping

from trireme import _core
from trireme.errors import ResourceExhausted
from trireme.protocol.routing import Floats, Keys
from trireme.table import RowClassId, Table
from trireme.train.modes.geo.rows import CachedKeys, CachedRows
from trireme.worker.gradients import KeysByClass, TableGradient

WINDOWS_MAX = 1 << 24  # clocks are floats


class RowCache:
    """Rows of several tables, by `Table.class_id`. One thread uses it; any may `find`.

    budget: bytes of all rows. The rows of one window stay until it has ended.
    """

    def __init__(self, tables: Iterable[Table], pool: _core.Pool, budget: int) -> None:
        self.tables = {
            part.class_id: CachedRows(part, pool) for table in tables for part in table.parts
        }
        self.budget = budget
        self.window = 1  # its number
        self.num_evicted = 0  # rows that have left
        self.num_lost = 0  # those of them that had optimizer state, and left for want of room
        # (window, class_id, keys) of the windows that have ended, the oldest first. For a key in
        # several entries the last one counts.
        self._queue: deque[tuple[int, RowClassId, Keys]] = deque()
        self._num_queued = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows."""
        return sum(rows.num_rows * rows.row_bytes for rows in self.tables.values())

    @property
    def has_touched(self) -> bool:
        """Whether the window has touched any row."""
        return any(rows.num_touched for rows in self.tables.values())

    def find(self, keys: KeysByClass) -> dict[RowClassId, CachedKeys]:
        """Which of the keys the window has; true until rows are touched or the window ends."""
        return {c: self.tables[c].find(keys_K, self.window) for c, keys_K in keys.items()}

    def make_room(self, cached: Mapping[RowClassId, CachedKeys]) -> bool:
        """Evict rows until all missing ones fit. Returns False: the window must end first. Raises
        ResourceExhausted: they do not fit into the whole budget.
        """
        needed = sum(len(keys.missing) * self.tables[p].row_bytes for p, keys in cached.items())
        while self.num_bytes + needed > self.budget and self._queue:
            self.num_lost += self._evict(self.num_bytes + needed - self.budget)
        if self.num_bytes + needed <= self.budget:
            return True
        if self.has_touched:
            return False
        raise ResourceExhausted(
            f"geo: expected room for the rows of a batch, {needed} bytes, found cache_bytes"
            f" {self.budget}; use smaller batches or Strategy('geo', cache_bytes=...)"
        )

    def touch(
        self, cached: Mapping[RowClassId, CachedKeys], weights: Mapping[RowClassId, Floats]
    ) -> None:
        """Put these rows into the window. weights: per row class, of the rows that were missing."""
        for class_id, keys in cached.items():
            self.tables[class_id].touch(keys, weights[class_id], self.window)

    def differences(self) -> dict[RowClassId, TableGradient]:
        """What the window has changed, per row class with updated rows."""
        by_class = {class_id: rows.differences() for class_id, rows in self.tables.items()}
        return {c: gradient for c, gradient in by_class.items() if gradient is not None}

    def end_window(self) -> None:
        """Begin another window: the differences have been exchanged."""
        for class_id, rows in self.tables.items():
            if len(keys := rows.end_window()):
                self._queue.append((self.window, class_id, keys))
                self._num_queued += len(keys)
        self.window += 1
        if self.window == WINDOWS_MAX:
            self.clear()
        if self._num_queued > 2 * sum(rows.num_rows for rows in self.tables.values()):
            self._compact()

    def clear(self) -> None:
        """Evict all rows; the window has touched none."""
        while self._queue:
            self._evict(self.num_bytes)
        self.window = 1

    def _evict(self, num_bytes: int) -> int:
        """Evict rows of the oldest window that no later window has touched, up to this size.

        Returns how many of them had optimizer state.
        """
        window, class_id, keys = self._queue.popleft()
        self._num_queued -= len(keys)
        rows = self.tables[class_id]
        keys = keys[rows.touched_at(keys) == window]
        count = -(-num_bytes // rows.row_bytes)
        if count < len(keys):
            rest = keys[count:]
            self._queue.appendleft((window, class_id, rest))
            self._num_queued += len(rest)
        erased = rows.erase(keys[:count])
        self.num_evicted += erased
        return erased * rows.has_state

    def _compact(self) -> None:
        """Drop from the queue the keys that later windows have touched."""
        compacted: deque[tuple[int, RowClassId, Keys]] = deque()
        for window, class_id, keys in self._queue:
            kept = keys[self.tables[class_id].touched_at(keys) == window]
            if len(kept):
                compacted.append((window, class_id, kept))
        self._queue = compacted
        self._num_queued = sum(len(keys) for _, _, keys in compacted)
