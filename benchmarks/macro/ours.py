"""Runs macro/job.py, embedded or as one server and one worker, and reads its result."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.harness import Absent, Settings
from benchmarks.macro.link import End
from benchmarks.process import run_process

_JOB = str(Path(__file__).with_name("job.py"))
_TIMEOUT_S = 600

# Of matrices: torch's own in float32, and others.
PRODUCTS = "float32"
OTHER_PRODUCTS = ("onednn", "bf16")


def run_job(
    *,
    is_embedded: bool,
    num_ranks: int = 0,
    num_compute: int = 0,
    strategy: str = "async",
    rule: str = "adam",
    net: str,
    data: str = "criteo",
    batch: int,
    dim: int,
    threads: int,
    seed: int,
    warm: Sequence[str],
    timed: Sequence[str],
    test: Sequence[str] = (),
    shows: bool = False,
    durability: str = "none",
    keys: str | None = None,
    limits: str = "",
    ends: tuple[End, End] | None = None,
    in_memory: bool = False,
    in_pass: bool = False,
    products: str = PRODUCTS,
    is_blind: bool = False,
    under: Sequence[str] = (),
) -> dict[str, Any]:
    """Train over the warm-up files, then over the timed ones, in processes of their own.

    ends: network ends of the server and of the worker, if they are apart. num_ranks: workers of a
    job without servers, instead of one server and one worker. num_compute: compute workers, on the
    CPU. limits: of the server. under: a command that runs the job's. strategy, rule, in_memory,
    in_pass, products, is_blind: see job.py.
    """
    with tempfile.TemporaryDirectory(prefix="trireme_bench_") as folder:
        out = Path(folder) / "result.json"
        command = [
            _JOB,
            f"--net={net}",
            f"--data={data}",
            f"--batch={batch}",
            f"--dim={dim}",
            f"--seed={seed}",
            f"--strategy={strategy}",
            f"--rule={rule}",
            f"--products={products}",
        ]
        command += [f"--threads={threads}", *(["--shows"] if shows else [])]
        command += [f"--out={out}", "--warm", *warm, "--timed", *timed]
        command += ["--test", *test] if test else []
        flags = {
            "--in_memory": in_memory,
            "--in_pass": in_pass,
            "--blind": is_blind,
        }
        command += [flag for flag, is_given in flags.items() if is_given]
        if not is_embedded:
            wrapped = command
            launch = ["-m", "trireme", "launch"]
            launch += [] if num_ranks else ["--durability", durability]
            launch += [] if keys is None else ["--keys", keys]
            launch += ["--limits", limits] if limits else []
            if ends is not None:
                _run_apart(launch, wrapped, Path(folder), ends)
                return _result(out)
            place = ["--server_num", "0" if num_ranks else "1", "--worker_num", f"{num_ranks or 1}"]
            if num_compute:
                place += ["--heter_worker_num", str(num_compute), "--heter_devices", "cpu"]
            place += ["--log_dir", folder]
            command = [*launch, *place, *wrapped]
        run_process([*under, sys.executable, *command], timeout_s=_TIMEOUT_S, env=environment())
        return _result(out)


def need_plain_job(settings: Settings) -> None:
    """Call this before a plain job, the reference of a measurement.

    Raises:
        Absent: in smoke mode, where only `ctr` runs such a job.
    """
    if settings.is_smoke:
        raise Absent("it is a plain job, which smoke mode runs only for ctr")


def _result(out: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(out.read_text())
    return result


def _run_apart(
    launch: Sequence[str], job: Sequence[str], folder: Path, ends: tuple[End, End]
) -> None:
    """Run one command at two network ends, each of which starts its own processes."""
    server, worker = ends
    place = ["--servers", f"{server.address}:6000", "--workers", f"{worker.address}:0"]

    def run(end: End, name: str) -> None:
        command = [*end.prefix, sys.executable, *launch, *place, "--insecure"]
        command += ["--log_dir", str(folder / name), *job]
        run_process(command, timeout_s=_TIMEOUT_S, env=environment())

    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(run, server, "server")
        run(worker, "worker")
        serving.result()


def environment() -> dict[str, str]:
    """Our environment without the variables that place a process in a job."""
    prefixes = ("TRIREME_", "PADDLE_", "TRAINING_ROLE")
    return {name: v for name, v in os.environ.items() if not name.startswith(prefixes)}
