"""What survives a server: nothing, or in a state folder everything that it has acknowledged before
the process is killed or the machine goes down.
"""

import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from trireme.coordinator.coordinator import Coordinator
from trireme.errors import BadRequest, Corruption, check_choice, check_counts
from trireme.server.attendance import Attendance
from trireme.server.log.durable_journal import DurableJournal
from trireme.server.log.kept_segments import sweep_segments
from trireme.server.log.log import Log
from trireme.server.log.recovery import RecordName, Recovery
from trireme.server.log.state_folder import COORDINATOR, StateFolder
from trireme.server.state import ServerState
from trireme.storage.document import Document

DURABILITIES = ("none", "process", "machine")
LOG_BYTES = 2 << 30


@dataclass(frozen=True, kw_only=True)
class Durability:
    """What survives a server.

    Attributes:
        mode: "none": nothing. "process": acknowledged requests survive the process (kill -9).
            "machine": they also survive the machine; every answer waits for the disk.
        folder: of this server alone; required unless the mode is "none".
        log_bytes: a snapshot replaces the log when it has grown by this, or by the size of the last
            snapshot if that is more; default LOG_BYTES.
        skips: records that are left out if they cannot be replayed (`parse_records`).
        index: of the server in its job, if the process knows it: the folder must be that one's.
    """

    mode: str = "none"
    folder: Path | None = None
    log_bytes: int | None = None
    skips: frozenset[RecordName] = frozenset()
    index: int | None = None

    def __post_init__(self) -> None:
        check_choice("durability", DURABILITIES, mode=self.mode)
        own = {"state_dir": self.folder, "log_bytes": self.log_bytes, "skip_records": self.skips}
        idle = [f"--{name}" for name, value in own.items() if value not in (None, frozenset())]
        if self.mode == "none" and idle:
            raise BadRequest(
                "durability: expected process or machine (--durability, TRIREME_DURABILITY)"
                f" with {' and '.join(idle)}, found none"
            )
        if self.mode != "none" and self.folder is None:
            raise BadRequest(
                f"durability: expected a folder for a server's state (--state_dir,"
                f" TRIREME_STATE_DIR) with {self.mode!r}, found none"
            )
        if self.log_bytes is not None:
            check_counts("durability", log_bytes=self.log_bytes)


def parse_records(text: str) -> frozenset[RecordName]:
    """Parse "FILE:OFFSET,FILE:OFFSET", as errors of a recovery name records. Raises BadRequest."""
    records = set()
    for entry in filter(None, (entry.strip() for entry in text.split(","))):
        path, _, offset = entry.rpartition(":")
        if not path or not (offset.isascii() and offset.isdecimal()):
            raise BadRequest(f"skip_records: expected FILE:OFFSET,..., found {entry!r}")
        records.add((Path(path).resolve(), int(offset)))
    return frozenset(records)


@contextmanager
def kept(
    durability: Durability, server: ServerState, coordinator: Coordinator, attendance: Attendance
) -> Iterator[Callable[[], None]]:
    """Recover these empty parts of a server from its state folder, and log their changes during the
    block. Yields a function that marks the job as over, so that the folder is emptied at the end.
    Raises BadRequest: another process uses the folder. Corruption: a file is missing or damaged.
    """
    if durability.folder is None:
        yield lambda: None
        return
    is_over = threading.Event()
    folder = StateFolder(durability.folder)
    try:
        is_synced = durability.mode == "machine"
        document = Document(folder.path / COORDINATOR, is_synced=is_synced)
        skips = durability.skips
        recovery = Recovery(folder, server, attendance, is_synced=is_synced, skips=skips)
        recovery.run()
        _check_place(durability, server)
        state = recovery.state or uuid.UUID(server.state_id).bytes
        _recover_coordinator(coordinator, document, server)
        records = Log(folder.path, recovery.next_number, state, is_synced=is_synced)
        folder.note(recovery.next_number)
        log_bytes = durability.log_bytes or LOG_BYTES
        journal = DurableJournal(folder, records, server, attendance, log_bytes)
        server.journal = attendance.journal = journal
        try:
            _finish_steps(server)
            if recovery.skipped:
                with journal.replacing():
                    pass  # a snapshot without them: later starts do not need the option
            yield is_over.set
        finally:
            journal.close()
        if is_over.is_set():
            folder.empty()
            sweep_segments(server.tier, server.state_id, ())
    finally:
        folder.close()


def _check_place(durability: Durability, server: ServerState) -> None:
    """Raise Corruption if the folder is that of another server of the job."""
    kept = server.assignment.index
    if server.assignment.is_in_a_job and durability.index not in (None, kept):
        raise Corruption(
            f"log: expected the state of server {durability.index} in {durability.folder}, found"
            f" that of server {kept}; start each server with its own --state_dir"
        )


def _recover_coordinator(coordinator: Coordinator, document: Document, server: ServerState) -> None:
    saved, assignment = document.read(), server.assignment
    is_first = assignment.is_in_a_job and assignment.index == 0
    if saved is None and is_first:
        raise Corruption(
            f"log: expected {document.path} beside the state of server 0, found none; continue from"
            " a checkpoint with an empty state folder"
        )
    if saved is not None:
        states = saved["states"]  # of all servers, once the first worker has reported them
        if is_first and states and states[0] != server.state_id:
            raise Corruption(
                f"log: expected {document.path} beside state {states[0]} of server 0, found it"
                f" beside {server.state_id}; put each file back into its own folder"
            )
        coordinator.install(saved)
    coordinator.keep(document.write)


def _finish_steps(server: ServerState) -> None:
    """Apply the steps that are complete: the server may have been killed before it applied them."""
    server.row_claims.keep_anew(server.staging.staged())
    with server.journal.pushing():
        server.apply_steps()  # the next pull that waits for one that cannot be applied tries again
