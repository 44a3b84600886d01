"""The rows of a pass of all workers that one of them has: those of its buckets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from trireme import _core
from trireme.protocol.routing import Keys
from trireme.table import RowClassId
from trireme.train.modes.device_pass.pass_rows import PassRows
from trireme.train.modes.device_ranks.exchange import Exchange, caught
from trireme.train.modes.device_ranks.next_keys import NextKeys
from trireme.train.modes.device_ranks.owners import Owners
from trireme.train.pass_data import PassData
from trireme.worker.gradients import KeysByClass


class Ahead(NamedTuple):
    """What a worker announces of its batches to come, where there is a window.

    is_announced: its present batch is the first of those it has announced. begins: it forgets those
    it has announced before. continues: its step has earlier batches, too. batches: that it
    announces now.
    """

    is_announced: bool
    begins: bool
    continues: bool
    batches: Sequence[KeysByClass]


NOTHING_AHEAD = Ahead(False, False, False, ())


class OwnedRows(PassRows):
    """As there, of the data of all workers."""

    def plan(self, keys: KeysByClass | None) -> None:
        """Nothing: owners look for keys when they are asked for them."""

    def announce(self, keys: KeysByClass) -> Ahead:
        """What to tell owners with the question for these keys."""
        del keys
        return NOTHING_AHEAD

    def note_ahead(self, worker: int, asked: KeysByClass, ahead: Ahead) -> None:
        """What a worker has announced to this owner, with the question for `asked`."""


@dataclass(frozen=True, eq=False)
class OwnedKeys(PassData):
    """Data of all workers. owned: finds the keys that it needs of each row class and this worker
    has; its argument says whether to give up.
    """

    owned: Callable[[Callable[[], bool]], dict[RowClassId, Keys]]

    @classmethod
    def of(
        cls, data: PassData, owned: Callable[[Callable[[], bool]], dict[RowClassId, Keys]]
    ) -> OwnedKeys:
        """data: this worker's part of it."""
        return cls(data.dataset, data.batches, data.planner, data.pool, owned)

    def keys(self, stop: Callable[[], bool] = lambda: False) -> dict[RowClassId, Keys]:
        return self.owned(stop)


def keys_of_owner(exchange: Exchange, owners: Owners, source: PassData) -> OwnedKeys:
    """Read this worker's data for its keys, and tell their owners. Raises at all workers: the data
    of one cannot be read.
    """
    needed: dict[RowClassId, Keys] = {}
    exchange.agree(caught(lambda: needed.update(source.keys())))
    _, outgoing = owners.by_owner(needed)
    received = exchange.share("keys", {}, outgoing)
    owned = {
        class_id: _core.distinct([one.arrays[number] for one in received], source.pool)
        for number, (class_id, _) in enumerate(owners.classes)
    }
    return OwnedKeys.of(source, lambda _: owned)


def keys_ahead(exchange: Exchange, ahead: NextKeys) -> OwnedKeys:
    """As `keys_of_owner`, of data that was read ahead: tell the owners what training has left."""
    exchange.agree(ahead.wait_read())
    exchange.next_keys = ahead
    while not ahead.is_complete:
        exchange.share("next keys", {})
    exchange.next_keys = None
    return OwnedKeys.of(ahead.data, ahead.owned)
