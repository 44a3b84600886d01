"""Where the CPU time of a step goes: CTR-DNN, async, one server and one worker, under `perf`.

`perf` samples all processes of the job; the samples of the timed pass are counted by the library
in which they were taken. What waits (for the interpreter's lock, for the other process) takes no
CPU and is not in the account: the wall time beside it says how much there is of both.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.criteo import tsv_files
from benchmarks.harness import BenchError, Claim, Contest, Run, Settings, say
from benchmarks.macro import step_parts
from benchmarks.macro.ctr import DIM, THREADS_SPAWNED
from benchmarks.macro.ours import run_job
from benchmarks.process import run_process

_HERTZ = 997  # no multiple of anything that the job does
_NUM_WARM, _NUM_TIMED = 1, 4
_TIMEOUT_S = 600
_SYMBOLS_SHOWN = 25

# Parts of a step: a pattern of the library, or of "library symbol", first match.
_PARTS = (
    ("matrix product", r"mkl|dnnl|gemm|\[JIT\]|^anon\b|perf-\d+\.map|libgomp|libiomp"),
    ("torch, else", r"libtorch|libc10|torch"),
    ("core", r"_core\."),
    ("ZeroMQ", r"libzmq|libsodium|_zmq"),
    ("NumPy", r"numpy|multiarray"),
    ("copies", r"libc.* .*mem(cpy|move|set)"),
    ("allocation", r"libc.* .*(malloc|free|calloc|realloc|memalign|_int_)"),
    ("locks", r"libc.* .*(pthread|lll_|futex|cond_|sem_)"),
    ("kernel", r"kernel|vmlinux|\[guest|vdso"),
    ("interpreter", r"libpython|python3|\.cpython-|ld-linux|libc"),
)
_OTHER = "other"
_SAMPLE = re.compile(r"\s*(\d+)\s+([\d.]+):\s+[0-9a-f]+\s+(.*?)\s+\((.*)\)\s*$")


def contests(settings: Settings) -> list[Contest]:
    batches = [settings.batch] if settings.batch else settings.pick(smoke=[512], real=[512, 4096])
    accounts = [_contest(settings, batch) for batch in batches]
    return [*accounts, *step_parts.contests(settings, batches)]


def _contest(settings: Settings, batch: int) -> Contest:
    metric = f"cpu_ms_b{batch}"
    return Contest(
        {metric: lambda _: _run(settings, batch)},
        [Claim(metric, metric, unit="ms/step")],
        settings.rounds,
    )


def _run(settings: Settings, batch: int) -> Run:
    perf = None if settings.is_smoke else shutil.which("perf")
    if perf is None and not settings.is_smoke:
        say("step: no account, for perf is not installed (Debian: apt-get install linux-perf)")
    files = tsv_files(settings).train
    with tempfile.TemporaryDirectory(prefix="trireme_bench_") as folder:
        data = f"{folder}/perf.data"
        record = [perf or "", "record", "-q", "-k", "CLOCK_MONOTONIC", "-e", "cpu-clock"]
        record += ["-F", str(_HERTZ), "-o", data, "--"]
        result = run_job(
            is_embedded=False,
            net="ctr",
            batch=batch,
            dim=DIM,
            threads=THREADS_SPAWNED.get(batch, 2),
            seed=1,
            warm=files[:_NUM_WARM],
            timed=files[_NUM_WARM : _NUM_WARM + _NUM_TIMED],
            under=record if perf else (),
        )
        cpu_us = sum(result["cpu_us_per_example"].values())
        parts = _account(perf, data, batch, result) if perf else {}
    return Run(batch * cpu_us / 1000, detail=parts)


def _account(perf: str, data: str, batch: int, result: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds of a step by process and part. Prints the table."""
    began, ended = result["timed_s"]
    script = [perf, "script", "-i", data, "-F", "pid,time,ip,sym,dso"]
    script += ["--time", f"{began:.6f},{ended:.6f}"]
    samples = Counter(sampled(run_process(script, timeout_s=_TIMEOUT_S).splitlines()))
    ms = 1000 / _HERTZ / (result["examples"] / batch)
    roles = {pid: role for role, pid in result["pids"].items()}
    account: dict[str, Counter[str]] = {role: Counter() for role in result["pids"]}
    symbols: Counter[str] = Counter()
    for (pid, symbol, library), count in samples.items():
        if (role := roles.get(pid)) is not None:
            account[role][part_of(symbol, library)] += count
            symbols[f"{role:9} {Path(library).name[:28]:28} {symbol[:60]}"] += count
    if not all(account.values()):
        raise BenchError(f"step: expected samples of {list(account)}, found {account}")
    wall_ms = 1000 * result["wall_s"] * batch / result["examples"]
    _print_table(account, symbols, ms, batch, wall_ms)
    return {
        role: {name: round(count * ms, 3) for name, count in part.most_common()}
        for role, part in account.items()
    }


def sampled(lines: Iterable[str]) -> Iterator[tuple[int, str, str]]:
    """(process, symbol, library) of each sample in the output of `perf script`."""
    for line in lines:
        if match := _SAMPLE.match(line):
            yield int(match[1]), match[3], match[4]


def part_of(symbol: str, library: str) -> str:
    """The part of a step that a sample counts for."""
    text = f"{Path(library).name} {symbol}"
    return next((name for name, pattern in _PARTS if re.search(pattern, text)), _OTHER)


def _print_table(
    account: dict[str, Counter[str]], symbols: Counter[str], ms: float, batch: int, wall_ms: float
) -> None:
    names = [*(name for name, _ in _PARTS), _OTHER]
    say(f"step: CPU of a step of {batch} examples in ms, {wall_ms:.2f} ms of wall time")
    say(f"  {'':16}" + "".join(f"{role:>12}" for role in account))
    for name in names:
        say(f"  {name:16}" + "".join(f"{part[name] * ms:12.3f}" for part in account.values()))
    say(f"  {'all':16}" + "".join(f"{part.total() * ms:12.3f}" for part in account.values()))
    for symbol, count in symbols.most_common(_SYMBOLS_SHOWN):
        say(f"  {count * ms:8.3f}  {symbol}")
