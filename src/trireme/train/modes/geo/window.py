"""What a worker in mode geo trains on between two exchanges: its cache and its dense weights."""

from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trireme import _core
from trireme.dense.optimizers import GroupValues
from trireme.errors import ResourceExhausted
from trireme.protocol.routing import Floats, Keys
from trireme.table import RowClassId, Table
from trireme.train.modes.geo.rows import CachedKeys, CachedRows
from trireme.worker.client import WorkerClient
from trireme.worker.dense_parameters import DenseParameters
from trireme.worker.gradients import DenseGradient, KeysByClass, TableGradient
from trireme.worker.pull import Pulled

LOOKED_MIN = 4096  # rows that are looked at, at least, for those to evict
WINDOWS_MAX = 1 << 24  # clocks are floats


class RowCache:
    """Rows of several tables, by `Table.class_id`, in a budget: the least recently touched leave
    first. One thread uses it; any may `find`.

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
        rows = self.tables[class_id]
        count = -(-num_bytes // rows.row_bytes)
        looked, rest = np.split(keys, [max(count, LOOKED_MIN)])
        looked = looked[rows.touched_at(looked) == window]
        left = [(window, class_id, some) for some in (rest, looked[count:]) if len(some)]
        self._queue.extendleft(left)
        self._num_queued += sum(len(some) for _, _, some in left) - len(keys)
        erased = rows.erase(looked[:count])
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


class _Fetched(NamedTuple):
    """Rows of a batch that the window lacked when it had this version."""

    version: int
    cached: dict[RowClassId, CachedKeys]
    pulled: Pulled

    def is_of(self, keys: KeysByClass) -> bool:
        return keys.keys() == self.cached.keys() and all(
            self.cached[class_id].keys is keys_K for class_id, keys_K in keys.items()
        )


class Window:
    """The `k` steps between two exchanges. One thread uses it; another may `fetch` meanwhile."""

    def __init__(
        self,
        client: WorkerClient,
        tables: tuple[Table, ...],
        dense: DenseParameters,
        optimizer: torch.optim.Optimizer | None,
        *,
        pool: _core.Pool,
        k: int,
        cache_bytes: int,
    ) -> None:
        self.cache = RowCache(tables, pool, cache_bytes)
        self.num_steps = self.num_examples = 0  # made in the window
        self.push_counts: list[int] = []  # per server, when the window began
        self.has_ended = False  # whether a window has ended since the last step was over
        self._client, self._dense, self._optimizer, self._k = client, dense, optimizer, k
        self._base: dict[str, Tensor] = {}  # dense weights when the window began
        self._is_open = False
        # Grows after each change. A reader that finds the same version before and after reading
        # has seen no half of a change.
        self._version = 0
        self._is_last = True  # whether the window ends with the batch touched last
        self._fetched: _Fetched | None = None

    @property
    def is_due(self) -> bool:
        """Whether the window has had all its steps."""
        return self.num_steps >= self._k

    def fetch(self, keys: KeysByClass, time: int) -> None:
        """Pull the rows that the next `touch`, of these arrays, will lack. Does nothing if the
        window ends before it: rows pulled now would lack this worker's own differences.
        """
        version = self._version
        if not self._is_last:
            cached = self.cache.find(keys)
            self._fetched = _Fetched(version, cached, self._pull(cached, time))

    def lacking(self, keys: KeysByClass) -> KeysByClass:
        """Those of the keys that the window has not touched so far; the servers gave it the others
        lately.
        """
        return {class_id: cached.missing for class_id, cached in self.cache.find(keys).items()}

    def touch(self, keys: KeysByClass, time: int) -> bool:
        """Bring these rows into the window; the first call in a window also brings dense weights.
        Returns False: there is no room until the window has ended: exchange, and call again. Raises
        ResourceExhausted: the rows do not fit into the whole cache.
        """
        fetched, self._fetched = self._fetched, None
        if fetched is not None and not (fetched.version == self._version and fetched.is_of(keys)):
            fetched = None
        cached = self.cache.find(keys) if fetched is None else fetched.cached
        if not self.cache.make_room(cached):
            return False
        pulled = self._pull(cached, time) if fetched is None else fetched.pulled
        self.cache.touch(cached, {c: rows.numpy() for c, rows in pulled.rows.items()})
        if not self._is_open:
            self._open(pulled)
        self._is_last = self.num_steps + 1 >= self._k
        self._version += 1
        return True

    def _pull(self, cached: Mapping[RowClassId, CachedKeys], time: int) -> Pulled:
        """The rows that are missing; also the dense weights if the window has no rows yet."""
        missing = {class_id: keys.missing for class_id, keys in cached.items()}
        if self._is_open and not any(map(len, missing.values())):
            return self.read(missing)
        blocks = not self._is_open and len(self._dense) > 0
        return self._client.pull(missing, blocks=blocks, time=time)

    def read(self, keys: KeysByClass) -> Pulled:
        """Rows that the window has touched."""
        rows = {
            c: torch.from_numpy(self.cache.tables[c].read(keys_K)) for c, keys_K in keys.items()
        }
        return Pulled(rows, None, self.push_counts, dict.fromkeys(keys, 0))

    def _open(self, pulled: Pulled) -> None:
        for block_ids, values in pulled.blocks or []:
            self._dense.install(block_ids, values)
        self._base = self._dense.copies()
        self.push_counts, self._is_open = pulled.push_counts, True

    def rebase(self) -> None:
        """The servers' dense weights have replaced those of a window without steps."""
        if self._is_open:
            self._base = self._dense.copies()

    def step(self, tables: Mapping[RowClassId, TableGradient], examples: int) -> None:
        """Train the cache on the gradients of touched rows, and the dense parameters on theirs."""
        for class_id, gradient in tables.items():
            self.cache.tables[class_id].update(gradient, examples)
        if self._optimizer is not None:
            self._optimizer.step()
        self._dense.take_gradients(trained=True)
        self.num_steps += 1
        self.num_examples += examples

    def differences(
        self, groups: list[GroupValues]
    ) -> tuple[dict[RowClassId, TableGradient], DenseGradient | None]:
        """What the window has changed."""
        dense = None
        if len(self._dense):
            now = self._dense.copies()
            dense = DenseGradient({name: now[name] - self._base[name] for name in now}, groups)
        return self.cache.differences(), dense

    def end(self) -> None:
        """Begin another window: the servers have the differences."""
        self.cache.end_window()
        self.num_steps = self.num_examples = 0
        self._is_open, self._is_last, self.has_ended = False, True, True
        self._version += 1

    def forget(self) -> None:
        """Begin another window without cached rows, as after a load."""
        self.end()
        self.cache.clear()
