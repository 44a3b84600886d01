"""The log of a server: records in segments; `append` returns when a record is in the file."""

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from trireme.errors import ResourceExhausted, TriremeError, writing
from trireme.server.log.segment import Record, Segment
from trireme.storage.local import sync_folder

log = logging.getLogger("trireme.server")

Kept = Callable[[Exception | None], None]


class Log:
    """Writes segments. A record that is appended survives the process. With `is_synced` it is
    "kept" when it also survives the machine: one fsync serves all waiting callers. Threads: any.

    number: of the first segment. state: 16 bytes, the id of the server's state.

    Raises ResourceExhausted: the disk is full.
    """

    def __init__(self, folder: Path, number: int, state: bytes, *, is_synced: bool) -> None:
        self._folder, self._state, self.is_synced = folder, state, is_synced
        self._lock = threading.Lock()  # guards all but _waiting
        self._syncing = threading.Lock()  # held while the file is synced or replaced
        self._changed = threading.Condition()  # guards _waiting and what the syncer reads
        self._waiting: list[tuple[int, Kept]] = []
        self._kept = 0  # bytes known to be on the disk
        self._failure: Exception | None = None
        self._is_closing = False
        self.num_bytes = 0  # bytes appended since the start
        with writing(f"log: cannot write in {folder}"):
            self._segment = Segment(folder, number, state, is_synced=is_synced)
            sync_folder(folder)
        self._syncer = threading.Thread(target=self._sync, name="trireme-log", daemon=True)
        if is_synced:
            self._syncer.start()

    def append(self, record: Record) -> None:
        """Write a record. After an error the log does not contain it."""
        packed = Segment.pack(record)
        with self._lock:
            if self._failure is not None:
                raise self._failure
            segment = self._segment
            before = segment.end
            with writing(f"log: cannot write {segment.path}"):
                segment.append(packed, max(0, self._kept - (self.num_bytes - before)))
            self.num_bytes += segment.end - before

    def rotate(self, first: Sequence[Record]) -> int:
        """Start a new segment with these records; returns its number. After an error the old
        segment is in use as before. Nobody may append meanwhile.
        """
        with self._lock, self._syncing, writing(f"log: cannot write in {self._folder}"):
            old = self._segment
            new = Segment(self._folder, old.number + 1, self._state, is_synced=self.is_synced)
            try:
                for record in first:
                    new.append(Segment.pack(record), 0)
                if self.is_synced:
                    old.sync()
                    new.sync()
                sync_folder(self._folder)
            except BaseException:
                new.abandon()
                raise
            self._segment = new
            self.num_bytes += new.end
            position = self.num_bytes
            old.close()
        if self.is_synced:
            self._notify(position, None)
        return new.number

    def when_kept(self, action: Kept) -> None:
        """Call `action` when everything appended so far is kept; with the error if that fails."""
        if not self.is_synced:
            action(None)
            return
        with self._changed:
            failure, position = self._failure, self.num_bytes
            if failure is None and position > self._kept:
                self._waiting.append((position, action))
                self._changed.notify_all()
                return
        action(failure)

    def _sync(self) -> None:
        """Sync whenever somebody waits; the thread's function."""
        while True:
            with self._changed:
                while not self._waiting and not self._is_closing:
                    self._changed.wait()
                if not self._waiting:
                    return
            failure: TriremeError | None = None
            with self._syncing:
                position = self.num_bytes
                try:
                    self._segment.sync()
                except OSError as error:
                    failure = ResourceExhausted(
                        f"log: cannot sync {self._segment.path}: {error.strerror}; what was"
                        " acknowledged is kept, start the server again"
                    )
            self._notify(position, failure)

    def _notify(self, position: int, failure: TriremeError | None) -> None:
        with self._changed:
            if failure is None:
                self._kept = max(self._kept, position)
            else:
                self._failure = failure  # what is on the disk is unknown from now on
            ready = [a for p, a in self._waiting if failure or p <= self._kept]
            self._waiting = [] if failure else [(p, a) for p, a in self._waiting if p > self._kept]
        for action in ready:
            try:
                action(failure)
            except Exception:
                log.exception("log: a reply could not be given")

    def close(self) -> None:
        """Keep everything that was appended, and close."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if self.is_synced:
            self._syncer.join()
        with self._lock:
            self._segment.close()
