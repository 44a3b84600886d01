"""A worker in mode geo: fetch, train on the cache, exchange."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from trireme import _core
from trireme.protocol.dense_optimizers import GroupValues
from trireme.protocol.gradients import DenseGradient, TableGradient
from trireme.protocol.routing import Keys
from trireme.table import Table
from trireme.train.modes.geo.cache import RowCache
from trireme.train.modes.geo.rows import Found
from trireme.worker.client import Client
from trireme.worker.dense_parameters import DenseParameters
from trireme.worker.pull import Pulled

log = logging.getLogger("trireme.train")


class _Fetched(NamedTuple):
    """What the window lacked of the rows of a batch at some moment of it."""

    moment: int
    found: dict[str, Found]
    pulled: Pulled

    def is_of(self, keys: Mapping[str, Keys]) -> bool:
        return keys.keys() == self.found.keys() and all(
            self.found[part].keys is keys_K for part, keys_K in keys.items()
        )


class Geo:
    """The cache of a worker and its window. One thread uses it; another may `fetch` meanwhile.

    Args:
        tables: of the model. dense: its parameters, trained here by `optimizer`.
        k: steps of a window. cache_bytes: see RowCache.

    Attributes:
        num_steps, num_examples: made in the window.
        has_ended: whether a window has ended since the last step was over.
        versions: per server, its push counter when the window began.
    """

    def __init__(
        self,
        client: Client,
        tables: tuple[Table, ...],
        dense: DenseParameters,
        optimizer: torch.optim.Optimizer | None,
        *,
        pool: _core.Pool,
        k: int,
        cache_bytes: int,
    ) -> None:
        self.cache = RowCache(tables, pool, cache_bytes)
        self.num_steps = self.num_examples = 0
        self.versions: list[int] = []
        self.has_ended = False
        self._client, self._dense, self._optimizer, self._k = client, dense, optimizer, k
        self._base: dict[str, Tensor] = {}
        self._is_open = False
        # Counts touches and ends of windows, behind what they change: whoever reads it before
        # anything else and finds it the same later has seen no half of a change.
        self._moment = 0
        self._is_last = True  # the batch touched last, in the window; also before the first
        self._fetched: _Fetched | None = None
        self._num_reported = 0

    @property
    def is_due(self) -> bool:
        """Whether the window has had all its steps."""
        return self.num_steps >= self._k

    def fetch(self, keys: Mapping[str, Keys], time: int) -> None:
        """Bring what the next `touch`, of these arrays, will miss, while the batch touched last is
        trained on. Nothing where the window ends with that batch: rows from before the exchange
        would lack this worker's own differences.
        """
        moment = self._moment
        if self._is_last:
            return
        found = self.cache.find(keys)
        self._fetched = _Fetched(moment, found, self._pull(found, time))

    @property
    def may_fetch(self) -> bool:
        """Whether windows have batches to fetch for while one is trained on."""
        return self._k > 1

    def touch(self, keys: Mapping[str, Keys], time: int) -> bool:
        """Bring those of these rows into the window that it has not touched yet. The first call in
        a window brings the dense weights, too.

        Returns:
            False: there is no room before the window has ended: exchange, and call again.

        Raises:
            ResourceExhausted: no room at all.
        """
        fetched, self._fetched = self._fetched, None
        if fetched is not None and not (fetched.moment == self._moment and fetched.is_of(keys)):
            fetched = None
        found = self.cache.find(keys) if fetched is None else fetched.found
        if not self.cache.make_room(found):
            return False
        pulled = self._pull(found, time) if fetched is None else fetched.pulled
        self.cache.touch(found, pulled.rows)
        if not self._is_open:
            self._open(pulled)
        self._is_last = self.num_steps + 1 >= self._k
        self._moment += 1
        return True

    def _pull(self, found: Mapping[str, Found], time: int) -> Pulled:
        """The rows that are missing; in a window that has none yet the dense weights, too."""
        missing = {part: of.missing for part, of in found.items()}
        if self._is_open and not any(map(len, missing.values())):
            return self.read(missing)
        blocks = not self._is_open and len(self._dense) > 0
        return self._client.pull(missing, blocks=blocks, time=time)

    def read(self, keys: Mapping[str, Keys]) -> Pulled:
        """The rows of a batch, which have been touched."""
        rows = {part: self.cache.tables[part].read(keys_K) for part, keys_K in keys.items()}
        return Pulled(rows, None, self.versions, dict.fromkeys(keys, 0))

    def _open(self, pulled: Pulled) -> None:
        for block_ids, values in pulled.blocks or []:
            self._dense.install(block_ids, values)
        self._base = self._dense.copies()
        self.versions, self._is_open = pulled.versions, True

    def step(self, tables: Mapping[str, TableGradient], examples: int) -> None:
        """Train on the cache: rows that have been touched by these gradients, dense parameters by
        their own.
        """
        for part, gradient in tables.items():
            self.cache.tables[part].update(gradient, examples)
        if self._optimizer is not None:
            self._optimizer.step()
        self._dense.take_gradients()
        self.num_steps += 1
        self.num_examples += examples

    def differences(
        self, groups: list[GroupValues]
    ) -> tuple[dict[str, TableGradient], DenseGradient | None]:
        """What the window has changed."""
        dense = None
        if len(self._dense):
            now = self._dense.copies()
            dense = DenseGradient({name: now[name] - self._base[name] for name in now}, groups)
        return self.cache.differences(), dense

    def end_window(self) -> None:
        """The servers have the differences."""
        self.cache.end_window()
        self.num_steps = self.num_examples = 0
        self._is_open, self._is_last, self.has_ended = False, True, True
        self._moment += 1

    def forget(self) -> None:
        """Begin anew, as after a load: without rows."""
        self.end_window()
        self.cache.clear()

    def report(self) -> None:
        """Say how many rows have lost their optimizer state since the last report."""
        lost = self.cache.num_lost - self._num_reported
        self._num_reported = self.cache.num_lost
        if lost:
            log.warning(
                "geo: %d rows left the cache of %d bytes, and their optimizer state is lost; it is"
                " kept with a larger one, Strategy('geo', cache_bytes=...)",
                lost,
                self.cache.budget,
            )

    def counters(self) -> dict[str, int]:
        """Rows in the cache; rows that have left it, and how many optimizer states with them."""
        cache = self.cache
        rows = sum(rows.num_rows for rows in cache.tables.values())
        return {"rows": rows, "evicted": cache.num_evicted, "states_lost": cache.num_lost}
