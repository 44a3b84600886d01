"""The speed of importing Fleet's text tables: megabytes of text per second of one core.

Rows of head, tail of 8 and a g2sum each, of Fleet's shared Adagrad, with statistics, in files as
save_persistables writes them, uncompressed. One thread reads, checks and inserts; the files are in
the page cache. The hash is of the rows after the import.
"""

from __future__ import annotations

import hashlib
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np

import trireme as tr
from benchmarks.harness import BenchError, Claim, Contest, Run, Settings
from trireme import _core
from trireme.interchange.formats.file_lists import list_files
from trireme.interchange.worker_side.import_requests import importing, read_files
from trireme.job.embedded import embedded
from trireme.table import RowClassId

TAIL = 8
NUM_FILES = 10


def contests(settings: Settings) -> list[Contest]:
    num_rows = settings.pick(smoke=2_000, real=2_000_000)
    measure = partial(_measure, num_rows)
    claim = Claim("import_fleet", "import_fleet", unit="MB/s per core")
    return [Contest({"import_fleet": measure}, [claim], settings.rounds)]


def _measure(num_rows: int, _: int) -> Run:
    with tempfile.TemporaryDirectory(prefix="trireme_bench_") as folder:
        num_bytes = _write(Path(folder), num_rows)
        with embedded(threads=1) as home:
            table = tr.Table(
                "embedding",
                dim=TAIL + 1,
                optimizer=tr.optim.FleetAdagrad(),
                absent="zeros",
                policy=tr.policy.SparseAccessor(embedx_threshold=None),
            )
            home.client.create_table(table.schema)
            started, cpu_started = time.perf_counter(), time.process_time()
            with importing(home.client, [table.name], replace=True) as id:
                num_read = read_files(
                    home.client,
                    "import.fleet",
                    table.name,
                    list_files(folder),
                    {"accessor": "SparseAccessor", "betas": [0.0, 0.0], "time": 0},
                    id=id,
                )
            wall_s = time.perf_counter() - started
            cpu_s = time.process_time() - cpu_started
            if num_read != num_rows:
                raise BenchError(f"import_fleet: expected {num_rows} rows, found {num_read}")
            keys = _core.unique(_keys(num_rows)[:1000], home.pool)[0]
            rows = (
                home.client.pull({RowClassId(table.name): keys})
                .rows[RowClassId(table.name)]
                .numpy()
            )
    digest = hashlib.sha256(np.ascontiguousarray(rows).tobytes()).hexdigest()
    detail = {"rows": num_rows, "bytes": num_bytes, "wall_s": round(wall_s, 3)}
    return Run(num_bytes / cpu_s / 1e6, hash=digest, detail=detail)


def _keys(num_rows: int) -> np.ndarray:
    return np.random.default_rng(1).integers(1, 2**64, num_rows, dtype=np.uint64)


def _write(folder: Path, num_rows: int) -> int:
    """Write files as Fleet does, six digits a number; returns their bytes."""
    rng = np.random.default_rng(2)
    form = _core.RowTextFormat(num_head=7, num_full=7 + TAIL + 1, wide=[0, 3, 4])
    num_bytes = 0
    for number, keys in enumerate(np.array_split(_keys(num_rows), NUM_FILES)):
        n = len(keys)
        numbers = np.round(rng.normal(0, 0.1, (n, 7 + TAIL + 1)), 6).astype(np.float32)
        numbers[:, 1] = 0  # unseen days
        numbers[:, [6, -1]] = abs(numbers[:, [6, -1]])  # g2sum of head and tail
        wide = np.stack([rng.integers(2, 300, n), rng.integers(1, 100, n), rng.integers(0, 9, n)])
        is_full = (rng.random(n) < 0.7).astype(np.uint8)
        text = _core.write_rows(keys, numbers, wide.T.astype(np.float64).copy(), is_full, form)
        (folder / f"part-000-{number:05d}").write_bytes(text.data)
        num_bytes += text.nbytes
    return num_bytes
