"""CTR-DNN without servers: two workers beside torchrec on gloo, and one beside the embedded job.

torchrec's CPU tables have no Adam and take dims that are multiples of 4, so both sides use dim 12
and row-wise Adagrad. Both train on the same examples; ours parses their text, torchrec has them in
memory. Two workers also with the matrix products of oneDNN.
"""

from __future__ import annotations

from benchmarks import rivals
from benchmarks.criteo import tsv_files
from benchmarks.harness import Claim, Contest, Run, Settings
from benchmarks.macro.ours import PRODUCTS, run_job

DIM = 12
_NUM_WARM = 2
_NUM_TIMED = 8


def contests(settings: Settings) -> list[Contest]:
    batch = settings.pick(smoke=512, real=4096)
    two, one = f"ranks2_b{batch}", f"ranks1_b{batch}"
    return [
        Contest(
            {
                two: lambda _: _rate(settings, batch, num_ranks=2, strategy="collective"),
                f"{two}_onednn": lambda _: _rate(
                    settings, batch, num_ranks=2, strategy="collective", products="onednn"
                ),
                "torchrec": lambda _: rivals.torchrec(
                    settings, batch=batch // 2, dim=DIM, num_warm=_NUM_WARM, num_timed=_NUM_TIMED
                ),
            },
            [Claim(name, name, ("torchrec",)) for name in (two, f"{two}_onednn")],
            settings.rounds,
        ),
        Contest(
            {
                one: lambda _: _rate(settings, batch, num_ranks=0, strategy="collective"),
                "embedded": lambda _: _rate(settings, batch, num_ranks=0, strategy="async"),
            },
            [Claim(one, one, ("embedded",))],
            settings.rounds,
        ),
    ]


def _rate(
    settings: Settings, batch: int, *, num_ranks: int, strategy: str, products: str = PRODUCTS
) -> Run:
    """batch: of all workers together. num_ranks: 0: one process."""
    train = tsv_files(settings).train
    out = run_job(
        is_embedded=num_ranks == 0,
        num_ranks=num_ranks,
        strategy=strategy,
        rule="adagrad",
        net="ctr",
        batch=batch // max(1, num_ranks),
        dim=DIM,
        threads=1,
        seed=1,
        warm=train[:_NUM_WARM],
        timed=train[_NUM_WARM : _NUM_WARM + _NUM_TIMED],
        products=products,
    )
    return Run(out["examples_per_s"], detail=out)
