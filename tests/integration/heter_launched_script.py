"""Script of every process of a heterogeneous job under `trireme launch`. Takes options as JSON.

Every process writes its id to `pid-WORKER` in the folder. At batch `gate` of the first worker its
data says so, and waits until somebody opens the pipe `go` there.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import trireme as tr
from trireme.data.batch import Batch

OPTIONS: dict[str, Any] = {
    "mode": "sync",
    "labels": [],
    "batches": 20,
    "gate": -1,
    "checkpoint": "",
    **json.loads(sys.argv[1]),
}
NUM_KEYS = 50


class Data:
    def stream(self, index: int, num_streams: int, *, epoch: int = 0) -> Iterator[Batch]:
        del num_streams
        random = torch.Generator().manual_seed(100 * epoch + index)
        for number in range(OPTIONS["batches"]):
            if number == OPTIONS["gate"] and index == 0 and epoch == 0:
                print("at the gate", flush=True)
                Path("go").read_text()
            key = torch.randint(0, NUM_KEYS, (16,), generator=random)
            yield Batch({"key": key, "label": (key % 2).float()})


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = tr.Table("t", dim=4, optimizer=tr.optim.Adagrad(lr=0.1))
        self.bag = tr.nn.EmbeddingBag(self.table, features=["key"])

    def forward(self, batch: Any) -> dict[str, Tensor]:
        return {"x": self.bag(batch).flatten(1)}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, values: Any) -> dict[str, Tensor]:
        return {"x": self.layer(values["x"]).relu()}


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, values: Any) -> Tensor:
        return self.layer(values["x"]).squeeze(1)


def make_model() -> tr.Stages | nn.Sequential:
    """Stages, if their labels are given."""
    if labels := OPTIONS["labels"]:
        made = [Rows(), *(Layer() for _ in labels[2:]), Head()]
        return tr.Stages(**dict(zip(labels, made, strict=True)))
    return nn.Sequential(Rows(), Layer(), Head())


def main() -> None:
    torch.manual_seed(0)
    cluster = tr.init()
    Path(f"pid-{cluster.worker}").write_text(str(os.getpid()))
    model = make_model()
    trainer = tr.Trainer(
        model,
        torch.optim.Adam(model.parameters(), lr=0.01),
        loss=nn.functional.binary_cross_entropy_with_logits,
        strategy=tr.Strategy(OPTIONS["mode"]),
        progress=False,
    )
    path = OPTIONS["checkpoint"]
    saving = {"checkpoints": tr.Checkpoints(path, every_steps=1000)} if path else {}
    figures = trainer.fit(Data(), **saving)
    [table] = [module.table for module in model.modules() if isinstance(module, Rows)]
    rows = cluster.client.pull({table.class_id: np.arange(NUM_KEYS, dtype=np.uint64)}).rows
    total = hashlib.sha256(rows[table.class_id].numpy().tobytes())
    for parameter in model.parameters():
        total.update(parameter.detach().numpy().tobytes())
    print("RESULT", figures["loss"], figures["examples"], total.hexdigest(), flush=True)


main()
