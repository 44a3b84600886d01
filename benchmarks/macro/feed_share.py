"""The share of feeding in a job: CTR-DNN from Criteo TSV, batch 4096, one server and one worker.

The CPU time of reading and parsing alone, per example, as a share of the job's.
"""

from __future__ import annotations

import resource

import trireme as tr
from benchmarks.criteo import tsv_files
from benchmarks.harness import Claim, Contest, Run, Settings
from benchmarks.macro.ours import run_job

_BATCH = 4096
_THREADS = 2
_NUM_WARM = 2
_NUM_TIMED = 8


def contest(settings: Settings) -> Contest:
    metric = "feed_cpu_share"
    return Contest(
        {metric: lambda _: _share(settings)},
        [Claim(metric, metric, unit="of the job's CPU")],
        settings.rounds,
    )


def _share(settings: Settings) -> Run:
    train = tsv_files(settings).train
    timed = train[_NUM_WARM : _NUM_WARM + _NUM_TIMED]
    batch = settings.pick(smoke=512, real=_BATCH)
    job = run_job(
        is_embedded=False,
        net="ctr",
        batch=batch,
        dim=9,
        threads=_THREADS,
        seed=1,
        warm=train[:_NUM_WARM],
        timed=timed,
    )
    job_us = sum(job["cpu_us_per_example"].values())
    feed_us = _feed_us_per_example(timed, batch)
    return Run(feed_us / job_us, detail={"feed_us": feed_us, "job_us": job_us})


def _feed_us_per_example(files: tuple[str, ...], batch: int) -> float:
    dataset = tr.data.QueueDataset(files, schema=tr.data.criteo(), batch_size=batch)
    before = resource.getrusage(resource.RUSAGE_SELF)
    num_examples = sum(b.num_examples for b in dataset)
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return 1e6 * cpu_s / num_examples
