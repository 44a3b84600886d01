"""Seconds from the start of a command to the end of its first batch, beside torch's import.

`alone` is one process with embedded tables; `launch` is `trireme launch` with a server and a
worker. The detail has the CPU seconds of all processes, which a loaded machine changes less.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.criteo import tsv_files
from benchmarks.harness import Claim, Contest, Run, Settings
from benchmarks.macro.ours import environment
from benchmarks.process import run_process

_JOB = str(Path(__file__).with_name("startup_job.py"))
_TIMEOUT_S = 300
_IMPORT = "import time, torch; print(time.monotonic())"


def contests(settings: Settings) -> list[Contest]:
    return [
        Contest(
            {
                "alone": lambda _: _first_batch(settings, is_launched=False),
                "launch": lambda _: _first_batch(settings, is_launched=True),
                "import_torch": lambda _: _import_torch(),
            },
            [
                Claim("alone", "alone", ("import_torch",), unit="s"),
                Claim("launch", "launch", ("import_torch",), unit="s"),
            ],
            settings.rounds,
        )
    ]


def _first_batch(settings: Settings, *, is_launched: bool) -> Run:
    batch_size = settings.pick(smoke=64, real=512)
    with tempfile.TemporaryDirectory(prefix="trireme_bench_") as folder:
        out = Path(folder) / "result.json"
        command = [_JOB, tsv_files(settings).train[0], str(batch_size), str(out)]
        if is_launched:
            place = ["--server_num", "1", "--worker_num", "1", "--log_dir", folder]
            command = ["-m", "trireme", "launch", *place, *command]
        return _measured(command, lambda _: float(json.loads(out.read_text())["first_batch"]))


def _import_torch() -> Run:
    return _measured(["-c", _IMPORT], lambda output: float(output))


def _measured(command: Sequence[str], end_of: Callable[[str], float]) -> Run:
    """Run python; `end_of` its output is the time of CLOCK_MONOTONIC, which all processes share."""
    begin, cpu_before = time.monotonic(), _children_cpu_s()
    output = run_process([sys.executable, *command], timeout_s=_TIMEOUT_S, env=environment())
    cpu_s = round(_children_cpu_s() - cpu_before, 3)
    return Run(end_of(output) - begin, detail={"cpu_s": cpu_s})


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
