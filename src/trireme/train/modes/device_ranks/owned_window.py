"""The rows of a window of all workers that one of them has: those of its buckets that the next
batches of all need.

A worker announces the keys of its batches to their owners as soon as it knows them. An owner takes
the batches of all workers that are equally far ahead for one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import zip_longest

import torch

from trireme.protocol.pass_lease import PassLease
from trireme.protocol.routing import Keys
from trireme.table import RowClassId
from trireme.train.modes.device_pass.window_rows import RowsInWindow
from trireme.train.modes.device_ranks.owned_rows import Ahead
from trireme.train.modes.setup import TrainingSetup
from trireme.train.pass_data import WindowSize
from trireme.worker.gradients import KeysByClass


class OwnedWindow(RowsInWindow):
    """id: of the import that all workers return rows to; worker 0 begins and ends it."""

    def __init__(
        self,
        setup: TrainingSetup,
        size: WindowSize,
        device: torch.device,
        lease: PassLease | None,
        id: str,
    ) -> None:
        cluster = setup.cluster
        super().__init__(setup, size, device, lease, id=id, opens=cluster.worker == 0)
        self._num_announced, self._begins = 0, True  # of this worker
        self._coming: list[deque[KeysByClass]] = [deque() for _ in range(cluster.num_workers)]
        # Of the step to come, what each worker has asked for.
        self._of_step: list[list[KeysByClass]] = [[] for _ in range(cluster.num_workers)]

    # ---- what this worker announces ----

    def begin_run(self) -> None:
        super().begin_run()
        self._num_announced, self._begins = 0, True

    def announce(self, keys: KeysByClass) -> Ahead:
        """What to tell owners with the question for these keys. Waits as `_known`."""
        following = list(super()._known(keys))
        is_announced, begins = self._num_announced > 0, self._begins
        new = following[max(0, self._num_announced - 1) :]
        self._num_announced, self._begins = len(following), False
        return Ahead(is_announced, begins, bool(self._pending.entries), new)

    # ---- what it has as an owner ----

    def note_ahead(self, worker: int, asked: KeysByClass, ahead: Ahead) -> None:
        """What a worker has announced to this owner, with the question for `asked`."""
        of_step = self._of_step[worker]
        if not ahead.continues:
            of_step.clear()
        of_step.append(asked)
        coming = self._coming[worker]
        if ahead.begins:
            coming.clear()
        elif ahead.is_announced and coming:
            coming.popleft()
        coming.extend(ahead.batches)

    def _known(self, keys: KeysByClass) -> Iterable[KeysByClass]:
        """The batches of all workers known to follow: their unions, made when they are read."""
        return map(self._union, zip_longest(*self._coming, fillvalue={}))

    def _in_use(self, class_id: RowClassId) -> list[Keys]:
        """As there, of the batches of all workers."""
        earlier = (keys for of_step in self._of_step for keys in of_step[:-1])
        return [keys[class_id] for keys in earlier if class_id in keys]
