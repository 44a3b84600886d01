"""Savers take the checkpoints of a fit.

In sync every worker stops at the same step while the servers write, so the checkpoint is of that
step. So they do in hybrid, where worker 0 says a step before that it will save. In async worker 0
has the servers write while all train on.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from trireme.checkpoint.worker_side.server_operations import SAVE_TIMEOUT_S
from trireme.errors import start_thread
from trireme.train.checkpointing.checkpoint_location import NumberedFolders
from trireme.train.checkpointing.checkpoints import CheckpointAtStop, Checkpoints
from trireme.train.checkpointing.random_state import RandomState
from trireme.train.checkpointing.save import SaveOptions, own_folder, save, write
from trireme.train.checkpointing.worker_state import WorkerState
from trireme.train.optimizer import DistributedOptimizer

log = logging.getLogger("trireme.train")


@dataclass(eq=False)
class Saver:
    """Saves when all workers stop, for `CheckpointAtStop`; subclasses save during a fit too. Every
    worker has one and calls the same methods at the same places. extra: makes the JSON values that
    a checkpoint holds of the fit.
    """

    settings: Checkpoints | CheckpointAtStop
    optimizer: DistributedOptimizer
    random: RandomState
    extra: Callable[[], dict[str, Any]]

    def __post_init__(self) -> None:
        self._folders = NumberedFolders(self.settings.path, self.settings.storage_options)
        self._options = SaveOptions(keep=getattr(self.settings, "keep", None))
        self._cluster = self.optimizer.cluster

    def begin_epoch(self, num_done: int) -> None:
        """This worker has entered a pass, of which a predecessor has made `num_done` steps."""

    def after_step(self) -> None:
        """This worker has made a step."""

    def end_epoch(self) -> None:
        """This worker has left the pass."""

    def finish(self) -> None:
        """All epochs are done."""

    def stop(self) -> None:
        """All workers stop after this step."""
        self._save_together()

    def close(self) -> None:
        """The fit has ended, for whatever reason."""

    def _save_together(self) -> None:
        location, extra = self._folders.next(), self.extra()
        save(self.optimizer, location, extra, self._options, random=self.random)


@contextmanager
def saving(
    settings: Checkpoints | CheckpointAtStop | None,
    optimizer: DistributedOptimizer,
    random: RandomState,
    extra: Callable[[], dict[str, Any]],
) -> Iterator[Saver | None]:
    """A saver for a fit; None without settings."""
    if settings is None:
        yield None
        return
    kind: type[Saver] = Saver
    with ExitStack() as stack:
        if isinstance(settings, Checkpoints):
            path, options = settings.path, settings.storage_options
            stack.enter_context(own_folder(optimizer.cluster, path, options))
            kind = BackgroundSaver
            if optimizer.mode.saves_between_steps:
                kind = StepSaver
            elif optimizer.mode.holds_steps:
                kind = HoldingSaver
        saver = kind(settings, optimizer, random, extra)
        stack.callback(saver.close)
        yield saver
        saver.finish()


class _PeriodicSaver(Saver):
    """Saves as `Checkpoints` says."""

    def __post_init__(self) -> None:
        super().__post_init__()
        assert isinstance(self.settings, Checkpoints)
        self._every_steps, self._every_s = self.settings.every_steps, self.settings.every_s
        self._saved_at = time.monotonic()

    def finish(self) -> None:
        self._save_together()

    def _left_s(self) -> float:
        """Seconds until the next save, where saves go by time."""
        assert self._every_s is not None
        return self._saved_at + self._every_s - time.monotonic()

    def _is_at_step(self) -> bool:
        every = self._every_steps
        return every is not None and self.optimizer.num_steps % every == 0

    def _save_together(self) -> None:
        super()._save_together()
        self._saved_at = time.monotonic()


class StepSaver(_PeriodicSaver):
    """All workers meet after the same step, also those whose streams have ended before the others'.

    With `every_steps` all know the steps. With `every_s` worker 0 says at each meeting after how
    many steps the next one is: as many as have been made since the last, or fewer if a save is due.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._steps_to_meeting, self._interval, self._met_at = 1, 1, time.monotonic()
        self._num_meetings = 0  # in this pass; names the next one

    def begin_epoch(self, num_done: int) -> None:
        self._steps_to_meeting, self._num_meetings = 1, 0
        if (every := self._every_steps) is None:
            self._repeat_meetings(num_done)
            return
        num_steps = self.optimizer.num_steps
        self._num_meetings = num_steps // every - (num_steps - num_done) // every
        if num_done and num_steps % every == 0:  # the predecessor may not have been there
            self._num_meetings -= 1
            self._meet(has_ended=False)

    def _repeat_meetings(self, num_done: int) -> None:
        """Learn from each meeting that a predecessor attended after how many steps the next was."""
        while num_done >= self._steps_to_meeting:
            num_done -= self._steps_to_meeting
            self._meet(has_ended=False, saves=num_done == 0)
        self._steps_to_meeting -= num_done

    def after_step(self) -> None:
        if self._every_steps is not None:
            is_time = self._is_at_step()
        else:
            self._steps_to_meeting -= 1
            is_time = self._steps_to_meeting == 0
        if is_time:
            self.optimizer.refresh()  # returns when the step has been applied everywhere
            self._meet(has_ended=False)

    def end_epoch(self) -> None:
        while not self._meet(has_ended=True):
            pass

    def _meet(self, *, has_ended: bool, saves: bool = True) -> bool:
        """Meet, and save if it is time; returns whether the streams of all workers have ended."""
        self._num_meetings += 1
        by_time = self._every_s is not None
        body: dict[str, Any] = {"has_ended": has_ended}
        with self._cluster.client.script.section(f"step {self._num_meetings}"):
            if self._cluster.worker == 0 and by_time:
                body |= {"save": self._left_s() <= 0, "next": self._next_interval()}
            replies = self._cluster.client.coordinator.gather(
                body, [], purpose="step", patient=True
            )
            first, _ = replies[0]
            if by_time:
                self._steps_to_meeting = int(first["next"])
            if all(reply["has_ended"] for reply, _ in replies):
                return True
            if saves and (not by_time or first["save"]):
                self._save_together()
            return False

    def _next_interval(self) -> int:
        """Steps to the next meeting: at most twice as many as to this one."""
        assert self._every_s is not None
        now = time.monotonic()
        rate = self._interval / max(now - self._met_at, 1e-9)
        left_s = self._left_s()
        wanted = rate * (left_s if left_s > 0 else self._every_s)
        self._interval, self._met_at = max(1, min(round(wanted), 2 * self._interval)), now
        return self._interval


class BackgroundSaver(_PeriodicSaver):
    """Worker 0 has the servers write, in a thread beside its training."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._is_due = False
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._cluster.add_running(self.close)

    def after_step(self) -> None:
        if self._cluster.worker != 0:
            return
        by_time = self._every_s is not None and self._left_s() <= 0
        self._is_due |= by_time or self._is_at_step()
        is_busy = self._thread is not None and self._thread.is_alive()
        if self._is_due and not is_busy:
            self._start()

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _start(self) -> None:
        self._raise_error()
        self.optimizer.mode.publish()
        states = {0: WorkerState.current(self.optimizer, self.random)}
        groups, extra = self.optimizer.state_dict(), self.extra()

        def work() -> None:
            try:
                location = self._folders.next()
                write(self.optimizer, location, states, groups, extra, self._options)
            except BaseException as error:  # noqa: BLE001 raised in the thread that trains
                self._error = error

        self._is_due, self._saved_at = False, time.monotonic()
        thread = threading.Thread(target=work, name="trireme-save", daemon=True)
        start_thread(thread)
        self._thread = thread

    def end_epoch(self) -> None:
        """Wait for a save under way, so that all streams in a checkpoint are in one epoch."""
        if self._thread is not None:
            self._thread.join(SAVE_TIMEOUT_S)
        self._raise_error()

    def close(self) -> None:
        """Give a save under way some time to end."""
        self._cluster.take_back(self.close)
        if self._thread is None:
            return
        patience_s = self._cluster.client.timeout_s
        self._thread.join(patience_s)
        if self._thread.is_alive():
            log.warning("a save did not end within %.0f s and is left behind", patience_s)
        elif self._error is not None:
            log.warning("a save under way has failed: %s", self._error)


class HoldingSaver(_PeriodicSaver):
    """Worker 0 has the servers write after a step of all workers, who wait for it before the next:
    dense weights, which no push carries, are those of that step, as rows are.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._is_asked = False  # the others wait after the step that is made next

    def begin_epoch(self, num_done: int) -> None:
        self._ask_if_due()

    def after_step(self) -> None:
        if self._is_asked:
            self._is_asked = False
            self._save()
        self._ask_if_due()

    def _ask_if_due(self) -> None:
        if self._cluster.worker != 0:
            return
        every = self._every_steps
        is_at_step = every is not None and (self.optimizer.num_steps + 1) % every == 0
        if is_at_step or (self._every_s is not None and self._left_s() <= 0):
            self._is_asked = True
            self.optimizer.mode.hold_after_next_step()

    def _save(self) -> None:
        mode = self.optimizer.mode
        mode.wait_for_all_steps()
        mode.publish()
        states = {0: WorkerState.current(self.optimizer, self.random)}
        groups, location = self.optimizer.state_dict(), self._folders.next()
        write(self.optimizer, location, states, groups, self.extra(), self._options, is_level=True)
        self._saved_at = time.monotonic()

    def end_epoch(self) -> None:
        self._is_asked = False
