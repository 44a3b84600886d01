"""Checkpoints of a table beside the speed of the disk: 10 million rows of 16 floats with Adagrad's
state.

save_full    bytes per second until a full checkpoint is published, fsync included; the disk's:
             the same bytes written to one file, then fsync
load_full    bytes per second from uncached files to a table in a new cluster; the
             disk's: the same files read one after the other
save_delta   saves per second with 1 % of the rows changed, against full ones
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

import trireme as tr
from benchmarks.harness import Claim, Contest, Run, Settings
from trireme import _core
from trireme.checkpoint.worker_side.load import load_checkpoint
from trireme.checkpoint.worker_side.save import save_checkpoint
from trireme.job.cluster import Cluster
from trireme.job.embedded import embedded
from trireme.optim import values_of_group
from trireme.table import RowClassId
from trireme.worker.gradients import PushHeader, TableGradient

DIM = 16
CHUNK_BYTES = 8 << 20
ROWS_PER_PUSH = 500_000


def contests(settings: Settings) -> Sequence[Contest]:
    subject = _Subject(settings.pick(smoke=20_000, real=10_000_000))
    disk = "disk"
    return [
        Contest(
            {"save_full": lambda _: subject.save_full(), disk: lambda _: subject.write()},
            [Claim("save_full", "save_full", (disk,), unit="bytes/s")],
            settings.rounds,
        ),
        Contest(
            {"load_full": lambda _: subject.load_full(), disk: lambda _: subject.read()},
            [Claim("load_full", "load_full", (disk,), unit="bytes/s")],
            settings.rounds,
        ),
        Contest(
            {
                "save_delta": lambda number: subject.save_delta(number),
                "save_full": lambda _: subject.save_again(),
            },
            [Claim("save_delta", "save_delta", ("save_full",), unit="saves/s")],
            settings.rounds,
        ),
    ]


class _Subject:
    """A table in memory and a checkpoint of it, both made when they are first needed."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._bytes_at_hand = 400 * num_rows  # a table, its files in the system's cache, and more
        self._table = tr.Table("rows", dim=DIM, optimizer=tr.optim.Adagrad(lr=0.1))
        self._num_pushes = 0

    @cached_property
    def _folder(self) -> Path:
        self._temporary = tempfile.TemporaryDirectory(prefix="trireme-bench-")
        return Path(self._temporary.name)

    @cached_property
    def _cluster(self) -> Cluster:
        cluster = embedded()
        cluster.client.create_table(self._table.schema)
        for low in range(0, self._num_rows, ROWS_PER_PUSH):
            high = min(low + ROWS_PER_PUSH, self._num_rows)
            self._push(cluster, np.arange(low, high, dtype=np.uint64))
        return cluster

    @cached_property
    def _saved(self) -> Path:
        return self._save("saved", "full")

    def _push(self, cluster: Cluster, keys: np.ndarray) -> None:
        self._num_pushes += 1
        distinct = _core.unique(keys, cluster.pool)[0]
        gradients = torch.full((len(distinct), DIM), 0.5)
        values = values_of_group({**self._table.optimizer.group()}, self._num_pushes)
        step = PushHeader(self._num_pushes, 0, [], len(distinct))
        cluster.client.push(step, {RowClassId("rows"): TableGradient(distinct, gradients, values)})

    def _save(self, name: str, mode: str) -> Path:
        path = self._folder / name
        save_checkpoint(self._cluster.client, path, extra={}, tensors={}, mode=mode)
        return path

    # ---- contestants ----

    def save_full(self) -> Run:
        assert self._cluster  # made before the clock starts
        assert self._folder
        _settle()
        elapsed_s = _seconds(lambda: self._save("full", "full"))
        num_bytes = _size(self._folder / "full")
        shutil.rmtree(self._folder / "full")
        return Run(num_bytes / elapsed_s, detail={"bytes": num_bytes, "seconds": elapsed_s})

    def write(self) -> Run:
        num_bytes = _size(self._saved)
        chunk = np.random.default_rng(0).integers(0, 256, CHUNK_BYTES, dtype=np.uint8)
        path = self._folder / "written"

        def write() -> None:
            with path.open("wb", buffering=0) as file:
                left = num_bytes
                while left > 0:
                    left -= file.write(chunk[:left].data)
                os.fsync(file.fileno())

        _settle()
        elapsed_s = _seconds(write)
        path.unlink()
        return Run(num_bytes / elapsed_s, detail={"seconds": elapsed_s})

    def load_full(self) -> Run:
        with embedded() as cluster:
            cluster.client.create_table(self._table.schema)
            _forget(self._saved)
            _settle(self._bytes_at_hand)
            elapsed_s = _seconds(lambda: load_checkpoint(cluster.client, self._saved))
            num_rows = cluster.client.stats()[0]["tables"]["rows"]["rows"]
            assert num_rows == self._num_rows, f"expected {self._num_rows} rows, found {num_rows}"
        num_bytes = _size(self._saved)
        return Run(num_bytes / elapsed_s, detail={"bytes": num_bytes, "seconds": elapsed_s})

    def read(self) -> Run:
        _forget(self._saved)
        _settle(self._bytes_at_hand)
        buffer = bytearray(CHUNK_BYTES)

        def read() -> None:
            for path in _files(self._saved):
                with path.open("rb", buffering=0) as file:
                    while file.readinto(buffer):
                        pass

        elapsed_s = _seconds(read)
        return Run(_size(self._saved) / elapsed_s, detail={"seconds": elapsed_s})

    def save_delta(self, number: int) -> Run:
        assert self._saved
        keys = np.random.default_rng(number).choice(self._num_rows, self._num_rows // 100, False)
        self._push(self._cluster, keys.astype(np.uint64))
        _settle()
        elapsed_s = _seconds(lambda: self._save("delta", "delta"))
        num_bytes = _size(self._folder / "delta")
        shutil.rmtree(self._folder / "delta")
        return Run(1 / elapsed_s, detail={"bytes": num_bytes, "seconds": elapsed_s})

    def save_again(self) -> Run:
        run = self.save_full()
        return Run(1 / run.detail["seconds"], detail=run.detail)


def _seconds(work: Callable[[], object]) -> float:
    started = time.monotonic()
    work()
    return time.monotonic() - started


def _settle(num_bytes: int = 0) -> None:
    """Flush pending writes to the disk, and touch enough memory: the host of a virtual machine may
    provide it page by page, which takes longer than a disk.
    """
    os.sync()
    np.ones(num_bytes, np.uint8)


def _files(folder: Path) -> Iterator[Path]:
    yield from sorted(path for path in folder.rglob("*") if path.is_file())


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in _files(folder))


def _forget(folder: Path) -> None:
    """Drop the files from the page cache, so that the next read is from the disk."""
    for path in _files(folder):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
