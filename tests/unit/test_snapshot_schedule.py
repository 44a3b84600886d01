from __future__ import annotations

import pytest

from trireme.server.log.snapshot_schedule import LOG_BYTES, SnapshotSchedule

GIB, MANY_READS = 1 << 30, 10_000_000


def due_at(schedule: SnapshotSchedule, position: int, num_reads: int) -> int:
    """Where the log is when a snapshot is due, looked at no more often than it says."""
    while not schedule.is_due(position, num_reads):
        assert schedule.next_look > position
        position = schedule.next_look
    return position


@pytest.mark.parametrize("num_reads", [0, MANY_READS])
def test_the_bytes_that_a_user_gives_are_waited_for_whatever_was_read(num_reads: int) -> None:
    schedule = SnapshotSchedule(1000)
    assert due_at(schedule, 0, num_reads) == 1000
    schedule.note_snapshot(5000, 0, 3000)
    assert due_at(schedule, 5000, num_reads) == 8000


@pytest.mark.parametrize("size", [0, 1000, GIB, 6 * GIB])
def test_a_server_that_reads_little_waits_until_the_log_is_as_large_as_a_snapshot(
    size: int,
) -> None:
    schedule = SnapshotSchedule(None)
    schedule.note_snapshot(77, MANY_READS, size)
    assert due_at(schedule, 77, MANY_READS + 1000) == 77 + max(LOG_BYTES, size)


@pytest.mark.parametrize("size", [0, GIB // 8, GIB, 2 * GIB, 6 * GIB, 100 * GIB])
def test_a_server_that_reads_much_writes_at_most_twice_as_much(size: int) -> None:
    schedule, latest = SnapshotSchedule(None), max(LOG_BYTES, size)
    schedule.note_snapshot(0, 0, size)
    grown = due_at(schedule, 0, MANY_READS)
    assert grown < latest / 2
    written, otherwise = 1 + size / grown, 1 + size / latest
    assert written <= 2.001 * otherwise
    if size >= latest:
        assert grown == size // 3


def test_the_snapshot_comes_soon_after_the_reads() -> None:
    schedule = SnapshotSchedule(None)
    schedule.note_snapshot(0, 0, 3 * GIB)
    position = GIB
    assert not schedule.is_due(position, 0)
    while position < 2 * GIB:  # each look costs a little
        position = schedule.next_look
        assert not schedule.is_due(position, 1000)
    assert due_at(schedule, position, MANY_READS) <= 2 * GIB + GIB // 2


def test_what_was_replayed_counts_as_if_it_were_in_the_log() -> None:
    schedule = SnapshotSchedule(1000)
    schedule.note_snapshot(-700, 0, 10)
    assert due_at(schedule, 0, 0) == 300


def test_after_an_attempt_that_fails_the_log_grows_on() -> None:
    schedule = SnapshotSchedule(1000)
    assert schedule.is_due(1200, 0)
    schedule.note_attempt(1200)
    assert due_at(schedule, 1200, 0) == 2200
