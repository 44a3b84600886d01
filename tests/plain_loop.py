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


def train(
    model: nn.Module,
    loss: Any,
    batches: list[Batch],
    *,
    epochs: int = 1,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Train, and leave the model ready to evaluate. loss: of outputs and a batch. optimizer: None:
    Adam, if there are parameters.
    """
    parameters = list(model.parameters())
    if optimizer is None and parameters:
        optimizer = torch.optim.Adam(parameters, lr=0.01)
    distributed = tr.DistributedOptimizer(optimizer, model)
    for batch in tr.prefetch(batches * epochs, model):
        distributed.zero_grad()
        loss(model(batch), batch).backward()
        distributed.step()
    distributed.flush()
    model.eval()
