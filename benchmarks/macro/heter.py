"""Heterogeneous jobs: what it costs that another process runs the model, and what parts add up to.

level1_1x1   CTR-DNN, async, batch 4096: examples/s of one server, one worker and one compute worker
             on this machine, beside the same job in which the worker computes itself (async)
cpu2_gpu1    two workers that read with a quarter of a core each, and one compute worker with half a
             core, beside the rate that their measured parts add up to (macro/placed_jobs.py)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from benchmarks.criteo import tsv_files
from benchmarks.harness import Claim, Contest, Run, Settings
from benchmarks.macro.ours import need_plain_job, run_job
from benchmarks.macro.placed_jobs import sum_of_parts

_NUM_WARM, _NUM_TIMED = 2, 8


def contests(settings: Settings) -> Sequence[Contest]:
    return [
        Contest(
            {
                "level1_1x1": partial(_rate, settings, 1),
                "async": partial(_rate, settings, 0),
            },
            [Claim("level1_1x1", "level1_1x1", ("async",))],
            settings.rounds,
        ),
        sum_of_parts(settings),
    ]


def _rate(settings: Settings, num_compute: int, number: int) -> Run:
    del number
    if num_compute == 0:
        need_plain_job(settings)
    train = tsv_files(settings).train
    out = run_job(
        is_embedded=False,
        num_compute=num_compute,
        net="ctr",
        batch=settings.pick(smoke=512, real=4096),
        dim=9,
        threads=2,
        seed=1,
        warm=train[:_NUM_WARM],
        timed=train[_NUM_WARM : _NUM_WARM + _NUM_TIMED],
    )
    return Run(out["examples_per_s"], detail=out)
