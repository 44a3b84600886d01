"""Trains a small model on batches in memory, for `trireme place`: BEFORE MODE."""

import sys

import torch
from torch import nn

import trireme as tr

KNOBS = {"bounded": {"staleness": 1}, "geo": {"k": 2}}
before, mode = sys.argv[1:]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        table = tr.Table("rows", dim=4, optimizer=tr.optim.Adagrad(lr=0.1))
        self.bag = tr.nn.EmbeddingBag(table, features=["a", "b"])
        self.top = nn.Sequential(nn.Linear(2 * 4, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, batch: tr.data.Batch) -> torch.Tensor:
        return self.top(self.bag(batch).flatten(1)).squeeze(1)


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = Model().bag

    def forward(self, batch: tr.data.Batch) -> dict[str, torch.Tensor]:
        return {"bags": self.bag(batch).flatten(1), "dense": batch["dense"]}


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.top = nn.Linear(2 * 4 + 3, 1)

    def forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.top(torch.cat([inputs["bags"], inputs["dense"]], 1)).squeeze(1)


tr.init()
ids = torch.arange(64)
batch = {"a": ids, "b": ids % 8, "dense": torch.ones(64, 3), "label": (ids % 2).float()}
model = tr.Stages(cpu=Wide(), gpu=Tower()) if before == "stages" else Model()
trainer = tr.Trainer(
    model,
    torch.optim.Adam(model.parameters()),
    loss=nn.functional.binary_cross_entropy_with_logits,
    strategy=tr.Strategy(mode, **KNOBS.get(mode, {})),
    progress=False,
)
if before == "fail":
    raise RuntimeError("no data today")
if before == "evaluate":
    trainer.evaluate(dataset=[batch])
if before == "infer":
    trainer.evaluate([batch], labels=False)
    print("inferred", torch.get_num_threads())
if before != "end":
    trainer.fit([batch] * (0 if before == "empty" else 3), epochs=2)
    print("trained")
