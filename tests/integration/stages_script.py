"""Script of every process of a job under test whose model has stages. Takes what to train as JSON.

It prints `read N` when its data gives batch N, and `RESULT {...}` at the end. A stage among those
that `waits` names for the role of the process prints `forward STAGE` and `backward STAGE` in
training, and waits for a line after each.
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
    "empty": 0,
    "waits": {"worker": [], "heter": []},
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
            yield self._batch(0 if number < OPTIONS["empty"] else 8 + number % 3, generator)

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
                "dense": torch.rand(size, 3, generator=generator),
                "name": Strings.encode([f"e{i}" for i in range(size)]),
                "label": (one % 2).float(),
            }
        )


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


def mean_loss(logits: Tensor, labels: Any) -> Tensor:
    """0 for no examples."""
    labels = labels["label"] if OPTIONS["label"] is None else labels
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
    model = make_model()
    for name in OPTIONS["waits"]["worker" if cluster.place is None else "heter"]:
        waiting(name, model[name])
    if OPTIONS["wrong"] == "model" and cluster.place is not None:
        model["gpu"].layers.append(nn.Linear(10, 10))
    trainer = tr.Trainer(
        model,
        torch.optim.Adam(model.parameters(), lr=0.01),
        loss=mean_loss,
        strategy=tr.Strategy(**OPTIONS["strategy"]),
        metrics=[tr.metrics.AUC(label="label")],
        clip_norm=OPTIONS["clip_norm"],
        label=OPTIONS["label"],
        threads=OPTIONS["threads"],
        progress=False,
    )
    print("TRAINER", trainer.threads, flush=True)
    trained = trainer.fit(Bags(), epochs=OPTIONS["epochs"])
    figures = trainer.evaluate(Bags())
    keys = np.arange(NUM_KEYS, dtype=np.uint64)
    first: Any = model[model.names[0]]
    pulled = cluster.client.pull({t.class_id: keys for t in (first.table, first.other)})
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
