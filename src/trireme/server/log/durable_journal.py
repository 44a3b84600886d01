"""The journal that keeps changes: a log in the server's state folder, and snapshots beside it."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from trireme.checkpoint.server_side.operations import OperationProgress
from trireme.errors import ResourceExhausted, TriremeError, start_thread
from trireme.rpc import Deferred, Reply
from trireme.rpc.frames import Array
from trireme.server.attendance import Attendance
from trireme.server.journal import Journal, LogLag, answer_of
from trireme.server.log.log import Log
from trireme.server.log.replay import state_records
from trireme.server.log.snapshot import write_snapshot
from trireme.server.log.state_folder import StateFolder
from trireme.server.state import ServerState

logger = logging.getLogger("trireme.server")

LATE_MAX = 64
"""How many changes may wait for a snapshot."""


class DurableJournal(Journal):
    """Durability "process" or, if the log is synced, "machine". Threads: any.

    Locks, in this order: `_writing` (held while a snapshot is written), `_changes` (pushes share
    it), `_order` (held by one push at a time), then the server's. A snapshot is due when the log
    has grown by `log_bytes`, or by the size of the last snapshot if that is larger. After a change
    within `replacing` that failed, memory has what the folder lacks: nothing is recorded and no
    snapshot is made until another one succeeds.
    """

    def __init__(
        self,
        folder: StateFolder,
        log: Log,
        server: ServerState,
        attendance: Attendance,
        log_bytes: int,
    ) -> None:
        self.where = str(folder.path)
        self._folder, self._log = folder, log
        self._server, self._attendance, self._changes = server, attendance, SharedLock()
        self._order, self._writing = threading.Lock(), threading.Lock()
        self._log_bytes = self._next_at = log_bytes  # between snapshots; when the next is due
        self._tried_at = 0  # where the log was when one was tried last
        self._begun = (0, time.monotonic())  # of the last snapshot: bytes of the log, and when
        self._progress = OperationProgress()  # of the snapshot that is being written
        self._is_closing = False
        self._unkept: TriremeError | None = None
        self._num_late = threading.Semaphore(LATE_MAX)
        self._late = ThreadPoolExecutor(1, thread_name_prefix="trireme-late")
        self._late.submit(int)  # its only thread starts now: no change fails for want of one
        self._due = threading.Event()
        self._writer = threading.Thread(target=self._write, name="trireme-snapshot", daemon=True)
        start_thread(self._writer)

    keeps = True

    def lag(self) -> LogLag:
        num_bytes, begun = self._begun
        return LogLag(self._log.num_bytes - num_bytes, time.monotonic() - begun)

    def pushing(self) -> AbstractContextManager[None]:
        return self._changes.shared()

    @contextmanager
    def in_order(self) -> Iterator[None]:
        with self._order:
            try:
                yield
            except ResourceExhausted:  # by a disk, perhaps, with rows that only a snapshot needs
                if self._server.tier is not None and self._log.num_bytes > self._tried_at:
                    self._next_at = 0
                    self._due.set()
                raise

    def changing(self) -> AbstractContextManager[None]:
        return self._changes.exclusive()

    @contextmanager
    def changing_once(self) -> Iterator[None]:
        with self._writing, self._changes.exclusive():
            yield

    def change_once(self, change: Callable[[], Reply]) -> Reply | Deferred:
        if self._writing.acquire(blocking=False):
            try:
                with self._changes.exclusive():
                    reply = change()
            finally:
                self._writing.release()
            return self.answered(reply)
        deferred = Deferred(describe=lambda: "waits for the snapshot that is being written")
        if not self._num_late.acquire(blocking=False):
            raise ResourceExhausted(
                f"server: expected at most {LATE_MAX} changes that wait for the snapshot which is"
                " being written, found more"
            )
        self._late.submit(self._change_late, change, deferred)
        return deferred

    def _change_late(self, change: Callable[[], Reply], deferred: Deferred) -> None:
        def make_reply() -> Reply:
            with self.changing_once():
                return change()

        try:
            reply = answer_of(make_reply)
        finally:
            self._num_late.release()
        if isinstance(reply, Reply):
            self.answer_when_kept(deferred, lambda: reply)
        else:
            deferred.fail(reply)

    @contextmanager
    def replacing(self) -> Iterator[None]:
        with self._writing:
            self._unkept = None  # what replaces the rest may be kept
            try:
                yield
                self._snapshot()
            except BaseException as error:
                self._unkept = ResourceExhausted(
                    f"log: {self.where} holds what the server had before a load that was not kept:"
                    f" {error}; load again, or start the server again"
                )
                raise

    def record(self, method: str, body: dict[str, Any], arrays: Sequence[Array] = ()) -> None:
        if self._unkept is not None:
            raise self._unkept
        self._log.append((method, body, arrays))
        if self._log.num_bytes >= self._next_at:
            self._due.set()

    def answered(self, reply: Reply) -> Reply | Deferred:
        if not self._log.is_synced:
            return reply
        deferred = Deferred(describe=lambda: "waits for the disk of the server's log")
        self.answer_when_kept(deferred, lambda: reply)
        return deferred

    def when_kept(self, action: Callable[[Exception | None], None]) -> None:
        self._log.when_kept(action)

    def close(self) -> None:
        """End the threads and close the log. Nothing may change any more."""
        self._is_closing = True
        self._progress.stop()
        self._due.set()
        self._writer.join()
        self._late.shutdown(cancel_futures=True)
        self._log.close()

    # ---- snapshots ----

    def _write(self) -> None:
        """Write snapshots when they are due; the thread's function."""
        while True:
            self._due.wait()
            self._due.clear()  # first: `close` sets it once more
            if self._is_closing:
                return
            with self._writing:
                if self._log.num_bytes < self._next_at or self._unkept is not None:
                    continue
                try:
                    self._snapshot()
                except TriremeError as error:
                    if not self._is_closing:
                        logger.warning("log: a snapshot failed, the log grows on: %s", error)
                except Exception:
                    logger.exception("log: a snapshot failed, the log grows on")

    def _snapshot(self) -> None:
        """Requires: `_writing` is held."""
        if not self._server.assignment.is_in_a_job:
            return
        self._next_at = self._log.num_bytes + self._log_bytes  # when to try again, if this fails
        with self._changes.exclusive():
            number = self._log.rotate(state_records(self._server, self._attendance))
            try:
                self._folder.note(number)
            except TriremeError as error:  # nobody would miss what follows if it were gone
                self._log.end(error)
                raise
            self._tried_at, begun = self._log.num_bytes, time.monotonic()
        self._progress = OperationProgress()  # a failure stops it, and no other
        if self._is_closing:
            self._progress.stop()
        size = write_snapshot(self._server, self._folder, number, self._progress)
        self._begun = (self._tried_at, begun)
        self._next_at = self._tried_at + max(self._log_bytes, size)
        logger.info("log: snapshot %d of %d MiB is written", number, size >> 20)


class SharedLock:
    """A readers-writer lock: a thread that waits to hold it alone goes before new sharers. One
    thread may not enter it twice. Threads: any.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_sharing = 0
        self._is_exclusive = False
        self._num_waiting = 0

    @contextmanager
    def shared(self) -> Iterator[None]:
        with self._changed:
            while self._is_exclusive or self._num_waiting:
                self._changed.wait()
            self._num_sharing += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_sharing -= 1
                if not self._num_sharing:
                    self._changed.notify_all()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        with self._changed:
            self._num_waiting += 1
            try:
                while self._is_exclusive or self._num_sharing:
                    self._changed.wait()
            finally:
                self._num_waiting -= 1
            self._is_exclusive = True
        try:
            yield
        finally:
            with self._changed:
                self._is_exclusive = False
                self._changed.notify_all()
