"""CTR-DNN, async, with the server behind a slow network: examples/s of training.

async_1ms_1gbit   server and worker in two network namespaces, 1 ms (each way) and 1 Gbit/s apart,
                  batch 4096, beside the same over loopback
async_1ms_1gbit_b512   batch 512
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

from benchmarks.criteo import tsv_files
from benchmarks.harness import Claim, Contest, Run, Settings
from benchmarks.macro.link import slow_link
from benchmarks.macro.ours import need_plain_job, run_job

DELAY_S, BITS_PER_S = 1e-3, 1e9
_NUM_WARM, _NUM_TIMED = 2, 8
# The fastest number on two cores: behind a slow network two threads wait while two compute.
_THREADS, _THREADS_SLOW = {512: 3, 4096: 2}, 4


def contests(settings: Settings) -> Sequence[Contest]:
    return [_contest(settings, batch) for batch in settings.pick(smoke=(512,), real=(4096, 512))]


def _contest(settings: Settings, batch: int) -> Contest:
    of_batch = "" if batch == 4096 or settings.is_smoke else f"_b{batch}"
    slow, loopback = f"async_1ms_1gbit{of_batch}", f"loopback{of_batch}"
    return Contest(
        {
            slow: partial(_rate, settings, batch, True),
            loopback: partial(_rate, settings, batch, False),
        },
        [Claim(slow, slow, (loopback,))],
        settings.rounds,
    )


def _rate(settings: Settings, batch: int, is_slow: bool, number: int) -> Run:
    del number
    train = tsv_files(settings).train
    run = partial(
        run_job,
        is_embedded=False,
        net="ctr",
        batch=batch,
        dim=9,
        threads=_THREADS_SLOW if is_slow else _THREADS[batch],
        seed=1,
        warm=train[:_NUM_WARM],
        timed=train[_NUM_WARM : _NUM_WARM + _NUM_TIMED],
    )
    if is_slow:
        with slow_link(delay_s=DELAY_S, bits_per_s=BITS_PER_S) as (ends, work):
            out = run(ends=ends)
        out["link"] = asdict(work)
    else:
        need_plain_job(settings)
        out = run(limits="shared_bytes_max=0")  # the network alone differs
    return Run(out["examples_per_s"], detail=out)
