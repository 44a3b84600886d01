"""Streams of file bytes: decompression, offsets, read-ahead; errors name the file."""

from __future__ import annotations

import functools
import gzip
import threading
from contextlib import closing
from pathlib import Path
from random import Random
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pytest

from trireme.data.byte_streams import AheadStream, StreamsAhead, open_bytes, read_full
from trireme.data.sources import DataFile, find_files
from trireme.errors import DataError, Internal

DATA = Random(5).randbytes(3_000_000) + b"0" * 2_000_000


class Waits:
    """A stream that waits until it is stopped, as one of a child process does."""

    num_bytes_in = 0

    def __init__(self) -> None:
        self.waits, self.stopped, self.closed = (threading.Event() for _ in range(3))

    def readinto(self, buffer) -> int:
        self.waits.set()
        assert self.stopped.wait(60)
        return 0

    def stop(self) -> None:
        self.stopped.set()

    def close(self) -> None:
        self.closed.set()


def in_members(data: bytes, compress) -> bytes:
    """Several compressed parts in one file, as parallel compressors write them."""
    third = len(data) // 3
    return b"".join(compress(part) for part in (data[:third], data[third:]))


def zstd(data: bytes) -> bytes:
    return pa.compress(data, "zstd", asbytes=True)


@pytest.fixture(params=["", ".gz", ".zst"])
def file(request, tmp_path: Path) -> DataFile:
    stored = {
        "": DATA,
        ".gz": in_members(DATA, lambda part: gzip.compress(part, 1)),
        ".zst": in_members(DATA, zstd),
    }
    path = tmp_path / f"part-1{request.param}"
    path.write_bytes(stored[request.param])
    return file_at(path)


def file_at(path: Path) -> DataFile:
    [file] = find_files(path)
    return file


def read(stream, size: int = 100_000) -> bytes:
    pieces = []
    buffer = np.empty(size, np.uint8)
    with closing(stream), closing(stream):
        while num_bytes := stream.readinto(buffer):
            pieces.append(buffer[:num_bytes].tobytes())
        assert stream.readinto(buffer) == 0
    return b"".join(pieces)


def test_the_text_comes_once_and_progress_ends_at_the_size(file):
    offsets = (0,) if file.codec else (0, 1, 2_999_999, len(DATA))
    for offset in offsets:
        opener = functools.partial(open_bytes, file, offset)
        for stream in (opener(), AheadStream(opener)):
            assert read(stream) == DATA[offset:]
            assert stream.num_bytes_in == file.num_bytes


def test_a_compressed_file_without_text_is_an_error(tmp_path):
    (tmp_path / "part.gz").write_bytes(gzip.compress(b""))
    with pytest.raises(DataError, match=r"expected data, found none in .*part\.gz"):
        read(open_bytes(file_at(tmp_path / "part.gz")))


def test_streams_are_read_in_order_with_so_many_open_at_once():
    class Numbered(Waits):
        running: ClassVar[set[int]] = set()
        most = 0

        def __init__(self, number: int) -> None:
            super().__init__()
            self.left = [number] * 3
            self.number = number
            Numbered.running.add(number)
            Numbered.most = max(Numbered.most, len(Numbered.running))

        def readinto(self, buffer) -> int:
            if not self.left:
                return 0
            buffer[0] = self.left.pop()
            return 1

        def close(self) -> None:
            Numbered.running.discard(self.number)

    streams = StreamsAhead((functools.partial(Numbered, n) for n in range(10)), ahead=3)
    with closing(streams):
        for number in range(10):
            stream = streams.next()
            assert read(stream) == bytes([number] * 3)
        with pytest.raises(Internal, match="found the end"):
            streams.next()
    assert 1 <= Numbered.most <= 3
    assert not Numbered.running


def test_a_full_read_fills_the_buffer(file):
    buffer = np.empty(4_000_000, np.uint8)
    with closing(open_bytes(file)) as stream:
        assert [read_full(stream, buffer) for _ in range(3)] == [4_000_000, 1_000_000, 0]


def test_a_file_that_ends_too_early_or_has_changed_is_named(file):
    Path(file.path).write_bytes(Path(file.path).read_bytes()[:-10])
    with pytest.raises(DataError, match=r"part-1.*has changed"):
        open_bytes(file)
    Path(file.path).unlink()
    with pytest.raises(DataError, match=r"cannot read .*part-1.*No such file"):
        open_bytes(file)


def test_damaged_compressed_files_are_named(tmp_path):
    for suffix, whole in ((".gz", gzip.compress(DATA, 1)), (".zst", zstd(DATA))):
        for stored in (whole[:-1], whole[: len(whole) // 2], whole + b"x", b"no such format", b"x"):
            path = tmp_path / f"part{suffix}"
            path.write_bytes(stored)
            for opener in (open_bytes, lambda file: AheadStream(lambda: open_bytes(file))):
                stream = opener(file_at(path))
                with pytest.raises(
                    DataError, match=rf"cannot decompress .*part{suffix} behind \d+"
                ):
                    read(stream)
                stream.close()


@pytest.mark.parametrize("how", ["close", "drop"])
def test_a_stream_that_waits_ends_when_its_reader_leaves(how):
    source = Waits()
    ahead = AheadStream(lambda: source)
    assert source.waits.wait(60)
    if how == "close":
        ahead.close()
    del ahead
    assert source.closed.is_set()
    assert not any(thread.name == "trireme-bytes" for thread in threading.enumerate())


def test_reading_ahead_is_bounded():
    class Endless(Waits):
        num_read = 0

        def readinto(self, buffer) -> int:
            Endless.num_read += 1
            return len(buffer)

    ahead = AheadStream(Endless, bytes_ahead=1 << 20)
    queue = ahead._ahead._queue
    with queue._changed:
        assert queue._changed.wait_for(lambda: len(queue) == queue._capacity, 60)
    assert Endless.num_read <= queue._capacity + 1
    ahead.close()
