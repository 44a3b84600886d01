"""What tests train models with: columns of bags, and a loop without a Trainer."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn

import trireme as tr
from trireme.data import Batch, Ragged


def ragged(*bags: list[int]) -> Ragged:
    values = torch.tensor(list(itertools.chain(*bags)), dtype=torch.int64)
    return Ragged(values, torch.tensor([0, *map(len, bags)]).cumsum(0))


def train(model: nn.Module, loss: Any, batches: list[Batch], *, epochs: int = 1) -> None:
    """Train with Adam, and leave the model ready to evaluate. loss: of outputs and a batch."""
    optimizer = tr.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01), model)
    for batch in tr.prefetch(batches * epochs, model):
        optimizer.zero_grad()
        loss(model(batch), batch).backward()
        optimizer.step()
    optimizer.flush()
    model.eval()
