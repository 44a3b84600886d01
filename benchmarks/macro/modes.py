"""The held-out AUC of each consistency mode beside that of sync, on the demo's data with 2 workers,
without delays and with late pushes that make them as stale as 8 workers and as 32.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import Claim, Contest, Run, Settings, say
from benchmarks.macro.ours import environment
from benchmarks.process import run_process
from examples.planted.clicks import write_planted_criteo

_JOB = str(Path(__file__).with_name("modes_job.py"))
_ROOT = str(Path(__file__).resolve().parents[2])
_PATH = os.pathsep.join([_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])
_NUM_SEEDS = 5
_TIMEOUT_S = 600
STRATEGIES: dict[str, dict[str, Any]] = {
    "sync": {"mode": "sync"},
    "bounded": {"mode": "bounded", "staleness": 4},
    "async": {"mode": "async"},
    "geo": {"mode": "geo", "k": 8},
    "hybrid": {"mode": "hybrid"},
}
# Number of workers -> mean delay in steps with which two workers have as many pushes in flight.
DELAYS = {2: 0, 8: 3, 32: 15}


def contests(settings: Settings) -> list[Contest]:
    delays = settings.pick(smoke={8: 3}, real=DELAYS)
    return [_contest(settings, workers, delay) for workers, delay in delays.items()]


def _contest(settings: Settings, workers: int, delay: int) -> Contest:
    modes = settings.pick(smoke=("sync", "geo"), real=tuple(STRATEGIES))
    return Contest(
        {mode: partial(_auc, settings, mode, delay) for mode in modes},
        [
            Claim(f"{mode}_auc_as_{workers}", mode, ("sync",), unit="auc")
            for mode in modes
            if mode != "sync"
        ],
        settings.pick(smoke=1, real=_NUM_SEEDS),
        statistic="mean",
    )


def _auc(settings: Settings, mode: str, delay: int, seed: int) -> Run:
    with tempfile.TemporaryDirectory(prefix="trireme_bench_") as folder:
        data, out = Path(folder) / "data", Path(folder) / "result.json"
        num_train, num_test = settings.pick(smoke=(4000, 1000), real=(500_000, 50_000))
        write_planted_criteo(
            data, examples=num_train, test_examples=num_test, files=4, seed=seed + 1, progress=False
        )
        command = [sys.executable, "-m", "trireme", "launch", "--server_num", "1"]
        command += ["--worker_num", "2", "--log_dir", folder, _JOB]
        command += [f"--strategy={json.dumps(STRATEGIES[mode])}", f"--delay={delay}"]
        command += [f"--seed={seed + 1}", f"--data={data}", f"--out={out}"]
        command += [f"--batch={settings.pick(smoke=64, real=512)}"]
        command += [f"--epochs={settings.pick(smoke=1, real=2)}"]
        run_process(command, timeout_s=_TIMEOUT_S, env={**environment(), "PYTHONPATH": _PATH})
        result = json.loads(out.read_text())
    say(f"modes: {mode}, late by {delay}: {json.dumps(result)}")
    return Run(result["auc"], detail=result)
