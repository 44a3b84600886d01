"""When a snapshot is due: what a start would have to do without it, against what it costs."""

from __future__ import annotations

LOG_BYTES = 2 << 30
_READS_MAX = 2_000_000  # that a start may have to repeat: 20 s of a device of 100,000 per second
_LOOKS = 8  # at the reads, while the log grows by as much as it must grow at least


class SnapshotSchedule:
    """A snapshot is due when the log has grown by `log_bytes`, or by the size of the last snapshot
    if that is more. By default these are LOG_BYTES, and then a server whose rows lie on SSD has one
    earlier if it has read much from there: a start would read it again. But not so early that log
    and snapshots together take more than twice the bytes that they would take otherwise.

    next_look: the position in the log at which to ask whether one is due.
    Threads: one at a time.
    """

    def __init__(self, log_bytes: int | None) -> None:
        self._log_bytes = log_bytes
        self.note_snapshot(0, 0, 0)

    def note_snapshot(self, start: int, num_reads: int, size: int) -> None:
        """There is a snapshot of `size` bytes, with all up to this position in the log, and up to
        so many reads.
        """
        latest = max(self._log_bytes or LOG_BYTES, size)
        # n with 1 + size / n = 2 (1 + size / latest)
        earliest = latest if self._log_bytes else size * latest // (latest + 2 * size)
        self._latest, self._reads = start + latest, num_reads
        self._step = max(earliest, latest // 64) // _LOOKS
        self.next_look = start + max(earliest, self._step)

    def note_attempt(self, position: int) -> None:
        """One is begun at this position in the log; if it fails, the next is due later."""
        self.next_look = self._latest = position + (self._log_bytes or LOG_BYTES)

    def is_due(self, position: int, num_reads: int) -> bool:
        """Whether one is due; else `next_look` is set anew."""
        if position < self.next_look:
            return False
        if position >= self._latest or num_reads - self._reads >= _READS_MAX:
            return True
        self.next_look = min(position + self._step, self._latest)
        return False
