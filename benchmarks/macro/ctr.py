"""CTR-DNN on Criteo-shaped text: async with one server and one worker, and embedded.

Per batch size: examples/s against Paddle, plain torch and the MLP alone; then the held-out AUC
after one pass over everything, against plain torch. Both also with the matrix products of oneDNN,
and with forward passes in bfloat16.
All processes share this machine's cores.
"""

from __future__ import annotations

from functools import partial

from benchmarks import rivals
from benchmarks.criteo import tsv_files
from benchmarks.harness import Claim, Contest, Run, Settings
from benchmarks.macro.ours import OTHER_PRODUCTS, PRODUCTS, run_job

DIM = 9
_NUM_WARM = 2
_NUM_TIMED = 8  # 200 k examples: after a shorter pass most of Paddle's pushes are still queued
_NUM_SEEDS = 3
# Trainer(threads=): two compute while others pull and push. With small batches and a server process
# pulls and pushes take as long as a third batch. The AUC is measured with the same number.
_THREADS = 2
THREADS_SPAWNED = {512: 3, 4096: 2}


def contests(settings: Settings) -> list[Contest]:
    batches = settings.pick(smoke=(512,), real=(512, 4096))
    return [make(settings, batch) for batch in batches for make in (_speed, _quality)]


def _speed(settings: Settings, batch: int) -> Contest:
    spawned, embedded = f"async_1x1_b{batch}", f"embedded_b{batch}"
    paddle = partial(rivals.paddle, settings, net="ctr", batch=batch, dim=DIM, num_files=_NUM_TIMED)

    def rate(is_embedded: bool, products: str, _: int) -> Run:
        return _rate(settings, batch, is_embedded=is_embedded, products=products)

    return Contest(
        {
            spawned: lambda _: _rate(settings, batch, is_embedded=False),
            **{f"{spawned}_{p}": partial(rate, False, p) for p in OTHER_PRODUCTS},
            embedded: lambda _: _rate(settings, batch, is_embedded=True),
            **{f"{embedded}_{p}": partial(rate, True, p) for p in OTHER_PRODUCTS},
            "dense_bound": lambda _: rivals.dense_bound(settings, batch=batch),
            "torch": lambda _: rivals.torch_step(settings, batch=batch),
            "paddle": lambda _: paddle(),
            "paddle_tuned": lambda _: paddle(flags=rivals.TUNED),
        },
        [
            Claim(spawned, spawned, ("paddle", "paddle_tuned", "dense_bound")),
            *_claims(spawned, ("paddle", "paddle_tuned", spawned)),
            Claim(embedded, embedded, ("dense_bound", "torch")),
            *_claims(embedded, (embedded, "torch")),
        ],
        settings.rounds,
    )


def _quality(settings: Settings, batch: int) -> Contest:
    metric = f"auc_b{batch}"

    def auc(products: str, seed: int) -> Run:
        return _auc(settings, batch, seed + 1, products=products)

    return Contest(
        {
            metric: lambda seed: _auc(settings, batch, seed + 1),
            **{f"{metric}_{p}": partial(auc, p) for p in OTHER_PRODUCTS},
            "torch": lambda seed: rivals.torch_auc(settings, batch=batch, seed=seed + 1),
        },
        [
            Claim(metric, metric, ("torch",), unit="auc"),
            *_claims(metric, (metric, "torch"), unit="auc"),
        ],
        settings.pick(smoke=1, real=_NUM_SEEDS),
        statistic="mean",
    )


def _claims(metric: str, rivals: tuple[str, ...], unit: str = "examples/s") -> list[Claim]:
    """Of a job with other matrix products than torch's."""
    names = [f"{metric}_{products}" for products in OTHER_PRODUCTS]
    return [Claim(name, name, rivals, unit=unit) for name in names]


def _rate(settings: Settings, batch: int, *, is_embedded: bool, products: str = PRODUCTS) -> Run:
    train = tsv_files(settings).train
    out = run_job(
        is_embedded=is_embedded,
        net="ctr",
        batch=batch,
        dim=DIM,
        threads=_THREADS if is_embedded else THREADS_SPAWNED[batch],
        seed=1,
        warm=train[:_NUM_WARM],
        timed=train[_NUM_WARM : _NUM_WARM + _NUM_TIMED],
        products=products,
    )
    return Run(out["examples_per_s"], detail=out)


def _auc(settings: Settings, batch: int, seed: int, *, products: str = PRODUCTS) -> Run:
    """One pass over all files, the first one as the warm-up, with one server and one worker."""
    files = tsv_files(settings)
    out = run_job(
        is_embedded=False,
        net="ctr",
        batch=batch,
        dim=DIM,
        threads=THREADS_SPAWNED[batch],
        seed=seed,
        warm=files.train[:1],
        timed=files.train[1:],
        test=files.test,
        products=products,
    )
    return Run(out["test_auc"], detail=out)
