"""The cost of encryption: CTR-DNN, async, one server and one worker, examples/s of training. They
share no memory, where nothing is encrypted: so all bytes go through the connection.

curve_dim9, curve_dim64   with keys, batch 4096, beside the same without
curve_dim9_b512           batch 512
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.criteo import tsv_files
from benchmarks.harness import Claim, Contest, Run, Settings
from benchmarks.macro.ours import need_plain_job, run_job
from trireme.launch.key_folder import make_shared_folder

_NUM_WARM, _NUM_TIMED = 2, 8
_THREADS = {512: 3, 4096: 2}


def contests(settings: Settings) -> Sequence[Contest]:
    cases = settings.pick(smoke=((9, 512),), real=((9, 4096), (64, 4096), (9, 512)))
    return [_cost(settings, dim, batch) for dim, batch in cases]


def _cost(settings: Settings, dim: int, batch: int) -> Contest:
    of_batch = "" if batch == 4096 or settings.is_smoke else f"_b{batch}"
    curve, plain = f"curve_dim{dim}{of_batch}", f"plain{of_batch}"
    return Contest(
        {
            curve: partial(_rate, settings, dim, batch, True),
            plain: partial(_rate, settings, dim, batch, False),
        },
        [Claim(curve, curve, (plain,))],
        settings.rounds,
    )


def _rate(settings: Settings, dim: int, batch: int, has_keys: bool, number: int) -> Run:
    del number
    if not has_keys:
        need_plain_job(settings)
    train = tsv_files(settings).train
    with tempfile.TemporaryDirectory(prefix="trireme_bench_") as folder:
        if has_keys:
            make_shared_folder(Path(folder))
        out = run_job(
            is_embedded=False,
            net="ctr",
            batch=batch,
            dim=dim,
            threads=_THREADS[batch],
            seed=1,
            warm=train[:_NUM_WARM],
            timed=train[_NUM_WARM : _NUM_WARM + _NUM_TIMED],
            keys=folder if has_keys else None,
            limits="shared_bytes_max=0",
        )
    return Run(out["examples_per_s"], detail=out)
