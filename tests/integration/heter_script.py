"""Script of every process of a heterogeneous job under test. Takes what to train as JSON.

It prints `read N` when its data gives batch N, and `RESULT {...}` at the end.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import trireme as tr
from trireme.data.batch import Batch, Ragged, Strings

NUM_KEYS = 64
OPTIONS: dict[str, Any] = {
    "strategy": {"mode": "sync"},
    "lengths": [20],
    "rule": "Adagrad",
    "rows_lr": 0.05,
    "admit": 0,
    "dropout": 0.0,
    "norm": False,
    "clip_norm": None,
    "clip_value": None,
    "epochs": 1,
    "wrong": "",
    "checkpoint": "",
    "threads": None,
    "empty": 0,
    **json.loads(sys.argv[1]),
}


class Bags:
    """Bags with weights of one feature, single ids of another; the label is whether the single one
    is odd.
    """

    def stream(self, index: int, num_streams: int, *, epoch: int = 0) -> Iterator[Batch]:
        del num_streams
        generator = torch.Generator().manual_seed(100 * epoch + index)
        for number in range(OPTIONS["lengths"][index]):
            print(f"read {number}", flush=True)
            size = 0 if number < OPTIONS["empty"] else 8 + number % 3
            yield self._batch(size, generator)

    def _batch(self, size: int, generator: torch.Generator) -> Batch:
        lengths = torch.randint(0, 4, (size,), generator=generator)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        num = int(lengths.sum())
        values = torch.randint(0, NUM_KEYS, (num,), generator=generator)
        weights = torch.rand(num, generator=generator)
        one = torch.randint(0, NUM_KEYS, (size,), generator=generator)
        return Batch(
            {
                "bag": Ragged(values, offsets, weights),
                "one": one,
                "dense": torch.rand(size, 3, generator=generator).to(torch.bfloat16),
                "name": Strings.encode([f"e{i}" for i in range(size)]),
                "label": (one % 2).float(),
            }
        )


class Model(nn.Module):
    """Two tables of different widths, an MLP, and if asked for dropout and BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        rule = getattr(tr.optim, OPTIONS["rule"])
        admit = tr.policy.CountFilter(OPTIONS["admit"]) if OPTIONS["admit"] else None
        self.table = tr.Table("t", dim=4, optimizer=rule(lr=OPTIONS["rows_lr"]), admit=admit)
        self.other = tr.Table("u", dim=3, optimizer=rule(lr=OPTIONS["rows_lr"]))
        self.bags = tr.nn.EmbeddingBag(self.table, features=["bag"])
        self.ones = tr.nn.EmbeddingBag(self.other, features=["one"])
        layers: list[nn.Module] = [nn.Linear(10, 8), nn.ReLU()]
        if OPTIONS["norm"]:
            layers.append(nn.BatchNorm1d(8))
        if OPTIONS["dropout"]:
            layers.append(nn.Dropout(OPTIONS["dropout"]))
        self.top = nn.Sequential(*layers, nn.Linear(8, 1))

    def forward(self, batch: Any) -> Tensor:
        if OPTIONS["wrong"] == "forward":
            raise RuntimeError("the tower fell")
        rows = [self.bags(batch).flatten(1), self.ones(batch).flatten(1)]
        return self.top(torch.cat([*rows, batch["dense"].float()], 1)).squeeze(1)


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """0 for no examples."""
    losses = nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
    return losses / max(len(labels), 1)


def digest(tensors: Mapping[str, Tensor]) -> str:
    total = hashlib.sha256()
    for name in sorted(tensors):
        total.update(tensors[name].detach().numpy().tobytes())
    return total.hexdigest()


def main() -> None:
    torch.manual_seed(0)
    cluster = tr.init()
    model = Model()
    if OPTIONS["wrong"] == "model" and cluster.place is not None:
        model.top.append(nn.Linear(1, 1))
    if OPTIONS["wrong"] == "optimizer":
        tr.DistributedOptimizer(torch.optim.Adam(model.parameters()), model)
    trainer = tr.Trainer(
        model,
        torch.optim.Adam(model.parameters(), lr=0.01),
        loss=mean_loss,
        strategy=tr.Strategy(**OPTIONS["strategy"]),
        metrics=[tr.metrics.AUC()],
        clip_norm=OPTIONS["clip_norm"],
        clip_value=OPTIONS["clip_value"],
        threads=OPTIONS["threads"],
        progress=False,
    )
    print("TRAINER", trainer.threads, flush=True)
    checkpoints = None
    if OPTIONS["checkpoint"]:
        checkpoints = tr.Checkpoints(OPTIONS["checkpoint"], every_steps=1000)
    trained = trainer.fit(Bags(), epochs=OPTIONS["epochs"], checkpoints=checkpoints)
    figures = trainer.evaluate(Bags())
    keys = np.arange(NUM_KEYS, dtype=np.uint64)
    pulled = cluster.client.pull({t.class_id: keys for t in (model.table, model.other)})
    pushes = [stats["pushes"] for stats in cluster.client.stats()]
    for figures_of in (trained, figures):
        del figures_of["examples_per_s"]
    result = {
        "trained": trained,
        "figures": figures,
        "weights": digest(dict(model.named_parameters())),
        "buffers": digest(dict(model.named_buffers())),
        "rows": digest({str(name): rows for name, rows in pulled.rows.items()}),
        "random": float(torch.rand(())),
        "pushes": pushes,
        "steps": trainer.optimizer.num_steps,
    }
    print("RESULT", json.dumps(result), flush=True)


main()
