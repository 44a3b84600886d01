"""QueueDataset: streams, positions, threads that end, and files that are not there."""

from __future__ import annotations

import gc
import os
import pickle
import threading
from pathlib import Path
from random import Random

import pytest
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tests.criteo_text import Example, examples_of, random_line, read_text
from trireme.data import Batch, Dense, Label, QueueDataset, Schema, criteo
from trireme.data.sources import find_files, natural_key
from trireme.errors import BadRequest, DataError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files of unequal sizes; some without a newline at the end."""
    random = Random(7)
    for i, num_lines in enumerate([300, 1, 40, 555, 7]):
        lines = [random_line(random) for _ in range(num_lines)]
        (tmp_path / f"part-{8 + i}").write_bytes(b"\n".join(lines) + b"\n" * (i % 2))
    return tmp_path


def make(folder: Path, **options) -> QueueDataset:
    return QueueDataset(f"{folder}/part-*", **({"schema": criteo(), "batch_size": 64} | options))


def plain(folder: Path) -> list[Example]:
    paths = sorted(folder.glob("part-*"), key=lambda path: int(path.name.split("-")[1]))
    return [example for path in paths for example in read_text(path.read_bytes())]


def flat(batches) -> list[Example]:
    return [example for batch in batches for example in examples_of(batch)]


def num_data_threads() -> int:
    return sum(thread.name == "trireme-data" for thread in threading.enumerate())


def test_batches_span_files_in_natural_order(folder):
    expected = plain(folder)
    batches = list(make(folder))
    assert flat(batches) == expected
    assert [b.num_examples for b in batches] == [64] * (903 // 64) + [903 % 64]
    short = list(make(folder, drop_last=True))
    assert flat(short) == expected[: 903 // 64 * 64]
    assert num_data_threads() == 0


@pytest.mark.parametrize("num_streams", [1, 2, 3, 7, 2000])
def test_streams_hold_every_example_once_and_are_balanced(folder, num_streams):
    dataset = make(folder)
    indices = range(num_streams) if num_streams < 10 else range(0, num_streams, 37)
    shares = [flat(dataset.stream(i, num_streams)) for i in indices]
    if num_streams < 10:
        assert [e for share in shares for e in share] == plain(folder), "order and once each"
        lines = [dataset.stream(i, num_streams).num_bytes for i in indices]
        assert max(lines) - min(lines) <= 1
    assert max(map(len, shares)) <= 1.2 * 903 / num_streams + 2
    assert all(b.stream == 1 for b in dataset.stream(1, 3))


def test_a_file_of_one_line_goes_to_one_of_many_streams(tmp_path):
    (tmp_path / "part-1").write_bytes(random_line(Random(1)))
    dataset = make(tmp_path)
    assert [len(flat(dataset.stream(i, 5))) for i in range(5)] == [1, 0, 0, 0, 0]


@pytest.mark.parametrize("num_streams", [1, 3])
def test_a_stream_goes_on_from_any_position_with_exactly_the_same_batches(folder, num_streams):
    for index in range(num_streams):
        whole = list(make(folder).stream(index, num_streams))
        for k, batch in enumerate(whole):
            assert all(type(number) is int for number in batch.position)
            rest = make(folder, threads=3).stream(index, num_streams, start=batch.position)
            again = list(rest)
            assert [b.position for b in again] == [b.position for b in whole[k + 1 :]]
            assert flat(again) == flat(whole[k + 1 :])


def test_a_position_that_is_not_at_a_line_is_refused(folder):
    dataset = make(folder)
    position = next(iter(dataset)).position
    assert position[0] == 0
    for start in [(0, position[1] + 1), (0, 10**9), (0, -1)]:
        with pytest.raises(
            BadRequest, match=f"start of a line of .*part-8 .*found offset {start[1]}"
        ):
            dataset.stream(0, 1, start=start)
    for start in [(5, 0), (-1, 0), (0,), (0, 0, 0)]:
        with pytest.raises(BadRequest, match="expected a position"):
            dataset.stream(0, 1, start=start)
    for index, num_streams in [(-1, 2), (2, 2), (0, 0)]:
        with pytest.raises(BadRequest, match="0 <= index < num_streams"):
            dataset.stream(index, num_streams)


def test_a_stream_that_ends_in_a_line_that_is_too_long_goes_on_from_any_position(tmp_path):
    lines = [random_line(Random(i)) for i in range(6)]
    text = b"\n".join([*lines[:3], b"x" * (5 << 20), *lines[3:], b""])
    (tmp_path / "part-0").write_bytes(text)
    dataset = make(tmp_path, batch_size=2, on_error="count")
    for index in range(2):
        batches = list(dataset.stream(index, 2))
        assert flat(batches) == read_text(b"\n".join(lines[index * 3 : index * 3 + 3]))
        for number, batch in enumerate(batches):
            assert text[batch.position[1] - 1 : batch.position[1]] == b"\n"
            rest = list(dataset.stream(index, 2, start=batch.position))
            assert [b.position for b in rest] == [b.position for b in batches[number + 1 :]]
            assert flat(rest) == flat(batches[number + 1 :])


def test_progress_counts_the_bytes_of_the_stream(folder):
    dataset = make(folder)
    assert dataset.num_bytes == sum(path.stat().st_size for path in folder.iterdir())
    for index in range(3):
        stream = dataset.stream(index, 3)
        seen = [stream.num_bytes_read]
        for _ in stream:
            seen.append(stream.num_bytes_read)
        assert seen[0] <= 1000, "at most the line that the stream before it ends with"
        assert seen == sorted(seen)
        assert seen[-1] == stream.num_bytes
        assert stream.num_bytes == pytest.approx(dataset.num_bytes / 3, abs=1)


def test_reading_ahead_is_bounded(folder):
    stream = make(folder, batch_size=1, batches_ahead=2).stream(0, 1)
    next(stream)
    queue = stream._ahead._queue
    with queue._changed:
        queue._changed.wait_for(lambda: len(queue) == 2, 60)
        assert len(queue) == 2
    stream.close()


@pytest.mark.parametrize("how", ["close", "with", "drop", "break", "error"])
def test_no_thread_is_left_when_the_consumer_stops_early(folder, how):
    dataset = make(folder, batch_size=1)
    stream = dataset.stream(0, 1)
    next(stream)
    assert num_data_threads() == 1
    if how == "close":
        stream.close()
        with pytest.raises(StopIteration):
            next(stream)
    elif how == "with":
        with stream:
            next(stream)
    elif how == "drop":
        del stream
    elif how == "break":
        stream.close()
        for _ in dataset:
            break
    else:
        stream.close()
        (folder / "part-9").write_bytes(b"broken")
        with pytest.raises(DataError):
            list(make(folder))
    gc.collect()
    assert num_data_threads() == 0


def test_the_dataset_can_be_sent_to_another_process(folder):
    dataset = pickle.loads(pickle.dumps(make(folder)))
    assert flat(dataset) == plain(folder)


class PerWorker(IterableDataset):
    """One stream per DataLoader worker."""

    def __init__(self, dataset: QueueDataset) -> None:
        self.dataset = dataset

    def __iter__(self):
        worker = get_worker_info()
        return self.dataset.stream(worker.id, worker.num_workers)


def test_streams_work_inside_data_loader_workers(folder):
    loader = DataLoader(PerWorker(make(folder)), batch_size=None, num_workers=2)
    batches = list(loader)
    assert all(isinstance(batch, Batch) for batch in batches)
    batches.sort(key=lambda batch: batch.stream)
    assert flat(batches) == plain(folder)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(DataError, match=r"expected a file, found nothing at '.*/none\.tsv'"):
        QueueDataset(tmp_path / "none.tsv", schema=criteo(), batch_size=1)
    with pytest.raises(DataError, match=r"expected files, found none that match '.*/\*\.tsv'"):
        QueueDataset([tmp_path / "*.tsv"], schema=criteo(), batch_size=1)
    with pytest.raises(DataError, match="at least one path or pattern, found none"):
        QueueDataset([], schema=criteo(), batch_size=1)


def test_files_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / "empty").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    os.mkfifo(tmp_path / "pipe")
    for name, message in [
        ("empty", "found the empty file .*empty"),
        (".", "found the directory .*give a pattern"),
        ("loop", "cannot read .*loop.*symbolic links"),
        ("pipe", "expected a regular file, found another kind at .*pipe"),
    ]:
        with pytest.raises(DataError, match=message):
            QueueDataset([tmp_path / name], schema=criteo(), batch_size=1)


def test_a_file_that_changes_under_the_reader_is_an_error(folder):
    dataset = make(folder)
    os.truncate(folder / "part-11", 100)
    with pytest.raises(DataError, match=r"expected \d+ bytes in .*part-11, found 100"):
        list(dataset)
    (folder / "part-11").unlink()
    with pytest.raises(DataError, match=r"cannot read .*part-11: No such file"):
        list(dataset)


def append(path):
    with path.open("ab") as file:
        file.write(b"\nbroken")


def overwrite(path):
    with path.open("r+b") as file:
        file.write(b"x" * 9)


def replace(path):
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())  # the same size
    other.replace(path)


@pytest.mark.parametrize("change", [append, overwrite, replace, lambda path: os.truncate(path, 9)])
def test_a_file_that_changes_before_it_is_read_is_an_error(folder, change):
    """Streams that divide it would not have the same bytes before them."""
    os.utime(folder / "part-12", (1, 1))
    dataset = make(folder)
    list(dataset.stream(0, 2))
    change(folder / "part-12")
    with pytest.raises(DataError, match=r"bytes in .*part-12, found .*has changed"):
        list(dataset.stream(1, 2))


@pytest.mark.parametrize("change", [append, overwrite, replace, Path.unlink])
def test_a_file_that_changes_while_it_is_read_is_an_error_or_read_as_it_was(tmp_path, change):
    path = tmp_path / "part-0"
    path.write_bytes(b"".join(random_line(Random(i)) + b"\n" for i in range(20_000)))
    expected = plain(tmp_path)
    with QueueDataset(path, schema=criteo(), batch_size=10, batches_ahead=1).stream(0, 1) as stream:
        batches = [next(stream)]
        change(path)
        if change in (replace, Path.unlink):  # it is open: the old one is still there
            assert flat([*batches, *stream]) == expected
            return
        with pytest.raises(DataError, match=r"bytes in .*part-0, found .*has changed"):
            list(stream)


def test_binary_junk_ends_with_an_error_or_a_count(tmp_path):
    (tmp_path / "part-1").write_bytes(Random(3).randbytes(3_000_000))
    with pytest.raises(DataError, match="part-1 line 1: expected 40 fields"):
        list(make(tmp_path))
    stream = make(tmp_path, on_error="count").stream(0, 1)
    assert list(stream) == []
    assert stream.num_broken_lines > 10_000


def test_skipped_lines_are_logged_once(tmp_path, caplog):
    good = random_line(Random(1))
    (tmp_path / "part-1").write_bytes(b"\n".join([good, b"x", good, b"y", good, b""]))
    assert len(flat(make(tmp_path, on_error="count"))) == 3
    (record,) = caplog.records
    assert "skipped broken lines: 2; the first: " in record.getMessage()
    assert "part-1 line 2: expected 40 fields" in record.getMessage()


def test_arguments_out_of_range_are_refused(folder):
    for name in ("batch_size", "threads", "batches_ahead"):
        with pytest.raises(BadRequest, match=f"expected {name} as an integer >= 1, found 0"):
            make(folder, **{name: 0})
        with pytest.raises(BadRequest, match=f"expected {name} <= [0-9]+, found {10**20}"):
            make(folder, **{name: 10**20})
    with pytest.raises(BadRequest, match="expected on_error as one of raise, count, found 'skip'"):
        make(folder, on_error="skip")
    with pytest.raises(BadRequest, match="expected a schema with a format"):
        make(folder, schema=Schema([Label(), Dense("x")]))


def test_a_path_with_pattern_characters_is_a_path_when_it_exists(tmp_path):
    (tmp_path / "[1]").write_bytes(random_line(Random(1)))
    assert len(flat(QueueDataset(tmp_path / "[1]", schema=criteo(), batch_size=2))) == 1


def test_a_pattern_reads_each_folder_once_wherever_links_lead(tmp_path):
    real, linked, elsewhere = (tmp_path / name for name in ("real", "data/linked", "data/b"))
    for folder in (real / "deep", elsewhere):
        folder.mkdir(parents=True)
    linked.symlink_to(real)
    for name in ("one", "two"):  # two links: the paths through them would be 2 ** 40
        (real / "deep" / name).symlink_to(tmp_path / "data")
    (elsewhere / "again").symlink_to(real / "deep")
    for number, folder in enumerate((real, real / "deep", elsewhere, tmp_path / "data")):
        (folder / f"part-{number}").write_bytes(random_line(Random(number)) + b"\n")
    files = QueueDataset(f"{tmp_path}/data/**/part-*", schema=criteo(), batch_size=64).files
    assert sorted(os.path.basename(file.path) for file in files) == [f"part-{n}" for n in range(4)]
    assert [os.path.basename(file.path) for file in find_files(f"{tmp_path}/data/**/b/*-2")] == [
        "part-2"
    ]


def test_a_list_keeps_its_order(folder):
    paths = [folder / "part-12", f"{folder}/part-1[01]", str(folder / "part-8")]
    dataset = QueueDataset(paths, schema=criteo(), batch_size=8)
    names = [os.path.basename(file.path) for file in dataset.files]
    assert names == ["part-12", "part-10", "part-11", "part-8"]


def test_natural_order_sorts_numbers_as_numbers():
    names = ["b", "a10", "a2", "a02b", "a2b", "a", "10", "9", "a\u0662"]
    assert sorted(names, key=natural_key) == [
        "9",
        "10",
        "a",
        "a2",
        "a02b",
        "a2b",
        "a10",
        "a\u0662",
        "b",
    ]
