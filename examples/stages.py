"""A model in stages: rows and a wide part on CPU workers, a tower on compute workers, a head again
on CPU workers.

python examples/stages.py
trireme launch --server_num 1 --worker_num 2 --heter_worker_num 1 --heter_devices gpu \
    examples/stages.py

Where there is no GPU, TRIREME_DEVICE_GPU=cpu lets the CPU stand in for it. The labels come from a
planted model. Worker 0 prints RESULT and a JSON object as its last line.
"""

from __future__ import annotations

import argparse
import json

import numpy as np
import torch
from torch import Tensor, nn

import trireme as tr

NUM_IDS, DIM = 500, 8


class Wide(nn.Module):
    """Looks up the rows; it runs where the tables' keys are planned."""

    def __init__(self) -> None:
        super().__init__()
        table = tr.Table("ids", dim=DIM, optimizer=tr.optim.Adagrad(lr=0.1))
        self.rows = tr.nn.EmbeddingBag(table, features=["user", "item"])

    def forward(self, batch: tr.data.Batch) -> dict[str, Tensor]:
        return {"rows": self.rows(batch).flatten(1), "hour": batch["hour"]}


class Tower(nn.Module):
    """The part that takes time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(2 * DIM + 1, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8)
        )

    def forward(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        x = torch.cat([values["rows"], values["hour"]], 1)
        return {"tower": self.layers(x), "rows": values["rows"]}


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8 + 2 * DIM, 1)

    def forward(self, values: dict[str, Tensor]) -> Tensor:
        return self.out(torch.cat([values["tower"], values["rows"]], 1)).squeeze(1)


def dataset(num_examples: int, seed: int) -> tr.data.ArrayDataset:
    weights = np.random.default_rng(0).normal(size=(2, NUM_IDS + 1))
    generator = np.random.default_rng(seed)
    user, item = generator.integers(1, NUM_IDS + 1, (2, num_examples))
    hour = generator.random(num_examples, np.float32)  # of the day, from 0 to 1
    logit = 1.5 * (weights[0, user] + weights[1, item]) + np.sin(6 * hour)
    label = (generator.random(num_examples) < 1 / (1 + np.exp(-logit))).astype(np.float32)
    columns = {"label": label, "user": user, "item": item, "hour": hour}
    sparse = [tr.data.Sparse("user"), tr.data.Sparse("item")]
    schema = tr.data.Schema([tr.data.Label(), *sparse, tr.data.Dense("hour")])
    return tr.data.ArrayDataset(columns, schema=schema, batch_size=256, shuffle=True, seed=seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=100_000, help="to train on")
    parser.add_argument("--mode", default="async", choices=("sync", "async"))
    arguments = parser.parse_args()
    cluster = tr.init()
    model = tr.Stages(cpu=Wide(), gpu=Tower(), cpu_2=Head())
    trainer = tr.Trainer(
        model,
        torch.optim.Adam(model.parameters(), 1e-3),
        loss=nn.functional.binary_cross_entropy_with_logits,
        strategy=tr.Strategy(arguments.mode),
        metrics=[tr.metrics.AUC()],
    )
    trainer.fit(dataset(arguments.examples, seed=1), epochs=2)
    figures = trainer.evaluate(dataset(arguments.examples // 5, seed=2))
    if cluster.worker == 0:
        result = {"auc": figures["auc"], "examples": figures["examples"]}
        print("RESULT", json.dumps(result), flush=True)


main()
