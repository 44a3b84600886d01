"""The journal that keeps: a log in the server's state folder, and snapshots beside it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from trireme.checkpoint.server_side.operations import OperationProgress
from trireme.errors import TriremeError
from trireme.rpc import Deferred, Reply
from trireme.rpc.frames import Array
from trireme.server.attendance import Attendance
from trireme.server.journal import Behind, Journal
from trireme.server.log.contents import state_records
from trireme.server.log.folder import StateFolder
from trireme.server.log.gate import Gate
from trireme.server.log.log import Log
from trireme.server.log.snapshot import write_snapshot
from trireme.server.shard import Shard

log = logging.getLogger("trireme.server")


class LogJournal(Journal):
    """Durability "process" or, if the log is synced, "machine". Threads: any.

    Locks, in this order: `_writing` (a snapshot, or who waits for it), `_gate`, then the shard's.

    Args:
        log_bytes: a snapshot is taken when the log has grown by so many bytes, or by those of the
            last snapshot, if that has more.
    """

    def __init__(
        self,
        folder: StateFolder,
        to: Log,
        shard: Shard,
        attendance: Attendance,
        log_bytes: int,
    ) -> None:
        self.where = str(folder.path)
        self._folder, self._log = folder, to
        self._shard, self._attendance = shard, attendance
        self._gate = Gate()
        self._writing = threading.Lock()
        self._log_bytes = log_bytes
        self._next_at = log_bytes
        self._begun = (0, time.monotonic())  # the last snapshot: bytes of the log, and when
        self._stopping = OperationProgress()
        self._is_closing = False
        self._due = threading.Event()
        self._writer = threading.Thread(target=self._write, name="trireme-snapshot", daemon=True)
        self._writer.start()

    def behind(self) -> Behind:
        start, at = self._begun
        return Behind(self._log.num_bytes - start, time.monotonic() - at)

    @contextmanager
    def pushing(self) -> Iterator[None]:
        with self._gate.shared():
            yield

    @contextmanager
    def changing(self) -> Iterator[None]:
        with self._gate.alone():
            yield

    @contextmanager
    def judging(self) -> Iterator[None]:
        with self._writing, self._gate.alone():
            yield

    @contextmanager
    def replacing(self) -> Iterator[None]:
        with self._writing:
            yield
            self._snapshot()

    def record(self, method: str, body: dict[str, Any], arrays: Sequence[Array] = ()) -> None:
        self._log.append((method, body, arrays))
        if self._log.num_bytes >= self._next_at:
            self._due.set()

    def answered(self, reply: Reply) -> Reply | Deferred:
        if not self._log.is_synced:
            return reply
        deferred = Deferred(describe=lambda: "waits for the disk of the server's log")
        self.when_kept(lambda error: _give(deferred, reply, error))
        return deferred

    def when_kept(self, action: Callable[[Exception | None], None]) -> None:
        self._log.when_kept(action)

    def close(self) -> None:
        """Nobody changes anything any more."""
        self._is_closing = True
        self._stopping.stop()
        self._due.set()
        self._writer.join()
        self._log.close()

    # ---- snapshots ----

    def _write(self) -> None:
        """The thread of snapshots."""
        while True:
            self._due.wait()
            if self._is_closing:
                return
            self._due.clear()
            with self._writing:
                if self._log.num_bytes < self._next_at:
                    continue
                try:
                    self._snapshot()
                except TriremeError as error:
                    if not self._is_closing:
                        log.warning("log: a snapshot failed, the log grows on: %s", error)
                except Exception:
                    log.exception("log: a snapshot failed, the log grows on")

    def _snapshot(self) -> None:
        """Requires: `_writing`."""
        if not self._shard.is_in_a_job:
            return
        self._next_at = self._log.num_bytes + self._log_bytes  # when to try again, if this fails
        with self._gate.alone():
            number = self._log.rotate(list(state_records(self._shard, self._attendance)))
            start, at = self._log.num_bytes, time.monotonic()
        size = write_snapshot(self._shard, self._folder.snapshot(number), self._stopping)
        self._folder.sweep(number)
        self._begun = (start, at)
        self._next_at = start + max(self._log_bytes, size)
        log.info("log: snapshot %d of %d MiB is written", number, size >> 20)


def _give(deferred: Deferred, reply: Reply, error: Exception | None) -> None:
    if error is None:
        deferred.reply(reply)
    elif isinstance(error, TriremeError):
        deferred.fail(error)
    else:
        raise error
