"""The cost of a checkpoint every 30 s for CTR-DNN, async, one server and one worker: examples/s
over two minutes, and the server's memory.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

from benchmarks.criteo import tsv_files
from benchmarks.harness import BenchError, Claim, Contest, Run, Settings
from benchmarks.macro.ours import environment, need_plain_job
from benchmarks.process import run_process

_JOB = str(Path(__file__).with_name("saving_job.py"))
_ROOT = str(Path(__file__).resolve().parents[2])
_PATH = os.pathsep.join([_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])
_TIMEOUT_S = 600
_DIM, _BATCH, _THREADS = 9, 512, 3
_NUM_FILES = 4


def contests(settings: Settings) -> list[Contest]:
    seconds, every_s = settings.pick(smoke=(2.0, 0.2), real=(120.0, 30.0))
    return [
        Contest(
            {
                "train_while_saving": lambda _: _run(settings, seconds, every_s),
                "train": lambda _: _run(settings, seconds, None),
            },
            [Claim("train_while_saving", "train_while_saving", ("train",))],
            settings.rounds,
        )
    ]


def _run(settings: Settings, seconds: float, every_s: float | None) -> Run:
    if every_s is None:
        need_plain_job(settings)
    files = tsv_files(settings).train[:_NUM_FILES]
    with tempfile.TemporaryDirectory(prefix="trireme_bench_") as folder:
        out = Path(folder) / "result.json"
        launch = ["-m", "trireme", "launch", "--server_num", "1", "--worker_num", "1"]
        command = [*launch, "--log_dir", folder, _JOB, f"--batch={_BATCH}", f"--dim={_DIM}"]
        command += [f"--threads={_THREADS}", f"--seconds={seconds}", f"--out={out}"]
        command += [] if every_s is None else [f"--every_s={every_s}"]
        command += ["--files", *files]
        env = {**environment(), "TRIREME_ROOT": folder, "PYTHONPATH": _PATH}
        run_process([sys.executable, *command], timeout_s=_TIMEOUT_S, env=env)
        detail = json.loads(out.read_text())
    if every_s is not None and detail["saves"] < 1:
        raise BenchError(f"train_while_saving: expected saves within {seconds:g} s, found none")
    return Run(detail["examples_per_s"], detail=detail)
