"""Checkpoints that training leaves behind it: when, into which folders, and which stay.

In sync every worker stops at the same step while the servers write, so the checkpoint is of that
step. In async worker 0 has them write while all train on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from trireme.checkpoint.worker_side.calls import SAVE_TIMEOUT_S
from trireme.errors import BadRequest
from trireme.train.checkpointing import checkpoint
from trireme.train.checkpointing.numbered import NumberedFolders
from trireme.train.checkpointing.random_state import RandomState
from trireme.train.checkpointing.worker_state import Moment
from trireme.train.optimizer import DistributedOptimizer

log = logging.getLogger("trireme.train")

Note = Callable[[], dict[str, Any]]
"""What a checkpoint says of the fit that it was taken in."""


@dataclass(frozen=True)
class Checkpoints:
    """Folders 1, 2, 3, ... below `path`, one for each checkpoint, and one more when all is done.

    Args:
        path: a folder for these alone, made if need be; on storage that all processes share.
        every_steps: save after so many steps: of the job in sync, of worker 0 in async. Or:
        every_s: save after so many seconds. In async, no save begins before the last one is done.
        keep: how many complete checkpoints stay in the folder; older ones are removed once a new
            one is complete. None: all.
        storage_options: for fsspec, where the path is a location such as s3://bucket/key.

    Raises:
        BadRequest: not one of `every_steps` and `every_s`, or a number out of range.
    """

    path: str | Path
    _: KW_ONLY
    every_steps: int | None = None
    every_s: float | None = None
    keep: int | None = 3
    storage_options: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if (self.every_steps is None) == (self.every_s is None):
            raise BadRequest(
                "Checkpoints: expected one of every_steps and every_s, found"
                f" every_steps={self.every_steps} and every_s={self.every_s}"
            )
        for name, least in (("every_steps", 1), ("keep", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise BadRequest(f"Checkpoints: expected {name} >= {least}, found {value}")
        if self.every_s is not None and not self.every_s > 0:
            raise BadRequest(f"Checkpoints: expected every_s > 0, found {self.every_s}")


@dataclass(frozen=True)
class AtStop:
    """A checkpoint in a numbered folder below `path` when all are told to stop, and no other."""

    path: str
    storage_options: Mapping[str, Any] | None = None


class Saver:
    """Saves when all stop, for `AtStop`; the kinds for `Checkpoints` save while a fit goes on, too.
    Every worker has one and calls the same at the same places.
    """

    def __init__(
        self,
        checkpoints: Checkpoints | AtStop,
        optimizer: DistributedOptimizer,
        random: RandomState,
        note: Note,
    ) -> None:
        self._optimizer, self._random, self._note = optimizer, random, note
        keep = checkpoints.keep if isinstance(checkpoints, Checkpoints) else None
        self._what = checkpoint.What(keep=keep)
        self._folders = NumberedFolders(checkpoints.path, checkpoints.storage_options)
        self._cluster = optimizer.cluster

    def begin_epoch(self, num_done: int) -> None:
        """This worker has entered a pass, of which a predecessor has made so many batches."""

    def after_step(self) -> None:
        """This worker has made a step."""

    def end_epoch(self) -> None:
        """This worker has left the pass."""

    def finish(self) -> None:
        """All is done."""

    def stop(self) -> None:
        """All stop here: save that."""
        self._save_together()

    def close(self) -> None:
        """Nobody wants more, whatever the reason."""

    def _save_together(self) -> None:
        checkpoint.save(
            self._optimizer,
            self._folders.next(),
            self._note(),
            self._what,
            random=self._random,
        )


@contextmanager
def saving(
    checkpoints: Checkpoints | AtStop | None,
    optimizer: DistributedOptimizer,
    random: RandomState,
    note: Note,
) -> Iterator[Saver | None]:
    """A saver for a fit; None without checkpoints."""
    if checkpoints is None:
        yield None
        return
    saver: Saver
    if isinstance(checkpoints, AtStop):
        saver = Saver(checkpoints, optimizer, random, note)
    else:
        kind = SyncSaver if optimizer.mode.in_lockstep else AsyncSaver
        saver = kind(checkpoints, optimizer, random, note)
    try:
        yield saver
        saver.finish()
    finally:
        saver.close()


class _RegularSaver(Saver):
    """For `Checkpoints`."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        optimizer: DistributedOptimizer,
        random: RandomState,
        note: Note,
    ) -> None:
        super().__init__(checkpoints, optimizer, random, note)
        self._checkpoints, self._saved_at = checkpoints, time.monotonic()

    def finish(self) -> None:
        self._save_together()

    def _left_s(self) -> float:
        """Until the next save, where they go by time."""
        assert self._checkpoints.every_s is not None
        return self._saved_at + self._checkpoints.every_s - time.monotonic()

    def _is_at_step(self) -> bool:
        every = self._checkpoints.every_steps
        return every is not None and self._optimizer.num_steps % every == 0

    def _save_together(self) -> None:
        super()._save_together()
        self._saved_at = time.monotonic()


class SyncSaver(_RegularSaver):
    """All workers meet, also those whose stream has ended before the others'. By steps, they know
    when; by time, worker 0 says at each meeting when the next one is: as many steps on as have been
    made, or fewer if it is time before.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        optimizer: DistributedOptimizer,
        random: RandomState,
        note: Note,
    ) -> None:
        super().__init__(checkpoints, optimizer, random, note)
        self._to_meeting, self._interval, self._met_at = 1, 1, time.monotonic()
        self._num_meetings = 0  # in this pass, which with it names the next one

    def begin_epoch(self, num_done: int) -> None:
        self._to_meeting, self._num_meetings = 1, 0
        if (every := self._checkpoints.every_steps) is None:
            self._follow(num_done)
            return
        num_steps = self._optimizer.num_steps
        self._num_meetings = num_steps // every - (num_steps - num_done) // every
        if num_done and num_steps % every == 0:  # the predecessor may not have been there
            self._num_meetings -= 1
            self._meet(has_ended=False)

    def _follow(self, num_done: int) -> None:
        """Hear from each meeting that a predecessor was at when the next one was."""
        while num_done >= self._to_meeting:
            num_done -= self._to_meeting
            self._meet(has_ended=False, saves=num_done == 0)
        self._to_meeting -= num_done

    def after_step(self) -> None:
        if self._checkpoints.every_steps is not None:
            is_time = self._is_at_step()
        else:
            self._to_meeting -= 1
            is_time = self._to_meeting == 0
        if is_time:
            self._optimizer.refresh()  # comes back when the step has been applied everywhere
            self._meet(has_ended=False)

    def end_epoch(self) -> None:
        while not self._meet(has_ended=True):
            pass

    def _meet(self, *, has_ended: bool, saves: bool = True) -> bool:
        """Save if it is time; returns whether all workers' streams have ended."""
        self._num_meetings += 1
        with self._cluster.client.script.section(f"step {self._num_meetings}"):
            return self._talk(has_ended=has_ended, saves=saves)

    def _talk(self, *, has_ended: bool, saves: bool) -> bool:
        by_time = self._checkpoints.every_s is not None
        mine: dict[str, Any] = {"has_ended": has_ended}
        if self._cluster.worker == 0 and by_time:
            mine |= {"save": self._left_s() <= 0, "next": self._next_interval()}
        met = [of for of, _ in self._cluster.client.gather(mine, [], purpose="step", patient=True)]
        if by_time:
            self._to_meeting = int(met[0]["next"])
        if all(of["has_ended"] for of in met):
            return True
        if saves and (not by_time or met[0]["save"]):
            self._save_together()
        return False

    def _next_interval(self) -> int:
        """Steps to the next meeting: not more than twice as many as to this one."""
        assert self._checkpoints.every_s is not None
        now = time.monotonic()
        rate = self._interval / max(now - self._met_at, 1e-9)
        left_s = self._left_s()
        wanted = rate * (left_s if left_s > 0 else self._checkpoints.every_s)
        self._interval, self._met_at = max(1, min(round(wanted), 2 * self._interval)), now
        return self._interval


class AsyncSaver(_RegularSaver):
    """Worker 0 has the servers write, in a thread beside its training."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        optimizer: DistributedOptimizer,
        random: RandomState,
        note: Note,
    ) -> None:
        super().__init__(checkpoints, optimizer, random, note)
        self._is_due = False
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._cluster.add_running(self.close)

    def after_step(self) -> None:
        if self._cluster.worker != 0:
            return
        by_time = self._checkpoints.every_s is not None and self._left_s() <= 0
        self._is_due |= by_time or self._is_at_step()
        if self._is_due and not self._is_busy():
            self._raise_error()
            self._start()

    def _is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _start(self) -> None:
        self._optimizer.mode.publish()
        moment = Moment.of(self._optimizer, self._random)
        groups, extra = self._optimizer.state_dict(), self._note()

        def work() -> None:
            try:
                location, what = self._folders.next(), self._what
                checkpoint.write(self._optimizer, location, {0: moment}, groups, extra, what)
            except BaseException as error:  # noqa: BLE001 raised in the thread that trains
                self._error = error

        self._is_due, self._saved_at = False, time.monotonic()
        self._thread = threading.Thread(target=work, name="trireme-save", daemon=True)
        self._thread.start()

    def end_epoch(self) -> None:
        """Wait for a save under way: all streams that it notes are in one epoch."""
        if self._thread is not None:
            self._thread.join(SAVE_TIMEOUT_S)
        self._raise_error()

    def close(self) -> None:
        """A save under way gets a while to end."""
        self._cluster.remove_running(self.close)
        if self._thread is None:
            return
        patience_s = self._cluster.client.timeout_s
        self._thread.join(patience_s)
        if self._thread.is_alive():
            log.warning("a save did not end within %.0f s and is left behind", patience_s)
        elif self._error is not None:
            log.warning("a save under way has failed: %s", self._error)
