"""What it costs a worker to see its own pushes: CTR-DNN, async, one server and one worker.

With one training thread a worker pulls ahead only what the batch under way does not push, and the
rest when that push has been applied. The rivals miss pushes instead: `blind` pulls each batch ahead
whole, `threads` trains with several threads (`Trainer(threads=)`), which pull while others compute.
Then the held-out AUC after one pass over everything, against theirs and plain torch's.
"""

from __future__ import annotations

from functools import partial

from benchmarks import rivals
from benchmarks.criteo import tsv_files
from benchmarks.harness import Claim, Contest, Run, Settings
from benchmarks.macro.ctr import DIM, THREADS_SPAWNED
from benchmarks.macro.ours import run_job

_NUM_WARM = 2
_NUM_TIMED = 8
_NUM_SEEDS = 3


def contests(settings: Settings) -> list[Contest]:
    batches = settings.pick(smoke=(512,), real=(512, 4096))
    return [*(_speed(settings, batch) for batch in batches), _quality(settings, batches[-1])]


def _speed(settings: Settings, batch: int) -> Contest:
    metric, rate = f"own_b{batch}", partial(_rate, settings, batch)
    return Contest(
        {
            metric: lambda _: rate(),
            "blind": lambda _: rate(is_blind=True),
            "threads": lambda _: rate(threads=THREADS_SPAWNED[batch]),
        },
        [Claim(metric, metric, ("blind", "threads"))],
        settings.rounds,
    )


def _quality(settings: Settings, batch: int) -> Contest:
    metric, auc = f"own_auc_b{batch}", partial(_auc, settings, batch)
    return Contest(
        {
            metric: lambda seed: auc(seed + 1),
            "blind": lambda seed: auc(seed + 1, is_blind=True),
            "torch": lambda seed: rivals.torch_auc(settings, batch=batch, seed=seed + 1),
        },
        [Claim(metric, metric, ("blind", "torch"), unit="auc")],
        settings.pick(smoke=1, real=_NUM_SEEDS),
        statistic="mean",
    )


def _rate(settings: Settings, batch: int, *, is_blind: bool = False, threads: int = 1) -> Run:
    train = tsv_files(settings).train
    out = run_job(
        is_embedded=False,
        net="ctr",
        batch=batch,
        dim=DIM,
        threads=threads,
        seed=1,
        is_blind=is_blind,
        warm=train[:_NUM_WARM],
        timed=train[_NUM_WARM : _NUM_WARM + _NUM_TIMED],
    )
    return Run(out["examples_per_s"], detail=out)


def _auc(settings: Settings, batch: int, seed: int, *, is_blind: bool = False) -> Run:
    files = tsv_files(settings)
    out = run_job(
        is_embedded=False,
        net="ctr",
        batch=batch,
        dim=DIM,
        threads=1,
        seed=seed,
        is_blind=is_blind,
        warm=files.train[:1],
        timed=files.train[1:],
        test=files.test,
    )
    return Run(out["test_auc"], detail=out)
