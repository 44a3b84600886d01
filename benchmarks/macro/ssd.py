"""Tables with rows on SSD: rows/s beside RocksDB, reads/s beside the bare device, and training.

rows_per_s                rows read and written back, keys by Zipf's law, rows 6.7 times the memory
device_reads_ratio        pages read per second meanwhile          device: the same reads, bare
write_amplification       rows written by rows that left memory
index_bytes_per_cold_row  memory of what finds a row on SSD
recovery_s                a start from a snapshot, rows on SSD
ctr_10x                   CTR-DNN, a table of 10 times the memory   memory: all rows in memory

rocksdb is a C++ program with MultiGet (Debian: librocksdb-dev), rocksdict its Python package (pip
install rocksdict). All have the same memory, in a cgroup where this machine lets us make one.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.compiled import compiled
from benchmarks.harness import Absent, Claim, Contest, Run, Settings, say
from benchmarks.macro.ours import environment
from benchmarks.process import run_process

_ROOT = Path(__file__).resolve().parents[2]
_CORE = ("store/ssd/uring_device", "store/ssd/pool_device", "store/ssd/folder", "base/pages")
_CGROUPS = Path("/sys/fs/cgroup/memory")
_ROW_BYTES = 144  # of ours: 16 weights, 16 of state, key, stamp
_BESIDE_ROW = 8  # of a row in memory: what finds it
_AROUND_BYTES = 1 << 30  # of a process beside its rows: Python, keys and rows of a step
_THREADS = (16, 64)  # of RocksDB: the better one counts
_TIMEOUT_S = 1500.0


def contests(settings: Settings) -> Sequence[Contest]:
    num_rows = settings.pick(smoke=60_000, real=4_000_000)
    memory = settings.pick(smoke=6 << 20, real=num_rows * _ROW_BYTES * 15 // 100)
    seconds = settings.pick(smoke=0.3, real=30.0)

    def rows(kind: str, value: str = "rows_per_s") -> Callable[[int], Run]:
        def run(_: int) -> Run:
            if kind != "ours" and importlib.util.find_spec(kind) is None:
                raise Absent(f"{kind}: not installed; pip install {kind}")
            module = [sys.executable, "-m", "benchmarks.micro.ssd_job", kind]
            options = [f"--rows={num_rows}", f"--memory={memory}", f"--seconds={seconds}"]
            with _folder() as folder:
                out = _run([*module, str(folder), *options], memory)
            return Run(out[value], detail=out)

        return run

    def rocksdb(_: int) -> Run:
        program = compiled(settings, "ssd_rocksdb", ["-lrocksdb"])
        runs = []
        for threads in _THREADS:
            with _folder() as folder:
                arguments = [num_rows, memory, seconds, threads]
                runs.append(_run([program, str(folder), *map(str, arguments)], memory))
        best = max(runs, key=lambda run: float(run["rows_per_s"]))
        return Run(best["rows_per_s"], detail=best)

    def device(_: int) -> Run:
        sources = [str(_ROOT / "core" / f"{name}.cc") for name in _CORE]
        program = compiled(settings, "ssd_device", [f"-I{_ROOT / 'core'}", *sources, "-lpthread"])
        with _folder() as folder:
            num_bytes = num_rows * _ROW_BYTES
            io = "io_uring" if _has_io_uring() else "threads"
            out = _run([program, str(folder), str(num_bytes), str(seconds), io], memory)
        return Run(out["reads_per_s"], detail=out)

    kinds = {
        "rows_per_s": rows("ours"),
        "rocksdb": rocksdb,
        "rocksdict": rows("rocksdict"),
    }
    reads = {"device_reads_ratio": rows("ours", "reads_per_s"), "device": device}
    figures = {
        name: rows("ours", name) for name in ("write_amplification", "index_bytes_per_cold_row")
    }
    return [
        Contest(
            kinds,
            [Claim("rows_per_s", "rows_per_s", ("rocksdb", "rocksdict"), "rows/s")],
            settings.rounds,
        ),
        Contest(
            reads,
            [Claim("device_reads_ratio", "device_reads_ratio", ("device",), "reads/s")],
            settings.rounds,
        ),
        Contest(figures, [Claim(name, name, (), "") for name in figures], 1),
        Contest(
            {"recovery_s": lambda _: _recovery(settings)},
            [Claim("recovery_s", "recovery_s", (), "s")],
            1,
        ),
        _ctr(settings),
    ]


def _recovery(settings: Settings) -> Run:
    num_rows = settings.pick(smoke=60_000, real=100_000_000)
    memory = settings.pick(smoke=6 << 20, real=3 << 30)
    command = [sys.executable, "-m", "benchmarks.micro.ssd_job", "recovery"]
    with _folder() as folder:
        out = _run([*command, str(folder), f"--rows={num_rows}", f"--memory={memory}"], None)
    return Run(out["recovery_s"], detail=out)


def _ctr(settings: Settings) -> Contest:
    num_rows = settings.pick(smoke=60_000, real=40_000_000)
    budget = max(num_rows * (_ROW_BYTES + _BESIDE_ROW) // 10, 6 << 20)

    def train(memory: int) -> Run:
        warm = settings.pick(smoke=2, real=1500 if memory else 2)
        sizes = settings.pick(smoke=["--batches=2", "--batch=64"], real=["--batches=200"])
        command = [sys.executable, "-m", "benchmarks.macro.ssd_ctr_job"]
        with _folder() as folder:
            options = [str(folder), f"--rows={num_rows}", f"--memory={memory}", *sizes]
            out = _run([*command, *options, f"--warm_batches={warm}"], None)
        return Run(out["examples_per_s"], detail=out)

    return Contest(
        {"ctr_10x": lambda _: train(budget), "memory": lambda _: train(0)},
        [Claim("ctr_10x", "ctr_10x", ("memory",))],
        settings.rounds,
    )


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="trireme_bench_") as folder:
        yield Path(folder)


def _run(command: Sequence[str], memory: int | None) -> dict[str, Any]:
    """The JSON that a command prints last. memory: for its rows; it may take no more in all."""
    with contextlib.ExitStack() as stack:
        group = None if memory is None else _cgroup(memory + _AROUND_BYTES)
        if group is not None:
            stack.callback(group.rmdir)
            enter = f'echo $$ > {group / "cgroup.procs"} && exec "$@"'
            command = ["sh", "-c", enter, "sh", *command]
        env = {**environment(), "PYTHONPATH": os.pathsep.join(sys.path)}
        out = run_process(command, timeout_s=_TIMEOUT_S, env=env)
    return dict(json.loads(out.splitlines()[-1]))


def _cgroup(num_bytes: int) -> Path | None:
    path = _CGROUPS / f"trireme_bench_{os.getpid()}"
    try:
        path.mkdir(exist_ok=True)
        (path / "memory.limit_in_bytes").write_text(str(num_bytes))
    except OSError as error:
        _say_once(f"ssd: no cgroup limits the memory of the contestants: {error}")
        return None
    return path


@cache
def _say_once(text: str) -> None:
    say(text)


def _has_io_uring() -> bool:
    from trireme import _core
    from trireme.errors import Unavailable

    with _folder() as folder:
        try:
            _core.SsdDevice(str(folder), "io_uring")
        except Unavailable:
            return False
    return True
