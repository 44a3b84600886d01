"""Segments, the log and documents: written records are read back, a cut end differs from damage,
and no file is half-written.
"""

from __future__ import annotations

import errno
import io
import os
import resource
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trireme.errors import BadRequest, Corruption, DeadlineExceeded, ResourceExhausted
from trireme.server.journal import Journal
from trireme.server.log.log import Log
from trireme.server.log.segment import Record, Segment, SegmentReader, file_name
from trireme.server.log.state_folder import StateFolder
from trireme.storage.document import Document

STATE = bytes(range(16))
RECORDS: list[Record] = [
    ("ps.push", {"a": 1, "none": None}, [np.arange(3, dtype=np.uint64), np.ones((2, 1), "f4")]),
    ("log.step", {"step": 7}, []),
    ("ps.map", {"b": b"x" * 5}, [np.empty((0, 4), np.float32), np.arange(7, dtype=np.uint8)]),
]


def write(folder: Path, *, is_synced: bool = False, kept: tuple[int, ...] = (0, 0, 0)) -> list[int]:
    """A segment of RECORDS; returns the offsets of their ends. kept: that each of them states, as
    the number of a record.
    """
    segment = Segment(folder, 1, STATE, is_synced=is_synced)
    ends = [segment.end]
    for record, so_far in zip(RECORDS, kept, strict=True):
        segment.append(Segment.pack(record), ends[so_far] if so_far else 0)
        ends.append(segment.end)
    segment.close()
    return ends


def read(folder: Path) -> tuple[list[Record], int]:
    reader = SegmentReader(folder / file_name(1))
    return [record for _, record in reader.records()], reader.end


def same(actual: list[Record], expected: list[Record]) -> bool:
    return len(actual) == len(expected) and all(
        (a[0], a[1]) == (b[0], b[1])
        and [x.dtype for x in a[2]] == [x.dtype for x in b[2]]
        and all(np.array_equal(x, y) for x, y in zip(a[2], b[2], strict=True))
        for a, b in zip(actual, expected, strict=True)
    )


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    ends = write(tmp_path)
    actual, end = read(tmp_path)
    assert same(actual, RECORDS)
    assert end == ends[-1] == (tmp_path / file_name(1)).stat().st_size
    assert SegmentReader(tmp_path / file_name(1)).head.state == STATE


def test_a_file_cut_off_anywhere_keeps_the_whole_records_before(tmp_path: Path) -> None:
    ends = write(tmp_path)
    path = tmp_path / file_name(1)
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        actual, end = read(tmp_path)
        num_whole = sum(size >= e for e in ends[1:])
        assert same(actual, RECORDS[:num_whole])
        assert end == (ends[num_whole] if size >= ends[0] else 0)


def test_no_flipped_bit_goes_unnoticed(tmp_path: Path) -> None:
    write(tmp_path)
    path = tmp_path / file_name(1)
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        with pytest.raises(Corruption, match=r"log-00000001"):
            read(tmp_path)


def test_no_flipped_bit_of_what_was_synced_goes_unnoticed(tmp_path: Path) -> None:
    log = Log(tmp_path, 1, STATE, is_synced=True)
    for record in RECORDS:
        log.append(record)
        is_kept = threading.Event()
        log.when_kept(lambda _, kept=is_kept: kept.set())
        assert is_kept.wait(30)
    path = tmp_path / file_name(1)
    whole = path.read_bytes()  # as kill -9 leaves it
    log.close()
    note = len(whole) - 32
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        if at < note:
            with pytest.raises(Corruption, match=r"log-00000001"):
                read(tmp_path)
        else:  # it is not synced itself
            assert same(read(tmp_path)[0], RECORDS)


def test_a_note_that_was_not_synced_before_a_power_loss_is_cut_off(tmp_path: Path) -> None:
    """A record behind it, which was written back, does not say that the note is on the disk."""
    log = Log(tmp_path, 1, STATE, is_synced=True)
    log.rotate([RECORDS[0]])
    path = tmp_path / file_name(2)
    note = path.stat().st_size - 32
    log.append(RECORDS[1])
    whole = path.read_bytes()
    log.close()
    path.write_bytes(whole[:note] + bytes(32) + whole[note + 32 :])
    reader = SegmentReader(path)
    assert same([record for _, record in reader.records()], RECORDS[:1])


def test_a_sync_after_one_that_failed_in_rotate_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux reports a failed sync once, and the next one succeeds without the data."""
    log = Log(tmp_path, 1, STATE, is_synced=True)
    log.append(RECORDS[0])
    outcomes: list[Exception | None] = []
    is_told = threading.Event()

    def fail(_: Segment) -> None:
        monkeypatch.undo()
        log.when_kept(lambda error: (outcomes.append(error), is_told.set()))
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(Segment, "sync", fail)
    with pytest.raises(ResourceExhausted, match="broken"):
        log.rotate([RECORDS[1]])
    assert is_told.wait(10)
    assert isinstance(outcomes[0], ResourceExhausted)
    log.close()


def test_records_that_were_not_synced_before_a_power_loss_are_cut_off(tmp_path: Path) -> None:
    """The last record says that the first one was on the disk; the second one was not, for sure."""
    ends = write(tmp_path, is_synced=True, kept=(0, 0, 1))
    path = tmp_path / file_name(1)
    whole = bytearray(path.read_bytes())
    whole[ends[2] + 40] ^= 1
    path.write_bytes(whole)
    actual, end = read(tmp_path)
    assert same(actual, RECORDS[:2])
    assert end == ends[2]
    path.write_bytes(bytes(whole[: ends[1]]) + bytes(1000))
    assert read(tmp_path)[1] == ends[1]


def test_a_new_segment_that_was_not_synced_before_a_power_loss_is_empty(tmp_path: Path) -> None:
    (tmp_path / file_name(1)).write_bytes(bytes(40))
    reader = SegmentReader(tmp_path / file_name(1))
    assert reader.head is None
    assert list(reader.records()) == []


def test_damage_in_synced_records_is_an_error(tmp_path: Path) -> None:
    ends = write(tmp_path, is_synced=True, kept=(0, 1, 2))
    path = tmp_path / file_name(1)
    whole = bytearray(path.read_bytes())
    for at in (ends[0], ends[0] + 40, ends[1] + 3, ends[1] + 40):
        damaged = bytearray(whole)
        damaged[at] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(Corruption, match="log-00000001: the record at offset"):
            read(tmp_path)


@pytest.mark.parametrize("is_synced", [False, True])
@pytest.mark.parametrize("step", ["append", "rotate"])
def test_a_write_that_fails_and_cannot_be_taken_back_ends_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, *, is_synced: bool
) -> None:
    """What is behind the last record would look like damage, or a segment behind a cut record."""
    log = Log(tmp_path, 1, STATE, is_synced=is_synced)
    log.append(RECORDS[0])
    large: Record = ("ps.push", {}, [np.zeros(1000)])

    def write_half(segment: Segment, buffers: list[Any], at: int) -> int:
        os.pwrite(segment._fd, b"".join(buffers)[:2000], at)
        raise OSError(errno.EIO, "broken")

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, "read-only now")

    with monkeypatch.context() as broken:
        broken.setattr(Segment, "_write_some", write_half)
        broken.setattr(os, "ftruncate", fail)
        broken.setattr(Path, "unlink", fail)
        with pytest.raises(ResourceExhausted, match=r"read-only now.*start the server again"):
            log.append(large) if step == "append" else log.rotate([large])
    with pytest.raises(ResourceExhausted, match="read-only now"):
        log.append(RECORDS[1])
    is_told, outcomes = threading.Event(), list[Exception | None]()
    log.when_kept(lambda error: (outcomes.append(error), is_told.set()))
    assert is_told.wait(30)
    assert isinstance(outcomes[0], ResourceExhausted) or not is_synced
    assert same(read(tmp_path)[0], RECORDS[:1])
    log.close()


def test_an_append_that_fails_leaves_the_log_as_it_was(tmp_path: Path) -> None:
    log = Log(tmp_path, 1, STATE, is_synced=False)
    log.append(RECORDS[0])
    size = (tmp_path / file_name(1)).stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, hard))
    try:
        for _ in range(2):
            with pytest.raises(ResourceExhausted, match="log-00000001: File too large"):
                log.append(("ps.push", {}, [np.zeros(1000)]))
            assert (tmp_path / file_name(1)).stat().st_size == size
        with pytest.raises(ResourceExhausted, match="File too large"):
            log.rotate([("log.state", {}, [np.zeros(1000)])])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == [file_name(1)]
    log.append(RECORDS[1])
    log.close()
    assert same(read(tmp_path)[0], RECORDS[:2])


@pytest.mark.parametrize("is_synced", [False, True])
def test_callbacks_run_once_their_records_are_kept_across_segments(
    tmp_path: Path, is_synced: bool
) -> None:
    log = Log(tmp_path, 1, STATE, is_synced=is_synced)
    reported = []
    all_told = threading.Event()

    def tell(number: int, error: Exception | None) -> None:
        reported.append((number, error))
        if len(reported) == 20:
            all_told.set()

    for number in range(20):
        log.append(RECORDS[number % 3])
        log.when_kept(lambda error, number=number: tell(number, error))
        if number == 10:
            log.rotate([RECORDS[0]])
    assert all_told.wait(30)
    assert sorted(reported) == [(number, None) for number in range(20)]
    log.close()
    assert (tmp_path / file_name(2)).exists()


def test_a_document_is_the_old_one_or_the_new_one(tmp_path: Path) -> None:
    document = Document(tmp_path / "d", is_synced=True)
    assert document.read() is None
    document.write({"a": [1, b"x"], "b": {3: None}})
    document.write({"a": 2})
    assert document.read() == {"a": 2}
    data = (tmp_path / "d").read_bytes()
    for at in range(len(data)):
        (tmp_path / "d").write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        if 12 <= at < 16:  # unused
            continue
        with pytest.raises(Corruption, match="/d: "):
            document.read()
    (tmp_path / "d").write_bytes(data[:5])
    with pytest.raises(Corruption, match="found 5"):
        document.read()


def test_parts_of_a_document_are_written_once_and_missed_if_they_are_gone(tmp_path: Path) -> None:
    document = Document(tmp_path / "d", is_synced=True)
    made = []

    def make(value: str) -> list[str]:
        made.append(value)
        return [value]

    def parts() -> list[Path]:
        return list(tmp_path.glob("d.part-*"))

    one, two = partial(make, "one"), partial(make, "two")
    document.write({"a": one})
    document.write({"a": [one, two, one], "b": 3})
    assert (made, len(parts())) == (["one", "two"], 2)
    assert document.read() == {"a": [["one"], ["two"], ["one"]], "b": 3}
    document.write({"a": two})
    successor = Document(document.path, is_synced=True)
    assert successor.read() == {"a": ["two"]}
    [path] = parts()
    path.rename(tmp_path / "away")
    with pytest.raises(Corruption, match=r"d: expected .*/d\.part-.* beside it, found none"):
        successor.read()
    path.write_bytes((tmp_path / "away").read_bytes()[:-1] + b"?")
    with pytest.raises(Corruption, match=r"/d\.part-.*: expected its checksum"):
        successor.read()
    successor.write({"a": 1})
    assert (parts(), successor.read()) == ([], {"a": 1})


def test_a_folder_belongs_to_one_process_and_is_emptied_despite_interruptions(
    tmp_path: Path,
) -> None:
    folder = StateFolder(tmp_path)
    with pytest.raises(BadRequest, match="another process"):
        StateFolder(tmp_path)
    Log(tmp_path, 1, STATE, is_synced=False).close()
    (tmp_path / "ended").touch()  # as far as `empty` came
    folder.close()
    StateFolder(tmp_path).close()
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_the_note_of_the_newest_segment_is_the_last_one_or_damaged(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)
    assert folder.noted() == 0
    for number in (300, 7):
        folder.note(number)
        assert folder.noted() == number
    whole = (tmp_path / "lock").read_bytes()
    for at in range(len(whole)):
        (tmp_path / "lock").write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        with pytest.raises(Corruption, match="lock: expected the number of a segment"):
            folder.noted()
    folder.close()


def test_what_a_disk_cannot_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    folder, document = StateFolder(tmp_path), Document(tmp_path / "d", is_synced=False)
    document.write({})

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    class Unreadable(io.FileIO):
        readinto = fail

    reads = {"lock": folder.noted, "d": document.read, "log-00000001": lambda: read(tmp_path)}
    for name, read_it in reads.items():
        with monkeypatch.context() as broken:
            broken.setattr(os, "pread", fail)
            broken.setattr(Path, "read_bytes", fail)
            broken.setattr(Path, "open", lambda path, _: Unreadable(path))
            with pytest.raises(Corruption, match=f"{name}: expected to read it, found Input/outp"):
                read_it()
    folder.close()


def test_a_disk_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stuck(Journal):
        where = "a folder"

        def when_kept(self, action: object) -> None:
            """Never."""

    monkeypatch.setattr("trireme.server.journal.KEPT_TIMEOUT_S", 0.01)
    with pytest.raises(DeadlineExceeded, match="what is recorded in a folder to be written within"):
        Stuck().wait_kept()


def test_a_snapshot_leaves_what_the_coordinator_is_writing(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)
    (tmp_path / ".coordinator").write_bytes(b"half")
    (tmp_path / file_name(1)).touch()
    folder.sweep(2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".coordinator", "lock"]
    folder.remove_unfinished()
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
    folder.close()
