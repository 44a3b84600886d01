"""Script of every process of a job under test whose model has stages. Takes what to train as JSON.

It prints `read N` when its data gives batch N, and `RESULT {...}` at the end. A stage among those
that `waits` names for the role of the process prints `forward STAGE` and `backward STAGE` in
training, and waits for a line after each.
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
    "stages": ["cpu", "gpu", "cpu_2"],
    "lengths": [20],
    "rule": "Adagrad",
    "rows_lr": 0.05,
    "admit": 0,
    "dropout": 0.0,
    "norm": False,
    "clip_norm": None,
    "epochs": 1,
    "label": "label",
    "wrong": "",
    "threads": None,
    "accumulate": 1,
    "autocast": None,
    "empty": 0,
    "waits": {"worker": [], "heter": []},
    **json.loads(sys.argv[1]),
}


class First(nn.Module):
    """Rows of two tables, and tensors of several types that cross to the next stage."""

    def __init__(self) -> None:
        super().__init__()
        rule = getattr(tr.optim, OPTIONS["rule"])
        admit = tr.policy.CountFilter(OPTIONS["admit"]) if OPTIONS["admit"] else None
        self.table = tr.Table("t", dim=4, optimizer=rule(lr=OPTIONS["rows_lr"]), admit=admit)
        self.other = tr.Table("u", dim=3, optimizer=rule(lr=OPTIONS["rows_lr"]))
        self.bags = tr.nn.EmbeddingBag(self.table, features=["bag"])
        self.ones = tr.nn.EmbeddingBag(self.other, features=["one"])
        self.side = nn.Linear(3, 2)

    def forward(self, batch: Any) -> dict[str, Tensor]:
        rows = [self.bags(batch).flatten(1), self.ones(batch).flatten(1)]
        dense = batch["dense"]
        return {
            "x": torch.cat([*rows, dense], 1),
            "half": self.side(dense).bfloat16(),
            "double": self.side(dense).double().t(),
            "ids": batch["one"],
            "is_even": batch["one"] % 2 == 0,
            "constant": dense[:, :1].half(),
        }


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Linear(10, 10), nn.ReLU()]
        if OPTIONS["norm"]:
            layers += [nn.BatchNorm1d(10), tr.nn.DataNorm(10)]
        if OPTIONS["dropout"]:
            layers.append(nn.Dropout(OPTIONS["dropout"]))
        self.layers = nn.Sequential(*layers)

    def forward(self, values: Any) -> dict[str, Tensor]:
        if OPTIONS["wrong"] == "forward":
            raise RuntimeError("the tower fell")
        name = "y" if OPTIONS["wrong"] == "name" else "x"
        x = self.layers(values[name])
        outputs = {**values, "x": x}
        if OPTIONS["wrong"] == "detach":
            return {output: tensor.detach() for output, tensor in outputs.items()}
        return outputs


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(OPTIONS["dropout"])
        self.out = nn.Linear(14, 1)

    def forward(self, values: Any) -> Tensor:
        small = torch.where(
            values["is_even"][:, None], values["half"].float(), values["ids"][:, None] * 0.1
        )
        x = [values["x"], small, values["double"].t().float() * values["constant"].float()]
        return self.out(self.drop(torch.cat(x, 1))).squeeze(1)


def waiting(name: str, stage: nn.Module) -> None:
    """Let a stage say what it has computed, and wait for a line."""

    def say(text: str) -> None:
        print(text, flush=True)
        if sys.stdin.readline() == "":
            raise EOFError

    def watch(_: nn.Module, __: Any, output: Any) -> None:
        tensors = output.values() if isinstance(output, dict) else [output]
        learned = [t for t in tensors if t.requires_grad]
        if learned:
            say(f"forward {name}")
            learned[0].register_hook(lambda _: say(f"backward {name}"))

    stage.register_forward_hook(watch)


def make_model() -> tr.Stages:
    """First, as many of Middle as there are stages between, Last."""
    names = OPTIONS["stages"]
    made = [First(), *(Middle() for _ in names[2:]), Last()]
    return tr.Stages(**dict(zip(names, made, strict=True)))


def loss_of_batch(logits: Tensor, batch: Any) -> Tensor:
    return mean_loss(logits, batch["label"])


def main() -> None:
    torch.manual_seed(0)
    cluster = tr.init()
    model = make_model()
    for name in OPTIONS["waits"]["worker" if cluster.place is None else "heter"]:
        waiting(name, model[name])
    if OPTIONS["wrong"] == "model" and cluster.place is not None:
        model["gpu"].layers.append(nn.Linear(10, 10))
    trainer = tr.Trainer(
        model,
        torch.optim.Adam(model.parameters(), lr=0.01),
        loss=loss_of_batch if OPTIONS["label"] is None else mean_loss,
        strategy=tr.Strategy(**OPTIONS["strategy"]),
        metrics=[tr.metrics.AUC(label="label")],
        clip_norm=OPTIONS["clip_norm"],
        label=OPTIONS["label"],
        threads=OPTIONS["threads"],
        accumulate=OPTIONS["accumulate"],
        autocast=OPTIONS["autocast"] and getattr(torch, OPTIONS["autocast"]),
        progress=False,
    )
    first: Any = model[model.names[0]]
    data = Bags(OPTIONS["lengths"], OPTIONS["empty"])
    train_and_tell(trainer, data, (first.table, first.other), epochs=OPTIONS["epochs"])


main()
