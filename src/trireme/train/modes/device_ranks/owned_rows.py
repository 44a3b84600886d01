"""The rows of a pass of all workers that one of them has: those of its buckets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from trireme.errors import TriremeError
from trireme.interchange.worker_side.import_requests import send_wide_rows
from trireme.protocol.routing import Keys
from trireme.table import RowClassId
from trireme.train.modes.device_pass.pass_rows import PassRows
from trireme.train.modes.device_ranks.exchange import Exchange
from trireme.train.modes.device_ranks.owners import Owners
from trireme.train.pass_data import PassData, distinct

NO_KEYS = np.empty(0, np.uint64)


class OwnedRows(PassRows):
    """As there, of the data of all workers."""

    def send(self, id: str) -> None:
        """Send the rows that have changed to the servers, for the import `id`."""
        for class_id, keys, rows in self._changed():
            send_wide_rows(self._client, class_id, keys, rows, self._pool, id)


@dataclass(frozen=True, eq=False)
class OwnedKeys(PassData):
    """Data of all workers. owned: the keys that it needs of each row class and this worker has."""

    owned: dict[RowClassId, Keys]

    def keys(self, stop: Callable[[], bool] = lambda: False) -> dict[RowClassId, Keys]:
        del stop
        return self.owned


def keys_of_owner(exchange: Exchange, owners: Owners, source: PassData) -> OwnedKeys:
    """Read this worker's data for its keys, and tell their owners. Raises at all workers: the data
    of one cannot be read.
    """
    needed: dict[RowClassId, Keys] = {}
    failure: TriremeError | None = None
    try:
        needed = source.keys()
    except TriremeError as error:
        failure = error
    exchange.agree(failure)
    parts = [
        owners.split(keys_U := needed.get(class_id, NO_KEYS)).parts(keys_U)
        for class_id, _ in owners.classes
    ]
    outgoing = [
        [np.ascontiguousarray(of_class[rank]) for of_class in parts]
        for rank in range(exchange.size)
    ]
    received = exchange.share("keys", {}, outgoing)
    owned = {
        class_id: distinct([one.arrays[number] for one in received], source.pool)
        for number, (class_id, _) in enumerate(owners.classes)
    }
    return OwnedKeys(source.dataset, source.batches, source.planner, source.pool, owned)
