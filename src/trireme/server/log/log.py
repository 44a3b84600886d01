"""The log of a server: records in segments; `append` returns when a record is in the file."""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from trireme.errors import ResourceExhausted, TriremeError, start_thread, writing
from trireme.server.log.segment import DiskUnknown, Record, Segment, known
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
        self._failure: TriremeError | None = None
        self._is_closing = False
        self.num_bytes = 0  # bytes appended since the start
        self._end_of_records = 0  # as many, without the notes behind the last record
        with writing(f"log: cannot write in {folder}"), self._ending():
            self._segment = Segment(folder, number, state, is_synced=is_synced)
            sync_folder(folder)
        self._syncer = threading.Thread(target=self._sync_waiting, name="trireme-log", daemon=True)
        if is_synced:
            start_thread(self._syncer)

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """DiskUnknown ends the log; the syncer tells who waits."""
        try:
            yield
        except DiskUnknown as error:
            self._failure = ResourceExhausted(
                f"log: {error}; what was acknowledged is kept, start the server again"
            )
            raise self._failure from error

    def append(self, record: Record) -> None:
        """Write a record. After an error the log does not contain it."""
        packed = Segment.pack(record)
        with self._lock:
            if self._failure is not None:
                raise self._failure
            segment = self._segment
            before = segment.end
            with writing(f"log: cannot write {segment.path}"), self._ending():
                segment.append(packed, max(0, self._kept - (self.num_bytes - before)))
            self.num_bytes += segment.end - before
            self._end_of_records = self.num_bytes

    def rotate(self, first: Iterable[Record]) -> int:
        """Start a new segment with these records; returns its number. After an error the old
        segment is in use as before, but a sync that fails ends the log. Nobody may append
        meanwhile.
        """
        number = self._rotate(first)
        if self.is_synced:
            position = self._end_of_records  # the note behind them is not on the disk yet
            self._note_kept(position)
            self._notify(position, None)
        return number

    def _rotate(self, first: Iterable[Record]) -> int:
        with self._lock, self._syncing, writing(f"log: cannot write in {self._folder}"):
            if self._failure is not None:
                raise self._failure
            old = self._segment
            with self._ending():
                new = self._follower(old, first)
            self._segment = new
            self.num_bytes += new.end
            self._end_of_records = self.num_bytes
            old.close()
        return new.number

    def _follower(self, old: Segment, first: Iterable[Record]) -> Segment:
        """A new segment with these records, after all of the old one is kept."""
        if self.is_synced:  # first: an unfinished record with a segment behind is a damage
            with known(f"sync {old.path}"):
                old.sync()
        try:
            return self._begun(old.number + 1, first)
        except BaseException:
            with known(f"sync {self._folder}"):  # or it may come back behind what follows in old
                sync_folder(self._folder)
            raise

    def _begun(self, number: int, first: Iterable[Record]) -> Segment:
        """A new segment with these records, kept; after an error it is removed again."""
        new = Segment(self._folder, number, self._state, is_synced=self.is_synced)
        try:
            for record in first:
                new.append(Segment.pack(record), 0)
            with known(f"sync {self._folder}"):
                if self.is_synced:
                    new.sync()
                sync_folder(self._folder)
        except BaseException:
            new.abandon()
            raise
        return new

    def when_kept(self, action: Kept) -> None:
        """Call `action` when everything appended so far is kept; with the error if that fails."""
        if not self.is_synced:
            action(None)
            return
        with self._changed:
            failure, position = self._failure, self._end_of_records
            if failure is None and position > self._kept:
                self._waiting.append((position, action))
                self._changed.notify_all()
                return
        action(failure)

    def _sync_waiting(self) -> None:
        """Sync whenever somebody waits; the thread's function."""
        while True:
            with self._changed:
                while not self._waiting and not self._is_closing:
                    self._changed.wait()
                if not self._waiting:
                    return
            try:
                with self._syncing:
                    if self._failure is not None:  # of a sync in `rotate`
                        self._notify(0, self._failure)
                        continue
                    position = self.num_bytes
                    with self._ending(), known(f"sync {self._segment.path}"):
                        self._segment.sync()
            except ResourceExhausted as error:
                self._notify(0, error)
            else:
                self._note_kept(position)
                self._notify(position, None)

    def _note_kept(self, position: int) -> None:
        """Write behind the records that they are on the disk. Without it a later start would take
        damage of them for the end that a power loss leaves.
        """
        with self._lock:
            before = self._segment.end
            begin = self.num_bytes - before
            if position <= begin:  # a new segment was begun meanwhile
                return
            try:
                with self._ending():
                    self._segment.note_kept(position - begin)
            except (OSError, ResourceExhausted) as error:
                # What is kept is kept, and the next append fails by itself.
                log.warning("log: cannot note what %s keeps: %s", self._segment.path, error)
            self.num_bytes = begin + self._segment.end

    def end(self, failure: TriremeError) -> None:
        """Acknowledge nothing any more, for this reason."""
        self._notify(0, failure)

    def _notify(self, position: int, failure: TriremeError | None) -> None:
        with self._changed:
            self._failure = self._failure or failure
            if (ended := self._failure) is None:
                self._kept = max(self._kept, position)
            ready = [a for p, a in self._waiting if ended or p <= self._kept]
            self._waiting = [] if ended else [(p, a) for p, a in self._waiting if p > self._kept]
        for action in ready:
            try:
                action(ended)
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
