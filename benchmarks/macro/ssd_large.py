"""One server with a table many times its memory: `python -m benchmarks.macro.ssd_large FOLDER`.

Rows are filled in, trained with keys drawn by Zipf's law, recovered after kill -9, saved, and
compared one by one with what their numbers of pushes say. Prints a JSON object for each phase.
FOLDER needs room for about four times the rows: those on SSD, of which some are rewritten, the
checkpoint, and the server's log and snapshots.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from benchmarks.harness import BenchError, say
from benchmarks.macro.server_process import ServerProcess
from trireme import Table, _core, initializer, optim
from trireme.checkpoint.format.manifest import read_manifest
from trireme.checkpoint.worker_side.save import save_checkpoint
from trireme.job.cluster import Cluster
from trireme.job.connecting import connect
from trireme.optim import values_of_group
from trireme.protocol.routing import buckets_of
from trireme.rows.core_table import make_core_table
from trireme.storage.storage import open_storage
from trireme.worker.gradients import PushHeader, TableGradient

DIM = 16
ZIPF = 1.05
TABLE = Table(
    "rows",
    dim=DIM,
    optimizer=optim.Adagrad(lr=0.05),
    initializer=initializer.Constant(0.0),
)
_ROWS = TABLE.class_id
_GRADIENTS = 7  # of a key: 1 + key % 7 in each dimension
_FILL_KEYS = 1 << 16
_BATCH, _FEATURES = 4096, 26
_SPREAD = 2_654_435_761  # odd: numbers of keys in the order of how often they come


class Large:
    """timeout_s: of a call, and until the connections to a killed server are given up."""

    def __init__(self, folder: Path, num_rows: int, memory: str, timeout_s: float) -> None:
        self.folder, self.num_rows, self.memory = folder, num_rows, memory
        self.timeout_s = timeout_s
        self.counts = np.zeros(num_rows, np.uint16)  # pushes of each key
        self.sequence = 0
        self.listen = "127.0.0.1:0"
        (folder / "ssd").mkdir(parents=True, exist_ok=True)

    @contextmanager
    def server(self, *, is_killed: bool) -> Iterator[tuple[ServerProcess, Cluster]]:
        options = ["--memory", self.memory, "--ssd_dir", str(self.folder / "ssd")]
        options += ["--durability", "process", "--state_dir", str(self.folder / "state")]
        with ServerProcess(self.folder, *options, listen=self.listen, start_s=3600) as server:
            self.listen = server.endpoint
            with connect(
                [server.endpoint],
                worker=0,
                num_workers=1,
                threads=1,
                timeout_s=self.timeout_s,
                keys=None,
            ) as cluster:
                cluster.client.create_table(TABLE.schema)
                yield server, cluster
                if is_killed:
                    server.kill()

    def push(self, cluster: Cluster, keys: np.ndarray) -> None:
        """keys: (K,) distinct, in bucket order."""
        self.sequence += 1
        of_key = (1 + keys % _GRADIENTS).astype(np.float32)
        gradients = torch.from_numpy(of_key)[:, None].expand(-1, DIM).contiguous()
        values = values_of_group(TABLE.optimizer.group(), 1)
        gradient = TableGradient(keys, gradients, values)
        cluster.client.push(PushHeader(self.sequence, 0, [], 1), {_ROWS: gradient})
        self.counts[keys.astype(np.int64)] += 1

    def fill(self, cluster: Cluster) -> None:
        for begin in range(0, self.num_rows, _FILL_KEYS):
            ids = np.arange(begin, min(begin + _FILL_KEYS, self.num_rows), dtype=np.uint64)
            self.push(cluster, _core.unique(ids, cluster.pool)[0])
            if begin // _FILL_KEYS % 256 == 0:
                free = shutil.disk_usage(self.folder).free
                say(f"ssd_large: {begin:,} of {self.num_rows:,} rows, {free >> 30} GiB free")
                if free < 4 << 30:
                    raise BenchError(f"expected 4 GiB of disk to be left, found {free >> 20} MiB")

    def train(self, cluster: Cluster, seconds: float) -> dict[str, float]:
        rng = np.random.default_rng(1)
        end, steps, num_keys = time.monotonic() + seconds, [], 0
        ranks = zipf_ranks(self.num_rows)
        while (start := time.monotonic()) < end:
            drawn = ranks(rng, _BATCH * _FEATURES)
            keys = _core.unique((drawn * _SPREAD % self.num_rows).astype(np.uint64), cluster.pool)[
                0
            ]
            cluster.client.pull({_ROWS: keys})
            self.push(cluster, keys)
            num_keys += len(keys)
            steps.append(time.monotonic() - start)
        return {
            "steps": len(steps),
            "keys_per_step": num_keys / len(steps),
            "examples_per_s": _BATCH * len(steps) / sum(steps),
            "step_median_ms": 1e3 * float(np.median(steps)),
            "step_p99_ms": 1e3 * float(np.percentile(steps, 99)),
        }

    def check(self, checkpoint: Path) -> int:
        """Compare each row of a checkpoint, bit by bit; returns how many."""
        expected = _expected(int(self.counts.max()))
        seen = np.zeros(self.num_rows, np.bool_)
        [part] = read_manifest(open_storage(checkpoint, None)).tables.values()
        for files in part.files:
            with pa.memory_map(str(checkpoint / files.rows.path)) as source:
                reader = pa.ipc.open_file(source)
                for batch in map(reader.get_batch, range(reader.num_record_batches)):
                    keys = batch["key"].to_numpy().astype(np.int64)
                    wanted = expected[keys % _GRADIENTS, self.counts[keys]]
                    weights = batch["weights"].flatten().to_numpy().reshape(-1, DIM)
                    state = batch["state"].flatten().to_numpy().reshape(-1, DIM)
                    right = (weights == wanted[:, :1]).all(1) & (state == wanted[:, 1:]).all(1)
                    if not right.all() or seen[keys].any():
                        raise BenchError(f"row of key {keys[~right][:1]} is not as pushed")
                    seen[keys] = True
        if not seen.all():
            raise BenchError(f"expected {self.num_rows:,} rows, found {int(seen.sum()):,}")
        return int(seen.sum())


def zipf_ranks(num: int) -> Callable[[np.random.Generator, int], np.ndarray]:
    """Draws ranks in [0, num) with a probability of rank**-ZIPF, by the inverse of its integral."""
    top = (num + 1.0) ** (1 - ZIPF) - 1

    def draw(rng: np.random.Generator, size: int) -> np.ndarray:
        ranks = (1 + rng.random(size) * top) ** (1 / (1 - ZIPF)) - 1
        return np.minimum(ranks.astype(np.uint64), np.uint64(num - 1))

    return draw


def _expected(num_max: int) -> np.ndarray:
    """(7, num_max + 1, 2) one weight and its state by gradient and number of pushes, as a table in
    memory has them.
    """
    rows, pool = make_core_table(TABLE.schema), _core.Pool(1)
    values = _core.RuleValues(**values_of_group(TABLE.optimizer.group(), 1))
    keys = np.arange(_GRADIENTS, dtype=np.uint64)
    gradients = np.repeat((1 + keys).astype(np.float32)[:, None], DIM, 1)
    expected = np.zeros((_GRADIENTS, num_max + 1, 2), np.float32)
    buckets = dict(zip(keys.tolist(), buckets_of(keys).tolist(), strict=True))
    for n in range(1, num_max + 1):
        rows.update(keys, gradients, [(0, n)], values, pool)
        for key, bucket in buckets.items():
            content = rows.snapshot(bucket)
            row = content.rows.reshape(len(content.keys), -1)[content.keys.tolist().index(key)]
            floats = row.view(np.float32)
            expected[key, n] = floats[0], floats[DIM]
    return expected


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=float, default=2e8)
    parser.add_argument("--memory", default="6GiB")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--timeout", type=float, default=60)
    args = parser.parse_args(argv)
    large = Large(args.folder, int(args.rows), args.memory, args.timeout)
    with large.server(is_killed=True) as (server, cluster):
        with _phase("fill", server, cluster) as figures:
            large.fill(cluster)
        with _phase("train", server, cluster) as figures:
            figures |= large.train(cluster, args.seconds)
    started = time.monotonic()
    with large.server(is_killed=False) as (server, cluster):
        figures = {"phase": "recover", "seconds": time.monotonic() - started}
        _print(figures | {"peak_mib": server.peak_mib()})
        with _phase("save", server, cluster) as figures:
            save_checkpoint(cluster.client, large.folder / "saved", extra={}, tensors={})
    started = time.monotonic()
    num_rows = large.check(large.folder / "saved")
    _print({"phase": "check", "seconds": time.monotonic() - started, "rows": num_rows})


@contextmanager
def _phase(name: str, server: ServerProcess, cluster: Cluster) -> Iterator[dict[str, Any]]:
    figures: dict[str, Any] = {"phase": name}
    server.forget_peak()
    before, cpu_s, start = _use(cluster), server.cpu_s(), time.monotonic()
    yield figures
    after = _use(cluster)
    figures |= {"seconds": time.monotonic() - start, "server_cpu_s": server.cpu_s() - cpu_s}
    figures["peak_mib"] = server.peak_mib()
    figures |= {f"{key}_more": after[key] - before[key] for key in _COUNTED}
    figures |= {key: after[key] for key in after if key not in _COUNTED}
    _print(figures)


_COUNTED = ("hits", "misses", "evicted", "cleaned", "reads")


def _use(cluster: Cluster) -> dict[str, int]:
    """What the table says about its tier."""
    [stats] = cluster.client.stats()
    return dict(stats["tables"][TABLE.name]["tier"])


def _print(figures: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(figures) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
