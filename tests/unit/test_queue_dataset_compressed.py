"""Compressed files: assigned whole, read ahead, resumed by skipping; errors name the line."""

from __future__ import annotations

import gzip
import itertools
import os
import threading
from pathlib import Path
from random import Random

import pyarrow as pa
import pytest

from tests.criteo_text import Example, examples_of, random_line, read_text
from trireme.data import QueueDataset, criteo
from trireme.errors import BadRequest, DataError

COMPRESS = {
    ".gz": lambda data: gzip.compress(data, 1),
    ".zst": lambda data: pa.compress(data, "zstd", asbytes=True),
    "": lambda data: data,
}
NUM_LINES = [300, 1, 40, 555, 7]


def text(number: int, num_lines: int) -> bytes:
    random = Random(number)
    lines = [random_line(random) for _ in range(num_lines)]
    return b"\n".join(lines) + b"\n" * (number % 2)


def write(folder: Path, suffixes: list[str]) -> list[list[Example]]:
    """One file per suffix; returns their examples."""
    texts = [text(i, NUM_LINES[i]) for i in range(len(suffixes))]
    for i, (suffix, data) in enumerate(zip(suffixes, texts, strict=True)):
        (folder / f"part-{i}{suffix}").write_bytes(COMPRESS[suffix](data))
    return [read_text(data) for data in texts]


@pytest.fixture(params=[[".gz"] * 5, [".zst"] * 5, [".gz", "", ".zst", ".gz", ""]], ids=str)
def examples(request, tmp_path: Path) -> list[list[Example]]:
    return write(tmp_path, request.param)


def make(folder: Path, **options) -> QueueDataset:
    return QueueDataset(f"{folder}/part-*", **({"schema": criteo(), "batch_size": 64} | options))


def flat(batches) -> list[Example]:
    return [example for batch in batches for example in examples_of(batch)]


def joined(examples: list[list[Example]]) -> list[Example]:
    return list(itertools.chain.from_iterable(examples))


@pytest.mark.parametrize("threads", [1, 3, 8])
def test_compressed_text_reads_as_if_it_were_not(tmp_path, examples, threads):
    batches = list(make(tmp_path, threads=threads))
    assert flat(batches) == joined(examples)
    assert [b.num_examples for b in batches] == [64] * (903 // 64) + [903 % 64]
    assert not any(thread.name == "trireme-bytes" for thread in threading.enumerate())


def test_files_are_dealt_whole_the_first_streams_get_one_more(tmp_path, examples):
    dataset = make(tmp_path)
    for num_streams, blocks in [(1, [5]), (2, [3, 2]), (3, [2, 2, 1]), (5, [1] * 5)]:
        first = 0
        for index, size in enumerate(blocks):
            stream = dataset.stream(index, num_streams)
            assert flat(stream) == joined(examples[first : first + size])
            first += size


def test_of_fewer_files_than_streams_the_last_streams_get_none(tmp_path, caplog):
    examples = write(tmp_path, [".gz", ".gz"])
    streams = [list(make(tmp_path).stream(i, 3)) for i in range(3)]
    assert flat([*streams[0], *streams[1]]) == joined(examples)
    assert streams[2] == []
    assert "the last 1 streams have no data; split the files" in caplog.text
    streams = [flat(make(tmp_path, own_files=True).stream(i, 3)) for i in range(3)]
    assert len(streams[0]) == 301
    assert streams == streams[:1] * 3


def test_own_files_are_read_whole_by_their_worker(tmp_path):
    expected = joined(write(tmp_path, [""] * 5))
    stream = make(tmp_path, own_files=True).stream(2, 3)
    batches = list(stream)
    assert flat(batches) == expected
    assert {batch.stream for batch in batches} == {2}
    rest = make(tmp_path, own_files=True).stream(2, 3, start=batches[4].position)
    assert flat(rest) == flat(batches[5:])


@pytest.mark.parametrize("num_streams", [1, 3])
def test_a_stream_goes_on_from_any_position_with_exactly_the_same_batches(
    tmp_path, examples, num_streams
):
    for index in range(num_streams):
        whole = list(make(tmp_path).stream(index, num_streams))
        for k, batch in enumerate(whole):
            rest = make(tmp_path, threads=3).stream(index, num_streams, start=batch.position)
            again = list(rest)
            assert [b.position for b in again] == [b.position for b in whole[k + 1 :]]
            assert flat(again) == flat(whole[k + 1 :])


def test_a_position_of_other_files_is_refused(tmp_path):
    write(tmp_path, [".gz"] * 5)
    dataset = make(tmp_path)
    position = next(iter(dataset)).position
    with pytest.raises(BadRequest, match=r"part-0\.gz \(it lies within a line\), found offset"):
        next(dataset.stream(0, 1, start=(0, position[1] + 1)))
    with pytest.raises(BadRequest, match=r"part-0\.gz \(\d+ bytes of text\), found offset 100000"):
        next(dataset.stream(0, 1, start=(0, 1_000_000)))
    with pytest.raises(BadRequest, match=r"start of a line .* found offset -1"):
        dataset.stream(0, 1, start=(0, -1))
    with pytest.raises(BadRequest, match=r"file number 3 to 4, .* of stream 1, found \(0, 0\)"):
        dataset.stream(1, 2, start=(0, 0))


def test_progress_counts_stored_bytes(tmp_path, examples):
    stream = make(tmp_path).stream(0, 2)
    size = sum(os.path.getsize(file.path) for file in make(tmp_path).files[:3])
    seen = [stream.num_bytes_read]
    for _ in stream:
        seen.append(stream.num_bytes_read)
    assert seen[0] == 0
    assert seen == sorted(seen)
    assert seen[-1] == stream.num_bytes == size
    assert stream.fraction_read() == 1.0
    assert set(stream.seconds) == {"read", "parse"}
    assert all(seconds > 0 for seconds in stream.seconds.values())


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_broken_lines_are_numbered_also_behind_a_position(tmp_path, suffix, caplog):
    lines = text(0, 100).splitlines()
    lines[77] = b"x"
    (tmp_path / f"part-1{suffix}").write_bytes(COMPRESS[suffix](b"\n".join(lines)))
    dataset = make(tmp_path, batch_size=10)
    positions = [batch.position for _, batch in zip(range(7), dataset, strict=False)]
    for start in [None, *positions]:
        with pytest.raises(DataError, match=rf"part-1{suffix} line 78: expected 40 .*\nschema: "):
            list(dataset.stream(0, 1, start=start))
    assert len(flat(make(tmp_path, on_error="count"))) == 99
    (record,) = caplog.records
    assert f"part-1{suffix} line 78: expected 40 fields" in record.getMessage()


def test_a_truncated_file_is_an_error(tmp_path):
    write(tmp_path, [".gz"] * 2)
    path = tmp_path / "part-0.gz"
    path.write_bytes(path.read_bytes()[:-1000])
    for on_error in ("raise", "count"):
        with pytest.raises(DataError, match=r"cannot decompress .*part-0\.gz behind \d+ bytes"):
            list(make(tmp_path, on_error=on_error))


def test_a_compressed_file_that_changes_is_an_error(tmp_path):
    write(tmp_path, [".gz"] * 2)
    dataset = make(tmp_path)
    path = tmp_path / "part-1.gz"
    path.write_bytes(path.read_bytes() * 2)
    with pytest.raises(
        DataError, match=r"expected \d+ bytes in .*part-1\.gz, found \d+, .*changed"
    ):
        list(dataset)


def test_no_thread_is_left_when_the_consumer_stops_early(tmp_path):
    write(tmp_path, [".gz"] * 5)
    stream = make(tmp_path, batch_size=1, threads=4).stream(0, 1)
    next(stream)
    del stream
    names = {thread.name for thread in threading.enumerate()}
    assert not names & {"trireme-data", "trireme-bytes"}
