"""Data of slot_dnn's shape: 300 ragged features, batch 512, dim 9; 1 server, 1 worker, async.

`slot_dnn_1x1` is the parameter service alone, as it is for Paddle: embeddings pooled, summed and
pushed, no MLP. `slot_dnn_shows_1x1` is the same with rows that count shows and clicks, which every
push carries. `slot_dnn_model_1x1` trains the whole model, MLP 512-256-128-1.
"""

from __future__ import annotations

from functools import partial

from benchmarks import rivals
from benchmarks.harness import Claim, Contest, Run, Settings
from benchmarks.macro.ours import run_job
from benchmarks.slot_data import slot_files

_BATCH = 512
_DIM = 9
_THREADS = 1  # two would compete for the cores with the server, which has more work
_NUM_WARM = 2


def contests(settings: Settings) -> list[Contest]:
    service, shows, model = "slot_dnn_1x1", "slot_dnn_shows_1x1", "slot_dnn_model_1x1"
    files = partial(slot_files, settings)
    return [
        Contest(
            {
                service: lambda _: _rate(settings, "sum"),
                shows: lambda _: _rate(settings, "sum", shows=True),
                model: lambda _: _rate(settings, "slot_dnn"),
                "paddle": lambda _: rivals.paddle_slot(settings, files=files(), num_warm=_NUM_WARM),
            },
            [
                Claim(service, service, ("paddle",)),
                Claim(shows, shows, (service,)),
                Claim(model, model, ("paddle",)),
            ],
            settings.rounds,
        )
    ]


def _rate(settings: Settings, net: str, *, shows: bool = False) -> Run:
    files = slot_files(settings)
    out = run_job(
        is_embedded=False,
        net=net,
        data="slot",
        batch=settings.pick(smoke=64, real=_BATCH),
        dim=_DIM,
        threads=_THREADS,
        seed=1,
        warm=files[:_NUM_WARM],
        timed=files[_NUM_WARM:],
        shows=shows,
    )
    return Run(out["examples_per_s"], detail=out)
