"""CPU seconds of all processes of a job on a tiny file, beside those of `import torch`.

`run` is `trireme run`; `launch` is `trireme launch` of a script, with a server and a worker, and
`launch_m` the same of the YAML file of `run`; in `launch_spawn` each process loads torch itself,
instead of being forked from one that has. The difference from `import torch` is to be at most
`bar_s` of the detail. Byte code is kept, as it is for users, and a round is not counted.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.harness import Claim, Contest, Run, Settings
from benchmarks.macro.ours import environment
from benchmarks.process import run_process

_JOB = str(Path(__file__).with_name("startup_job.py"))
_TIMEOUT_S = 300
_RUN_BAR_S, _LAUNCH_BAR_S = 1.0, 2.5  # of CPU, beyond torch's import
_EXAMPLES = 100
_CONFIG = f"""
runner:
  model_path: {_JOB}
  train_data_dir: train
  train_batch_size: 64
  epochs: 1
  sync_mode: async
  model_save_path: saved
"""


def contests(settings: Settings) -> list[Contest]:
    launch = ["-m", "trireme", "launch", "--server_num", "1", "--worker_num", "1"]
    config = ["-m", "config.yaml"]
    commands = {
        "run": (["-m", "trireme", "run", *config], _RUN_BAR_S),
        "launch": ([*launch, _JOB, "train/0.tsv"], _LAUNCH_BAR_S),
        "launch_m": ([*launch, *config], _LAUNCH_BAR_S),
        "import_torch": (["-c", "import torch"], None),
    }
    if not settings.is_smoke:
        spawn = [*launch, "--start_method", "spawn", _JOB, "train/0.tsv"]
        commands["launch_spawn"] = (spawn, None)
    return [
        Contest(
            {name: partial(_measured, *command) for name, command in commands.items()},
            [
                Claim(name, name, ("import_torch",), unit="s of CPU")
                for name in commands
                if name != "import_torch"
            ],
            settings.rounds,
            num_warm_ups=settings.pick(smoke=0, real=1),
            statistic="mean",
        )
    ]


def _measured(command: Sequence[str], bar_s: float | None, _: int) -> Run:
    """The CPU seconds of python with these arguments, in a folder with the file to train on."""
    with tempfile.TemporaryDirectory(prefix="trireme_bench_") as name:
        folder = Path(name)
        _write_job(folder)
        begin, cpu_before = time.monotonic(), _children_cpu_s()
        run_process([sys.executable, *command], timeout_s=_TIMEOUT_S, env=_environment(), cwd=name)
        cpu_s = _children_cpu_s() - cpu_before
        wall_s = round(time.monotonic() - begin, 3)
    return Run(cpu_s, detail={"wall_s": wall_s} | ({} if bar_s is None else {"bar_s": bar_s}))


def _write_job(folder: Path) -> None:
    (folder / "train").mkdir()
    line = "\t".join(["1", *["3"] * 13, *["0000000a"] * 26])
    (folder / "train" / "0.tsv").write_text(f"{line}\n" * _EXAMPLES)
    (folder / "config.yaml").write_text(_CONFIG)


def _environment() -> dict[str, str]:
    """Without what forbids to keep byte code."""
    return {k: v for k, v in environment().items() if k != "PYTHONDONTWRITEBYTECODE"}


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
