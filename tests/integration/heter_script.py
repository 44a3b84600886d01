"""Script of every process of a heterogeneous job under test. Takes what to train as JSON.

It prints `read N` when its data gives batch N, and `RESULT {...}` at the end.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import Tensor, nn

import trireme as tr
from tests.integration.heter_data import Bags, mean_loss, train_and_tell

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
    "accumulate": 1,
    "autocast": None,
    "empty": 0,
    **json.loads(sys.argv[1]),
}


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
        accumulate=OPTIONS["accumulate"],
        autocast=OPTIONS["autocast"] and getattr(torch, OPTIONS["autocast"]),
        progress=False,
    )
    checkpoints = None
    if OPTIONS["checkpoint"]:
        checkpoints = tr.Checkpoints(OPTIONS["checkpoint"], every_steps=1000)
    data = Bags(OPTIONS["lengths"], OPTIONS["empty"], torch.bfloat16)
    tables = (model.table, model.other)
    train_and_tell(trainer, data, tables, epochs=OPTIONS["epochs"], checkpoints=checkpoints)


main()
