"""A loop that keeps its iterator, and is left early."""

import sys

import torch
from torch import nn

import trireme as tr


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        table = tr.Table("ids", dim=4, optimizer=tr.optim.Adagrad(lr=0.2))
        self.ids = tr.nn.EmbeddingBag(table, features=["user"])

    def forward(self, batch):
        return self.ids(batch).sum((1, 2))


tr.init()
model = Model()
optimizer = tr.DistributedOptimizer(None, model)
data = [{"user": torch.arange(4)}] * 20
batches = tr.prefetch(data, model)
for batch in batches:
    model(batch).sum().backward()
    optimizer.step()
    if sys.argv[1] == "error":
        raise ValueError("a mistake")
    break
if sys.argv[1] == "next":
    try:
        next(tr.prefetch(data, model))
    except tr.errors.BadRequest as error:
        print(error)
    batches.close()
    for batch in tr.prefetch(data, model):
        model(batch).sum().backward()
        optimizer.step()
print("steps", optimizer.num_steps)
