"""What it saves that large arrays lie in memory which a server and a worker on one machine share.

shared_ctr_b512, shared_ctr_b4096   CTR-DNN, async, dim 9, beside the same through the connection
shared_own_b512                     with one training thread, which sees its own pushes
shared_sum_dim8, shared_sum_dim64   the parameter service alone, batch 4096
"""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.criteo import tsv_files
from benchmarks.harness import Claim, Contest, Run, Settings
from benchmarks.macro.ctr import DIM, THREADS_SPAWNED
from benchmarks.macro.ours import need_plain_job, run_job

_NUM_WARM, _NUM_TIMED = 2, 8
_JOBS: dict[str, dict[str, Any]] = {
    "ctr_b512": {"net": "ctr", "batch": 512, "dim": DIM, "threads": THREADS_SPAWNED[512]},
    "own_b512": {"net": "ctr", "batch": 512, "dim": DIM, "threads": 1},
    "ctr_b4096": {"net": "ctr", "batch": 4096, "dim": DIM, "threads": THREADS_SPAWNED[4096]},
    "sum_dim8": {"net": "sum", "batch": 4096, "dim": 8, "threads": 2},
    "sum_dim64": {"net": "sum", "batch": 4096, "dim": 64, "threads": 2},
}


def contests(settings: Settings) -> list[Contest]:
    names = settings.pick(smoke=["ctr_b512"], real=list(_JOBS))
    return [_contest(settings, name) for name in names]


def _contest(settings: Settings, name: str) -> Contest:
    metric, connection = f"shared_{name}", f"connection_{name}"
    return Contest(
        {
            metric: partial(_rate, settings, name, True),
            connection: partial(_rate, settings, name, False),
        },
        [Claim(metric, metric, (connection,))],
        settings.rounds,
    )


def _rate(settings: Settings, name: str, shares: bool, _: int) -> Run:
    if not shares:
        need_plain_job(settings)
    train = tsv_files(settings).train
    out = run_job(
        is_embedded=False,
        seed=1,
        warm=train[:_NUM_WARM],
        timed=train[_NUM_WARM : _NUM_WARM + _NUM_TIMED],
        limits="" if shares else "shared_bytes_max=0",
        **_JOBS[name],
    )
    return Run(out["examples_per_s"], detail=out)
