"""Fleet's rules beside Fleet itself: the distance of our pulled rows from those of Paddle.

The same file, order and constants; per rule, the largest distance of any batch, relative to the
length of Paddle's rows of that batch. Nothing in smoke mode, as it needs Paddle; the tests compare
with rows that Paddle wrote earlier (tests/golden/test_fleet_rows.py).
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import trireme as tr
from benchmarks import rivals
from benchmarks.criteo import rivals_folder
from benchmarks.harness import Claim, Contest, Run, Settings
from benchmarks.paddle.rows import RULES, Shape, constants, read
from trireme.job.default import set_default
from trireme.job.embedded import embedded

_RULES: dict[str, Any] = {
    "sgd": tr.optim.FleetSGD,
    "adagrad": tr.optim.FleetAdagrad,
    "std_adagrad": partial(tr.optim.FleetAdagrad, shared=False),
    "adagrad_v2": tr.optim.FleetAdagradV2,
    "adam": tr.optim.FleetAdam,
    "shared_adam": tr.optim.FleetSharedAdam,
}


def contests(settings: Settings) -> list[Contest]:
    return [
        Contest(
            {metric: partial(_distance, settings, rule)},
            [Claim(metric, metric, unit="relative distance")],
            num_rounds=1,
        )
        for rule in settings.pick(smoke=(), real=tuple(RULES))
        for metric in (f"rows_{rule}",)
    ]


def _distance(settings: Settings, rule: str, _: int) -> Run:
    shape = Shape()
    data = rivals_folder(settings) / "multislot" / "part-0.txt"
    with tempfile.TemporaryDirectory(prefix="trireme_bench_") as folder:
        out = Path(folder) / "rows.npz"
        rivals.paddle_rows(settings, data=str(data), out=str(out), rule=rule)
        paddle_rows = np.load(out)["rows"]
    distances = distances_of(rule, data, shape, paddle_rows)
    return Run(float(distances.max()), detail={"batches": len(distances)})


def distances_of(rule: str, data: Path, shape: Shape, paddle_rows: np.ndarray) -> np.ndarray:
    """Train as Paddle did; returns |ours - Paddle's| / |Paddle's| of the rows pulled per batch.

    Args:
        paddle_rows: (batches, batch, features, dim), as benchmarks/paddle/rows.py writes it.
    """
    names = [f"C{i}" for i in range(shape.features)]
    first, bias, last = map(torch.from_numpy, constants(shape))
    distances = []
    with embedded(threads=1) as home:
        set_default(home)
        table = tr.Table(
            "embedding",
            dim=shape.dim,
            optimizer=_RULES[rule](lr=RULES[rule][2]),
            initializer=tr.initializer.TailUniform(0.0, 0.0),
            absent="zeros",
        )
        bags = tr.nn.EmbeddingBag(table, features=names)
        optimizer = tr.DistributedOptimizer(None, bags, cluster=home)
        for labels_B1, ids_BF, paddle_BFD in zip(*read(data, shape), paddle_rows, strict=True):
            columns = torch.from_numpy(ids_BF).unbind(1)
            rows_BFD = bags(dict(zip(names, columns, strict=True)))
            logits_B1 = torch.tanh(rows_BFD.flatten(1) @ first + bias) @ last
            targets_B1 = torch.from_numpy(labels_B1).float()
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits_B1, targets_B1)
            loss.backward()
            optimizer.step()
            apart = float(np.linalg.norm(rows_BFD.detach().numpy() - paddle_BFD))
            # Before the first push all rows are zeros: the distance is 0 or infinite.
            distances.append(apart and apart / float(np.linalg.norm(paddle_BFD)))
    return np.array(distances)
