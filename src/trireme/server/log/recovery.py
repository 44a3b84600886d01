"""Recovery of a server that starts again: the newest snapshot, then the records after it."""

import logging
import time
from collections.abc import Collection
from pathlib import Path

from trireme.errors import Corruption, ResourceExhausted, TriremeError, writing
from trireme.server.attendance import Attendance
from trireme.server.log.kept_segments import sweep_segments
from trireme.server.log.replay import STATE, STATE_END, install_state, leave_out, replay
from trireme.server.log.segment import Record, SegmentReader, file_name
from trireme.server.log.snapshot import read_snapshot
from trireme.server.log.state_folder import StateFolder
from trireme.server.state import ServerState
from trireme.storage.local import sync_folder

log = logging.getLogger("trireme.server")

PROGRESS_S = 3.0

RecordName = tuple[Path, int]
"""Where a record is: the resolved path of its file, and its offset there."""


class Recovery:
    """Fills an empty server and attendance from a state folder. is_synced: what it recovers then
    survives the machine.

    state: 16 bytes, the id of the recovered state; None: the folder is empty.
    next_number: of the next segment to write.
    skipped: the records among `skips` that could not be replayed; it goes on without them.
    """

    def __init__(
        self,
        folder: StateFolder,
        server: ServerState,
        attendance: Attendance,
        *,
        is_synced: bool,
        skips: Collection[RecordName] = (),
    ) -> None:
        self._folder, self._server, self._attendance = folder, server, attendance
        self._is_synced, self._skips = is_synced, skips
        self.skipped: set[RecordName] = set()
        self.state: bytes | None = None
        self.next_number = 1
        self._num_bytes = self._num_records = 0
        self._started = self._reported_at = time.monotonic()

    def run(self) -> None:
        """Recover, and cut off an unfinished record at the end. Raises Corruption: a file is
        missing or damaged, or a record cannot be replayed (a TriremeError keeps its type). All name
        file and offset.
        """
        segments = self._folder.segments()
        snapshot = max(self._folder.snapshots(), default=None)
        first = min(segments, default=1) if snapshot is None else snapshot
        if (noted := self._folder.noted()) > max(segments, default=0):
            raise Corruption(
                f"log: expected segments up to {noted} in {self._folder.path}, found"
                f" {list(segments)}; put {file_name(noted)} back, or continue from a checkpoint"
                " with an empty state folder"
            )
        self._folder.remove_unfinished()  # and so sync the snapshot's name before the sweep
        self._folder.sweep(first)
        numbers = [number for number in segments if number >= first]
        if numbers != list(range(first, first + len(numbers))) or (snapshot and not numbers):
            raise Corruption(
                f"log: expected segments from {first} on in {self._folder.path}, found {numbers}"
            )
        if snapshot is None and numbers and first != 1:
            raise Corruption(
                f"log: expected a snapshot or the first segment in {self._folder.path}, found"
                f" segments from {first} on alone"
            )
        for number in numbers:
            begins = self._folder.snapshot(number) if number == snapshot else None
            self._replay(segments[number], begins, is_last=number == numbers[-1])
            self.next_number = number + 1
        if self.state is not None:
            kept = {self._folder.snapshot(snapshot).name} if snapshot is not None else set()
            sweep_segments(self._server.tier, self._server.state_id, kept)
        if self._server.prepared is not None and not self._server.prepared.is_whole:
            self._server.prepared = None  # killed, or its disk full, while it was recorded
        for path, at in sorted({*self._skips} - self.skipped):
            log.warning(
                "log: %s has no record %s:%d that fails: --skip_records leaves out nothing for it",
                *(self._folder.path, path, at),
            )
        if self._num_records:
            self._attendance.begin_again()
            log.info("%s", self._summary())

    def _replay(self, path: Path, snapshot: Path | None, *, is_last: bool) -> None:
        reader = SegmentReader(path)
        if reader.head is not None:
            if self.state not in (None, reader.head.state):
                raise Corruption(f"{path}: expected a segment of the same state as those before")
            self.state = reader.head.state
            self._server.state_id = self.state.hex()
            is_known = False  # it only repeats what the segments before have
            for at, record in reader.records():
                is_known = is_known or (record[0] == STATE and snapshot is None)
                if not is_known:
                    self._execute(path, at, record, snapshot)
                    snapshot = None
                is_known = is_known and record[0] != STATE_END
                self._num_records += 1
                if time.monotonic() - self._reported_at > PROGRESS_S:
                    self._reported_at = time.monotonic()
                    log.info("log: recovering, %d records so far", self._num_records)
        if snapshot is not None:
            raise Corruption(f"{path}: expected the state that goes with {snapshot}, found none")
        self._num_bytes += reader.end
        self._end_segment(reader, is_last=is_last)

    def _execute(self, path: Path, at: int, record: Record, snapshot: Path | None) -> None:
        try:
            if snapshot is None:
                replay(self._server, self._attendance, record)
            elif record[0] == STATE:
                install_state(self._server, self._attendance, record[1])
                self._num_bytes += read_snapshot(self._server, snapshot)
            else:
                raise Corruption(f"expected the state of {snapshot}, found {record[0]!r}")
        except Exception as error:  # whatever a record makes fail, its place is named
            name = (path.resolve(), at)
            if name in self._skips and snapshot is None:
                self._skip(name, record, error)
                return
            is_known = isinstance(error, TriremeError)
            kind = type(error) if is_known else Corruption
            cause = error if is_known else f"{type(error).__name__}: {error}"
            if isinstance(error, ResourceExhausted):
                way = f"; nothing is lost: {self._how_to_make_room()}, and start the server again"
            else:
                skip = f"; --skip_records {path}:{at} starts the server without it"
                way = "" if snapshot else skip
            raise kind(f"{path}: the record at offset {at} ({record[0]}): {cause}{way}") from error

    def _how_to_make_room(self) -> str:
        tier = self._server.tier
        if tier is None:
            return "give it more memory"
        folders = ", ".join(map(str, tier.roots))
        return f"free space in {folders} (--ssd_dir), or give it a larger --memory"

    def _skip(self, name: RecordName, record: Record, error: Exception) -> None:
        """Go on without a record that fails."""
        method, body, _ = record
        leave_out(self._server, record)
        self.skipped.add(name)
        what = {key: body[key] for key in ("stream", "sequence", "step") if key in body}
        log.warning(
            "log: %s: left out the record at offset %d (%s %s), which fails: %s: %s; what it had"
            " changed before it failed stays",
            *(*name, method, what, type(error).__name__, error),
        )

    def _end_segment(self, reader: SegmentReader, *, is_last: bool) -> None:
        """Cut off a record that was not written completely: it was never acknowledged. Sync what
        is left before a later segment relies on it.
        """
        left = reader.size - reader.end
        if left and not is_last:
            raise Corruption(
                f"{reader.path}: expected a whole record at offset {reader.end}, found {left} bytes"
                " of one, and another segment behind"
            )
        if left:
            log.warning(
                "log: %s: cut off %d bytes at offset %d, which a record that was being written has"
                " left; nothing of it was acknowledged",
                *(reader.path, left, reader.end),
            )
        if left or self._is_synced:
            with writing(f"log: cannot make {reader.path} durable"):
                reader.make_durable(is_trusted=self._is_synced)
                sync_folder(reader.path.parent)

    def _summary(self) -> str:
        server = self._server
        rows = sum(table.rows.rows for table in server.tables.values())
        streams = ", ".join(f"{stream}: {state.last}" for stream, state in server.streams.items())
        return (
            f"log: recovered {rows} rows of {len(server.tables)} tables and {len(server.blocks)}"
            f" blocks from {self._num_bytes >> 20} MiB in {self._folder.path} in"
            f" {time.monotonic() - self._started:.1f} s; last pushes of streams {{{streams}}}"
        )
