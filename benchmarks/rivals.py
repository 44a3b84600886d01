"""Runs the rivals' scripts, which are outside the project, and reads their JSON line.

`torch_ctr.py` is the same model in plain PyTorch, `paddle_ctr.py` on Paddle's parameter server.
`torchrec/ctr.py`, which is in the project, is it on torchrec. All read the folder that
`gen_criteo.py` makes.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import slot_data
from benchmarks.criteo import rivals_folder
from benchmarks.harness import Absent, BenchError, Run, Settings
from benchmarks.process import run_process

_OWN_SCRIPTS = Path(__file__).with_name("paddle")
_TORCHREC_SCRIPT = Path(__file__).with_name("torchrec") / "ctr.py"
TUNED = "MKL_DEBUG_CPU_TYPE=5"  # Paddle's MKL takes slow paths on AMD without it
_PADDLE_THREADS = (1, 2)
_TORCH_THREADS = 2
_TIMEOUT_S = 900
_PADDLE_TIMEOUT_S = 400
_JOB_VARIABLES = ("TRIREME_", "PADDLE_", "TRAINING_ROLE", "POD_IP", "OMP_NUM_THREADS")

# Runs a script with a seed other than its own.
_WITH_SEED = """
import runpy, sys, torch
seed, set_seed = int(sys.argv[1]), torch.manual_seed
torch.manual_seed = lambda _: set_seed(seed)
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def dense_bound(settings: Settings, *, batch: int) -> Run:
    """Forward, backward and Adam of the MLP alone, on one in-memory batch: the upper bound."""
    out = _torch(settings, "dense", batch=batch)
    return Run(out["ex_s_with_opt"], detail=out)


def torch_step(settings: Settings, *, batch: int) -> Run:
    """Plain PyTorch, nn.Embedding(sparse=True) with SparseAdam, ids already row numbers."""
    out = _torch(settings, "step", batch=batch, data=rivals_folder(settings))
    return Run(out["ex_s"], detail=out)


def torch_auc(settings: Settings, *, batch: int, seed: int) -> Run:
    """Held-out AUC of the same after one pass over the data."""
    out = _torch(settings, "auc", batch=batch, data=rivals_folder(settings), seed=seed)
    return Run(out["test_auc"], detail=out)


def paddle(
    settings: Settings, *, net: str, batch: int, dim: int, num_files: int, flags: str = ""
) -> Run:
    """Paddle's parameter server, one server and one worker, async; the better of 1 and 2 threads.

    The first two files are an untimed warm-up.
    """
    outs = [
        _paddle(settings, net=net, batch=batch, dim=dim, files=num_files, flags=flags, threads=n)
        for n in _PADDLE_THREADS
    ]
    best = max(outs, key=lambda out: out["ex_s"])
    by_threads = {f"ex_s_threads_{out['threads']}": out["ex_s"] for out in outs}
    return Run(best["ex_s"], detail={**best, **by_threads})


def torchrec(settings: Settings, *, batch: int, dim: int, num_warm: int, num_timed: int) -> Run:
    """torchrec with two ranks on gloo, each with batches of this size."""
    data = rivals_folder(settings)
    python = settings.torchrec_python
    if python is None or not Path(python).is_file():
        raise Absent(
            f"no Python with torchrec ({python}): make one with `make torchrec`,"
            " or name one with --torchrec PYTHON"
        )
    options = {
        "--data": str(data),
        "--batch": batch,
        "--dim": dim,
        "--warm": num_warm,
        "--timed": num_timed,
    }
    out = _run([python, "-W", "ignore", str(_TORCHREC_SCRIPT)], options)
    return Run(out["ex_s"], detail=out)


def paddle_rows(settings: Settings, *, data: str, out: str, rule: str) -> None:
    """Write to `out` the rows that Paddle pulls while it trains with one of Fleet's rules."""
    script = str(_OWN_SCRIPTS / "rows.py")
    _run([_paddle_python(settings), script], {"--data": data, "--out": out, "--rule": rule})


def paddle_slot(settings: Settings, *, files: Sequence[str], num_warm: int) -> Run:
    """Paddle's service alone on data of slot_dnn's shape; the better of 1 and 2 threads."""
    if settings.is_smoke:
        raise Absent("it takes a minute, which smoke mode does without")
    script = str(_OWN_SCRIPTS / "slot.py")
    options = {
        "--files": ",".join(files),
        "--names": ",".join(["show", "click", *slot_data.NAMES]),
        "--num_warm": num_warm,
    }
    examples = slot_data.EXAMPLES_PER_FILE * (len(files) - num_warm)
    rates = {
        f"ex_s_threads_{n}": examples
        / _run([_paddle_python(settings), script], {**options, "--threads": n})["wall_s"]
        for n in _PADDLE_THREADS
    }
    return Run(max(rates.values()), detail=rates)


def _torch(
    settings: Settings, what: str, *, batch: int, data: Path | None = None, seed: int | None = None
) -> dict[str, Any]:
    script = _script(settings, "torch_ctr.py")
    options = {"--what": what, "--batch": batch, "--threads": _TORCH_THREADS}
    if data is not None:
        options["--data"] = str(data)
    seeded = [] if seed is None else ["-c", _WITH_SEED, str(seed)]
    return _run([sys.executable, *seeded, script], options)


def _paddle(
    settings: Settings, *, net: str, batch: int, dim: int, files: int, flags: str, threads: int
) -> dict[str, Any]:
    script, python = _script(settings, "paddle_ctr.py"), _paddle_python(settings)
    options = {
        "--mode": "async",
        "--net": net,
        "--batch": batch,
        "--dim": dim,
        "--threads": threads,
        "--files": files,
        "--flags": flags,
        "--auc": int(net == "ctr"),
        "--test": 0,
        "--timeout": _PADDLE_TIMEOUT_S,
        "--data": str(rivals_folder(settings)),
    }
    out = _run([python, script, "launch"], options)
    if not out["ok"]:
        raise BenchError(f"paddle_ctr.py: the job failed; its logs are in {out.get('log')}")
    return out


def _paddle_python(settings: Settings) -> str:
    python = settings.paddle_python
    if python is None or not Path(python).is_file():
        raise Absent(
            f"no Python with Paddle ({python}): make one with `make paddle`,"
            " or name one with --paddle PYTHON"
        )
    return python


def _script(settings: Settings, name: str) -> str:
    path = Path(settings.rivals) / name
    if not path.is_file():
        raise Absent(f"no file {path}: name the folder of the rivals' scripts with --rivals FOLDER")
    return str(path)


def _run(command: list[str], options: dict[str, Any]) -> dict[str, Any]:
    """Run a script that ends with one line of JSON, without our environment variables."""
    env = {name: v for name, v in os.environ.items() if not name.startswith(_JOB_VARIABLES)}
    env.pop("PYTHONPATH", None)
    for name, value in options.items():
        command = [*command, f"{name}={value}"]
    out = run_process(command, timeout_s=_TIMEOUT_S, env=env)
    lines = [line for line in out.splitlines() if line.startswith("{")]
    if not lines:
        raise BenchError(f"{command[-1]}: expected a line of JSON on stdout, found {out[-500:]!r}")
    result: dict[str, Any] = json.loads(lines[-1])
    return result
