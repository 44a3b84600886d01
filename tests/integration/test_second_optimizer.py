"""An optimizer that follows another one on the same cluster begins where that one stopped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import trireme as tr
from trireme.job.default import set_default
from trireme.job.embedded import embedded

MODES = {
    "sync": tr.Strategy("sync"),
    "bounded": tr.Strategy("bounded", staleness=2),
    "async": tr.Strategy("async"),
    "geo": tr.Strategy("geo", k=3),
    "hybrid": tr.Strategy("hybrid"),
}
BATCH = {"ids": torch.tensor([1, 2]), "label": torch.tensor([1.0, 3.0])}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        table = tr.Table("t", dim=2, optimizer=tr.optim.SGD(lr=0.1))
        self.rows = tr.nn.EmbeddingBag(table, features=["ids"])
        self.top = nn.Linear(2, 1)

    def forward(self, batch: Any) -> torch.Tensor:
        return self.top(self.rows(batch).flatten(1)).squeeze(1)


@contextmanager
def new_model(mode: str) -> Iterator[tuple[Model, tr.DistributedOptimizer]]:
    """The same at each call, in a job of its own."""
    with embedded(threads=1) as cluster:
        set_default(cluster)
        torch.manual_seed(0)
        model = Model()
        yield model, make_optimizer(model, mode)


def make_optimizer(model: Model, mode: str) -> tr.DistributedOptimizer:
    dense = torch.optim.SGD(model.top.parameters(), lr=0.1, momentum=0.9)
    return tr.DistributedOptimizer(dense, model, strategy=MODES[mode])


def step(model: Model, optimizer: tr.DistributedOptimizer, batch: Any) -> float:
    model.zero_grad()
    loss = nn.functional.mse_loss(model(batch), batch["label"])
    loss.backward()
    optimizer.step()
    return float(loss.detach())


@pytest.mark.parametrize("mode", MODES)
def test_a_second_optimizer_continues_with_weights_and_state(mode: str) -> None:
    with new_model(mode) as (model, optimizer):
        expected = [step(model, optimizer, BATCH) for _ in range(6)]
    with new_model(mode) as (model, optimizer):
        losses = [step(model, optimizer, BATCH) for _ in range(3)]
        optimizer = make_optimizer(model, mode)
        losses += [step(model, optimizer, BATCH) for _ in range(3)]
    assert losses == pytest.approx(expected, abs=1e-6)
