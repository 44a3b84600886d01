"""The zoo beside itself: every model, and the same model with torch.nn.Embedding in one process.

Both start with the same weights and train on the same batches. Embedded and in sync they differ
only by rounding; with a server and a worker, async, also by one step of staleness.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from functools import partial
from itertools import chain
from pathlib import Path

from benchmarks.harness import Claim, Contest, Run, Settings
from benchmarks.macro.ours import environment
from benchmarks.macro.twin import make_twin
from benchmarks.macro.zoo_cases import CASES, Case, Place
from benchmarks.macro.zoo_job import seeded, train, train_twin
from benchmarks.process import run_process
from trireme.job.default import set_default
from trireme.job.embedded import embedded

_JOB = str(Path(__file__).with_name("zoo_job.py"))
_ROOT = str(Path(__file__).resolve().parents[2])
_PATH = os.pathsep.join([_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])
_NUM_SEEDS = 3
_SPAWNED = ("deepfm_adult", "din_history", "two_tower_choice", "word2vec_text")
_SMOKE = ("deepfm_adult", "din_history", "word2vec_text")
_TIMEOUT_S = 300


def contests(settings: Settings) -> list[Contest]:
    names = settings.pick(smoke=_SMOKE, real=tuple(CASES))
    return [_contest(settings, name) for name in names]


def _contest(settings: Settings, name: str) -> Contest:
    case, place = CASES[name], _place(settings)
    spawned = f"{name}_async"
    is_spawned = name in settings.pick(smoke=_SMOKE[:1], real=_SPAWNED)
    claims = [Claim(name, name, ("torch",), unit=case.unit)]
    if is_spawned:
        claims.append(Claim(spawned, spawned, ("torch",), unit=case.unit))
    return Contest(
        {
            name: partial(_ours, case, place),
            **({spawned: partial(_spawned, name, place)} if is_spawned else {}),
            "torch": partial(_torch, case, place),
        },
        claims,
        settings.pick(smoke=1, real=_NUM_SEEDS),
        statistic="mean",
    )


def _place(settings: Settings) -> Place:
    return Place(settings.is_smoke, Path(settings.rivals).parent / "data")


def _ours(case: Case, place: Place, seed: int) -> Run:
    data = case.data(place, seed)
    with embedded() as cluster:
        set_default(cluster)
        return Run(train(case, seeded(case, seed), data, "sync"))


def _torch(case: Case, place: Place, seed: int) -> Run:
    data = case.data(place, seed)
    with embedded() as cluster:
        set_default(cluster)
        epochs = (data.train.stream(0, 1, epoch=e) for e in range(case.epochs))
        items = [data.items] if data.items else []
        model = seeded(case, seed)
        twin, optimizers = make_twin(model, chain(data.test, items, *epochs), case.lr)
    return Run(train_twin(case, twin, optimizers, data))


def _spawned(name: str, place: Place, seed: int) -> Run:
    """Run a case with one server and one worker."""
    with tempfile.TemporaryDirectory(prefix="trireme_bench_") as folder:
        out = Path(folder) / "result.json"
        launch = ["-m", "trireme", "launch", "--server_num", "1", "--worker_num", "1"]
        options = [f"--case={name}", f"--seed={seed}", f"--real={place.folder}", f"--out={out}"]
        options += ["--smoke"] if place.is_smoke else []
        command = [sys.executable, *launch, "--log_dir", folder, _JOB, *options]
        run_process(command, timeout_s=_TIMEOUT_S, env={**environment(), "PYTHONPATH": _PATH})
        return Run(json.loads(out.read_text())["score"])
