"""word2vec on one server and two workers: the time until geo reaches the final loss of async."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import BenchError, Claim, Contest, Run, Settings
from benchmarks.macro.ours import environment
from benchmarks.process import run_process

_JOB = str(Path(__file__).with_name("geo_job.py"))
_ROOT = str(Path(__file__).resolve().parents[2])
_PATH = os.pathsep.join([_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])
_TIMEOUT_S = 300

Curve = list[list[float]]
"""[seconds, loss] behind each epoch."""


def contests(settings: Settings) -> list[Contest]:
    race = _Race(settings)
    return [
        Contest(
            {"async": race.run_async, "geo": race.run_geo},
            [Claim("word2vec_to_loss", "geo", ("async",), unit="1/s")],
            settings.rounds,
        )
    ]


class _Race:
    """In each round async runs first, and its loss is the target."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._target = 0.0
        self._epochs = settings.pick(smoke=1, real=4)

    def run_async(self, seed: int) -> Run:
        curve = self._train({"mode": "async"}, seed, self._epochs)
        seconds, self._target = curve[-1]
        return Run(1 / seconds, detail={"curve": curve})

    def run_geo(self, seed: int) -> Run:
        curve = self._train({"mode": "geo", "k": 50}, seed, 2 * self._epochs)
        return Run(1 / self._seconds_to_target(curve), detail={"curve": curve})

    def _seconds_to_target(self, curve: Curve) -> float:
        """Seconds after the first epoch that reaches the target; whole epochs favour async."""
        for seconds, loss in curve:
            if loss <= self._target or self._settings.is_smoke:
                return seconds
        raise BenchError(f"geo: expected a loss of {self._target:.4f}, found {curve}")

    def _train(self, strategy: dict[str, Any], seed: int, epochs: int) -> Curve:
        with tempfile.TemporaryDirectory(prefix="trireme_bench_") as folder:
            out = Path(folder) / "curve.json"
            command = [sys.executable, "-m", "trireme", "launch", "--server_num", "1"]
            command += ["--worker_num", "2", "--log_dir", folder, _JOB]
            command += [f"--strategy={json.dumps(strategy)}", f"--seed={seed}", f"--out={out}"]
            command += [f"--epochs={epochs}", *(["--smoke"] if self._settings.is_smoke else [])]
            run_process(command, timeout_s=_TIMEOUT_S, env={**environment(), "PYTHONPATH": _PATH})
            curve: Curve = json.loads(out.read_text())
            return curve
