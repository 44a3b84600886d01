"""The parameter service alone: 26 embeddings pulled, summed, pushed; no MLP. Batch 4096, async."""

from __future__ import annotations

from benchmarks import rivals
from benchmarks.criteo import tsv_files
from benchmarks.harness import Claim, Contest, Run, Settings
from benchmarks.macro.ours import run_job

_BATCH = 4096
_THREADS = 2
_NUM_WARM = 2
_NUM_TIMED = 8


def contests(settings: Settings) -> list[Contest]:
    dims = settings.pick(smoke=(8,), real=(8, 16, 64))
    return [_contest(settings, dim) for dim in dims]


def _contest(settings: Settings, dim: int) -> Contest:
    metric = f"sum_dim{dim}"
    return Contest(
        {
            metric: lambda _: _rate(settings, dim),
            "paddle": lambda _: rivals.paddle(
                settings, net="sum", batch=_BATCH, dim=dim, num_files=_NUM_TIMED
            ),
        },
        [Claim(metric, metric, ("paddle",))],
        settings.rounds,
    )


def _rate(settings: Settings, dim: int) -> Run:
    train = tsv_files(settings).train
    out = run_job(
        is_embedded=False,
        net="sum",
        batch=settings.pick(smoke=512, real=_BATCH),
        dim=dim,
        threads=_THREADS,
        seed=1,
        warm=train[:_NUM_WARM],
        timed=train[_NUM_WARM : _NUM_WARM + _NUM_TIMED],
    )
    return Run(out["examples_per_s"], detail=out)
