"""A pull in two parts: what the batch under way does not change now, the rest after its push.

A push changes the rows of its keys and the dense weights. So other rows may be read while the batch
before is computed, and are what they would be after its push: a worker pulls ahead and misses none
of its own pushes. A few rows are not worth a request of their own: they come with the rest.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from trireme import _core
from trireme.protocol.routing import Keys
from trireme.table import RowClassId
from trireme.train.modes.on_servers.push_stream import PushStream
from trireme.train.modes.setup import TrainingSetup
from trireme.worker.gradients import KeysByClass
from trireme.worker.pull import FollowingPull, Pulled

EARLY_BYTES_MIN = 1 << 20
"""Of rows that are pulled ahead. A request takes about 1 ms of CPU at both ends, more than fewer
bytes take at 10 Gbit/s; but rows on SSD may take longer.
"""


class Pull(Protocol):
    """Pulls what includes the pushes that this worker has made."""

    def __call__(self, keys: KeysByClass, *, blocks: bool) -> Pulled: ...


class _KeyPart(NamedTuple):
    """Some keys of a row class."""

    keys: Keys  # (A,)
    places: NDArray[np.int32]  # (A,) among all, ascending


_KeyParts = dict[RowClassId, _KeyPart]
_NO_PLACES = np.empty(0, np.int32)


class PullAhead:
    """Pulls the rows of a batch that the one under way does not push; `complete` pulls the others,
    with the dense weights.

    Args:
        stream: the pushes of this worker.
        pull: how the mode pulls.
        keys: of the batch.
        under_way: the keys of the batch before, as its push will have them.
        blocks: whether pushes change dense weights on the servers.

    Threads: one beside the training thread makes it, the training thread completes it.
    """

    def __init__(
        self,
        setup: TrainingSetup,
        stream: PushStream,
        pull: Pull,
        keys: KeysByClass,
        under_way: KeysByClass,
        *,
        blocks: bool,
    ) -> None:
        self._setup, self._stream, self._pull = setup, stream, pull
        self._keys, self._under_way, self._blocks = keys, under_way, blocks
        self._sequence, self._time = stream.sequence, setup.pull_time()
        self._num_refreshes = stream.num_refreshes
        self._schemas = {table.schema.name: table.schema for table in setup.tables}
        early, self._late = self._divided()
        self._early = pull(_keys_of(early), blocks=False) if early else None
        self._sequence_read = stream.sequence  # no later push is in what was read
        self._rows: dict[RowClassId, Tensor] = {}
        self._following: FollowingPull | None = None
        if self._early is not None:
            self._fill(early, self._early)

    def _divided(self) -> tuple[_KeyParts, _KeyParts]:
        """The keys to pull now, and those to pull later."""
        everything = {c: _KeyPart(keys_K, _NO_PLACES) for c, keys_K in self._keys.items()}
        if not self._is_worth_a_request(everything):
            return {}, everything
        policies = [(table.name, table.policy) for table in self._setup.tables]
        losing = {name for name, one in policies if (one.max_rows, one.max_bytes) != (None, None)}
        divided: dict[tuple[int, ...], tuple[_KeyPart, _KeyPart]] = {}
        early, late = _KeyParts(), _KeyParts()
        for class_id, keys_K in self._keys.items():
            sets = [set_K for c, set_K in self._under_way.items() if c.table == class_id.table]
            if class_id.table in losing:
                sets = [keys_K]
            arrays = (id(keys_K), *map(id, sets))  # tables that read the same features share them
            if arrays not in divided:
                keys_A, places_A, keys_B, places_B = _core.partition(keys_K, sets)
                divided[arrays] = _KeyPart(keys_A, places_A), _KeyPart(keys_B, places_B)
            others, shared = divided[arrays]
            if len(others.keys):
                early[class_id] = others
            if len(shared.keys) or not len(keys_K):
                late[class_id] = shared
        return (early, late) if self._is_worth_a_request(early) else ({}, everything)

    def _is_worth_a_request(self, parts: _KeyParts) -> bool:
        """Whether to pull these rows by themselves."""
        num_bytes = sum(
            4 * len(keys) * self._schemas[class_id.table].width_of(class_id.row_class)
            for class_id, (keys, _) in parts.items()
        )
        return num_bytes >= EARLY_BYTES_MIN or self._setup.cluster.client.has_tiers

    def _fill(self, parts: _KeyParts, pulled: Pulled) -> None:
        """Put the rows of the parts where their keys are among all."""
        for class_id, (_, places) in parts.items():
            rows_AW, num_keys = pulled.rows[class_id], len(self._keys[class_id])
            if len(places) == num_keys:
                self._rows[class_id] = rows_AW
                continue
            if class_id not in self._rows:
                self._rows[class_id] = rows_AW.new_empty((num_keys, rows_AW.shape[1]))
            _core.put_rows(rows_AW.numpy(), places, self._rows[class_id].numpy())

    def following(self, pushed: KeysByClass) -> FollowingPull | None:
        """The pull of the rest, to be sent right behind the push of these keys, the next of this
        worker; None: it is not the push that was expected, or there is no rest.
        """
        is_next = self._stream.sequence == self._sequence and self._is_expected(pushed)
        if is_next and (self._late or self._blocks):
            keys = _keys_of(self._late)
            self._following = FollowingPull(keys, blocks=self._blocks, time=self._time)
        return self._following

    def complete(self) -> Pulled:
        """The rows of all keys, and the dense weights, with every push of this worker; after the
        step of the batch before.
        """
        if not self._is_current():
            return self._pull(self._keys, blocks=True)
        if self._early is None:
            return self._pull_late()
        if not (self._late or self._blocks):
            return replace(self._early, push_counts=self._counts(since=self._sequence_read))
        late = self._pull_late()
        self._fill(self._late, late)
        counts = self._counts(since=self._sequence)
        return Pulled(
            {class_id: self._rows[class_id] for class_id in self._keys},
            late.blocks,
            list(map(min, counts, late.push_counts)),
            {c: self._early.missing.get(c, 0) + late.missing.get(c, 0) for c in self._keys},
            late.stop,
        )

    def _pull_late(self) -> Pulled:
        if self._following is not None:
            self._stream.flush()
            if self._following.pulled is not None:
                return self._following.pulled
        return self._pull(_keys_of(self._late), blocks=True)

    def _counts(self, *, since: int) -> list[int]:
        """Per server, the pushes that are in the rows: those that it had applied when they were
        read, and this worker's own after number `since`.
        """
        assert self._early is not None
        num_own = self._stream.sequence - since
        return [count + num_own for count in self._early.push_counts]

    def _is_current(self) -> bool:
        """Whether what was read is what the servers have, but for pushes of other workers: the push
        since, if there is one, is that of the batch under way, the statistics that lookups return
        are of the same time, and nobody has asked for what is newest, to evaluate or to load.
        """
        if self._stream.num_refreshes != self._num_refreshes:
            return False
        if self._setup.pull_time() != self._time:
            return False
        num_pushes = self._stream.sequence - self._sequence
        if num_pushes != 1:
            return num_pushes == 0
        return self._is_expected(self._stream.pushed_keys)

    def _is_expected(self, pushed: KeysByClass) -> bool:
        """Whether a push is that of the batch under way: a loop of the user's own may push what
        several forward passes have looked up.
        """
        return all(self._under_way.get(c) is keys_K for c, keys_K in pushed.items())


def _keys_of(parts: _KeyParts) -> KeysByClass:
    return {class_id: part.keys for class_id, part in parts.items()}
