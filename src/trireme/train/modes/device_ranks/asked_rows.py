"""The rows of a batch: each worker asks their owners, who answer from their blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trireme import _core
from trireme.errors import TriremeError
from trireme.protocol.routing import NO_KEYS, Keys
from trireme.table import RowClassId
from trireme.train.modes.device_pass.key_slots import ABSENT
from trireme.train.modes.device_ranks.exchange import Exchange, Message
from trireme.train.modes.device_ranks.owned_rows import NOTHING_AHEAD, Ahead, OwnedRows
from trireme.train.modes.device_ranks.owned_window import OwnedWindow
from trireme.train.modes.device_ranks.owners import Owners
from trireme.worker.gradients import KeysByClass

Places = npt.NDArray[np.int32]


class Asked(NamedTuple):
    """The keys of one row class that workers ask this owner for.

    by_worker: (K_i,) of each. keys: (K,) the distinct ones. places: per worker, (K_i,) where its
    keys are among them.
    """

    by_worker: list[Keys]
    keys: Keys
    places: list[Places]

    @staticmethod
    def of(by_worker: list[Keys], pool: _core.Pool) -> Asked:
        ends = np.cumsum([len(keys) for keys in by_worker])[:-1]
        keys, index = _core.unique(np.concatenate(by_worker), pool)[:2]
        return Asked(by_worker, keys, np.split(index, ends))


def counts_of(messages: Sequence[Message], num_classes: int) -> npt.NDArray[np.int64]:
    """(size, classes, size): how many keys of each class each worker sends to each owner."""
    size = len(messages)
    counts = np.zeros((size, num_classes, size), np.int64)
    for rank, message in enumerate(messages):
        if "counts" in message.body:
            counts[rank] = np.array(message.body["counts"], np.int64).reshape(num_classes, size)
    return counts


class AskedRows:
    """Asks for rows, and answers with those that this worker has. rows: of its buckets."""

    def __init__(
        self, exchange: Exchange, owners: Owners, rows: OwnedRows | OwnedWindow, pool: _core.Pool
    ) -> None:
        self._exchange, self._owners, self.rows, self._pool = exchange, owners, rows, pool
        self.own: KeysByClass = {}  # that this worker has asked for last, to train on
        self.asked: dict[RowClassId, Asked] = {}  # what all have asked for last, to train on

    # ---- the rows of a batch to train on ----

    def ask(self, keys: KeysByClass) -> dict[RowClassId, Tensor]:
        """(K, D) rows of each class, on the device. Raises at all workers: a key is not of the
        pass, or its row has no room.
        """
        ahead = self.rows.announce(keys)
        counts, arrays = self._owners.by_owner(keys)
        for batch in ahead.batches:
            for own, announced in zip(arrays, self._owners.by_owner(batch)[1], strict=True):
                own += announced
        body = {"counts": counts, "ahead": [ahead.is_announced, ahead.begins, ahead.continues]}
        received = self.answer(self._exchange.share("rows", body, arrays))
        self.own = keys
        return self._joined(keys, counts, received, extra=0)

    def answer(self, messages: Sequence[Message]) -> list[Tensor]:
        """Take part in `ask` of all workers; returns what came for this one, per owner."""
        counts, failure = counts_of(messages, len(self._owners.classes)), None
        outgoing: list[list[Tensor]] = [[] for _ in messages]
        try:
            self.asked = self._asked(messages)
            self._note_ahead(messages)
            if self.asked:
                self.rows.bring({class_id: one.keys for class_id, one in self.asked.items()})
            for class_id, one in self.asked.items():
                weights_KD = self.rows.blocks[class_id].weights(one.keys)
                for tensors, places in zip(outgoing, one.places, strict=True):
                    at = torch.from_numpy(places.astype(np.int64)).to(weights_KD.device)
                    tensors.append(weights_KD[at])
        except TriremeError as error:
            failure = error
        dims = np.array([dim for _, dim in self._owners.classes], np.int64)
        between = np.einsum("sco,c->os", counts, dims)
        return self._exchange.numbers(outgoing, between, failure)

    def _asked(self, messages: Sequence[Message]) -> dict[RowClassId, Asked]:
        """Of the classes that anybody asks for."""
        asked = {}
        for number, (class_id, _) in enumerate(self._owners.classes):
            by_worker = [one.arrays[number] if one.arrays else NO_KEYS for one in messages]
            if any(map(len, by_worker)):
                asked[class_id] = Asked.of(by_worker, self._pool)
        return asked

    def _note_ahead(self, messages: Sequence[Message]) -> None:
        """Arrays behind those of the question are of batches to come, class by class."""
        classes = [class_id for class_id, _ in self._owners.classes]
        for worker, message in enumerate(messages):
            if "ahead" not in message.body:
                self.rows.note_ahead(worker, {}, NOTHING_AHEAD)
                continue
            starts = range(len(classes), len(message.arrays), len(classes))
            batches = [
                dict(zip(classes, message.arrays[start : start + len(classes)], strict=True))
                for start in starts
            ]
            is_announced, begins, continues = message.body["ahead"]
            asked = {class_id: one.by_worker[worker] for class_id, one in self.asked.items()}
            self.rows.note_ahead(worker, asked, Ahead(is_announced, begins, continues, batches))

    def _joined(
        self,
        keys: KeysByClass,
        counts: Sequence[Sequence[int]],
        received: Sequence[Tensor],
        *,
        extra: int,
    ) -> dict[RowClassId, Tensor]:
        """(K, D + extra) of each class in the order of its keys, from what each owner sent. counts:
        of the question.
        """
        at, rows = [0] * len(received), {}
        for (class_id, dim), sizes in zip(self._owners.classes, counts, strict=True):
            if class_id not in keys:
                continue
            parts = []
            for rank, num in enumerate(sizes):
                end = at[rank] + num * (dim + extra)
                parts.append(received[rank][at[rank] : end].view(num, dim + extra))
                at[rank] = end
            rows[class_id] = torch.cat(parts)
        return rows

    # ---- rows as they are now ----

    def look(self, keys: KeysByClass) -> dict[RowClassId, tuple[Tensor, Tensor]]:
        """(K, D) rows of each class, and (K,) bool: which of them are in a block."""
        counts, arrays = self._owners.by_owner(keys)
        received = self.answer_look(self._exchange.share("look", {"counts": counts}, arrays))
        joined = self._joined(keys, counts, received, extra=1)
        return {class_id: (rows[:, :-1], rows[:, -1] > 0) for class_id, rows in joined.items()}

    def answer_look(self, messages: Sequence[Message]) -> list[Tensor]:
        """Take part in `look` of all workers, see `answer`."""
        counts = counts_of(messages, len(self._owners.classes))
        outgoing: list[list[Tensor]] = [[] for _ in messages]
        for number, (class_id, dim) in enumerate(self._owners.classes):
            for tensors, message in zip(outgoing, messages, strict=True):
                if message.arrays:
                    tensors.append(self._here(class_id, dim, message.arrays[number]))
        dims = np.array([dim + 1 for _, dim in self._owners.classes], np.int64)
        return self._exchange.numbers(outgoing, np.einsum("sco,c->os", counts, dims))

    def _here(self, class_id: RowClassId, dim: int, keys_K: Keys) -> Tensor:
        """(K, D + 1): the row of each key, and 1; zeros of keys without."""
        rows_KD = torch.zeros(len(keys_K), dim + 1)
        block = self.rows.blocks.get(class_id)
        if block is None or not len(keys_K):
            return rows_KD
        slots = block.slots.find(keys_K)
        weights = block.weights_at(slots[slots != ABSENT])
        rows_KD = rows_KD.to(weights.device)
        is_here = torch.from_numpy(slots != ABSENT).to(weights.device)
        rows_KD[is_here, :-1], rows_KD[is_here, -1] = weights, 1.0
        return rows_KD
