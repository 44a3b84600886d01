"""What a worker in mode geo trains on between two exchanges: its cache and its dense weights."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from trireme import _core
from trireme.dense.optimizers import GroupValues
from trireme.table import RowClassId, Table
from trireme.train.modes.geo.cache import RowCache
from trireme.train.modes.geo.rows import CachedKeys
from trireme.worker.client import WorkerClient
from trireme.worker.dense_parameters import DenseParameters
from trireme.worker.gradients import DenseGradient, KeysByClass, TableGradient
from trireme.worker.pull import Pulled


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
        self._dense.take_gradients()
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
