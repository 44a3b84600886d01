"""The keys of the pass that follows: each worker reads its data for them in a thread, while one
trains, and tells their owners part by part, with the messages of training. So training waits for
none of it, and an owner can read rows ahead as soon as it has heard from all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from trireme import _core
from trireme.errors import BadRequest, TriremeError, Unavailable
from trireme.protocol.routing import NO_KEYS, Keys
from trireme.table import RowClassId
from trireme.train.modes.device_ranks.owners import Owners
from trireme.train.pass_data import PassData

PART_KEYS = 1 << 17
"""Of a row class that one message brings an owner: a training step waits for at most this many."""
_CHECK_S = 0.2


class NextKeys:
    """The training thread uses it, and the one that reads ahead calls `owned`.

    data: what this worker will train on in the next pass.
    """

    def __init__(self, data: PassData, owners: Owners) -> None:
        self.data, self._owners = data, owners
        self._classes = [class_id for class_id, _ in owners.classes]
        self._changed = threading.Condition()
        self._is_read = threading.Event()
        self._failure: BaseException | None = None
        self._outgoing: list[list[Keys]] = []  # this worker's keys, by owner and class
        self._num_sent = 0  # of each owner's keys of each class
        self._received: dict[RowClassId, list[Keys]] = {c: [NO_KEYS] for c in self._classes}
        self._waits_for = set(range(owners.size))

    @property
    def can_complete(self) -> bool:
        """Whether the reading was not stopped; it may have failed, or not be over yet."""
        return not isinstance(self._failure, _ReadingStopped)

    # ---- the thread that reads ahead ----

    def owned(self, stop: Callable[[], bool]) -> dict[RowClassId, Keys]:
        """The keys that the data of all workers needs and this worker has. Reads this worker's
        data, once, and waits for the others' keys. stop: whether to give up.
        """
        if not self._is_read.is_set():
            self._read(stop)
        with self._changed:
            while self._waits_for:
                if stop():
                    raise _ReadingStopped("keys of the next pass: the reading was stopped")
                self._changed.wait(_CHECK_S)
            for class_id, parts in self._received.items():
                self._received[class_id] = [_core.distinct(parts, self.data.pool)]
            return {class_id: part for class_id, [part] in self._received.items()}

    def _read(self, stop: Callable[[], bool]) -> None:
        try:
            needed = self.data.keys(stop)
            if stop():
                raise _ReadingStopped("keys of the next pass: the reading was stopped")
            _, self._outgoing = self._owners.by_owner(needed)
        except BaseException as error:
            self._failure = error
            raise
        finally:
            self._is_read.set()

    # ---- the training thread ----

    def next_part(self) -> tuple[bool, list[list[Keys]]]:
        """What the next message brings each owner, a part of each class; and whether it is the
        last. Nothing while this worker reads, or after the last.
        """
        if not self._is_read.is_set() or self._failure is not None:
            return False, [[] for _ in range(self._owners.size)]
        part = slice(self._num_sent, self._num_sent + PART_KEYS)
        self._num_sent = part.stop
        parts = [[keys[part] for keys in own] for own in self._outgoing]
        if all(len(keys) <= part.stop for own in self._outgoing for keys in own):
            self._outgoing = [[] for _ in range(self._owners.size)]
            return True, parts
        return False, parts

    def take(self, worker: int, arrays: Sequence[Keys], *, is_last: bool) -> None:
        """A message of this worker has brought a part: none while it still reads. Raises
        BadRequest: of other row classes.
        """
        if len(arrays) not in (0, len(self._classes)):
            raise BadRequest(
                f"keys of the next pass: expected those of {len(self._classes)} row classes from"
                f" worker {worker}, found {len(arrays)}"
            )
        with self._changed:
            for class_id, keys in zip(self._classes, arrays, strict=bool(arrays)):
                # A copy, which does not keep the whole message.
                self._received[class_id].append(np.array(keys, np.uint64))
            if is_last:
                self._waits_for.discard(worker)
                self._changed.notify_all()

    @property
    def is_complete(self) -> bool:
        """Whether the keys of all workers are there. All workers have heard the same."""
        return not self._waits_for

    def wait_read(self) -> TriremeError | None:
        """Wait until this worker's data has been read, as long as it takes; returns why it cannot
        be. Raises what is no error of ours.
        """
        self._is_read.wait()
        if self._failure is not None and not isinstance(self._failure, TriremeError):
            raise self._failure
        return self._failure


class _ReadingStopped(Unavailable):
    """The reading has come to nothing."""
