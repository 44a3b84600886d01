"""Row gradients of a backward that nobody pushes: a warning at the next forward, once per table."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import trireme as tr
from trireme.job.cluster import Cluster
from trireme.job.default import set_default
from trireme.job.embedded import embedded

NEEDED = "have gradients of the last backward that nobody has pushed"
BATCH = {"id": torch.arange(8), "label": torch.ones(8)}


class Model(nn.Module):
    def __init__(self, table: str = "ids") -> None:
        super().__init__()
        rows = tr.Table(table, dim=4, optimizer=tr.optim.SGD(lr=0.1))
        self.rows = tr.nn.EmbeddingBag(rows, features="id")
        self.head = nn.Linear(4, 1)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.head(self.rows(batch).flatten(1)).squeeze(1)


@pytest.fixture(autouse=True)
def cluster() -> Iterator[Cluster]:
    with embedded() as opened:
        set_default(opened)
        yield opened


def loss_of(model: nn.Module) -> torch.Tensor:
    return nn.functional.mse_loss(model(BATCH), BATCH["label"])


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.message for r in caplog.records if NEEDED in r.message]


def test_a_loop_with_torchs_own_optimizer_is_warned_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
    [warning] = warnings_in(caplog)
    assert "table 'ids'" in warning
    assert "tr.DistributedOptimizer(optimizer, model)" in warning


def test_a_step_of_the_optimizer_inside_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    inner = torch.optim.SGD(model.parameters(), 0.1)
    tr.DistributedOptimizer(inner, model)
    for _ in range(2):
        loss_of(model).backward()
        inner.step()
    assert len(warnings_in(caplog)) == 1


def test_a_loop_after_a_fit_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    inner = torch.optim.SGD(model.parameters(), 0.1)
    tr.Trainer(model, inner, loss=nn.functional.mse_loss, progress=False).fit([BATCH])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        loss_of(model).backward()
        optimizer.step()
    assert len(warnings_in(caplog)) == 1


def test_a_loop_over_a_new_model_after_a_fit_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    inner = torch.optim.SGD(model.parameters(), 0.1)
    tr.Trainer(model, inner, loss=nn.functional.mse_loss, progress=False).fit([BATCH])
    again = Model()
    optimizer = torch.optim.SGD(again.parameters(), 0.1)
    for _ in range(2):
        loss_of(again).backward()
        optimizer.step()
    assert len(warnings_in(caplog)) == 1


def test_each_table_that_the_optimizer_lacks_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model, other = Model(), Model("others")
    optimizer = tr.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model)
    for _ in range(2):
        (loss_of(model) + loss_of(other)).backward()
        optimizer.step()
        loss_of(other).backward()
    (loss_of(model) + loss_of(other)).backward()
    assert ["'others'" in text for text in warnings_in(caplog)] == [True]


def test_what_is_pushed_or_not_trained_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    optimizer = tr.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model)
    for _ in range(2):  # gradients of two batches in one step
        for _ in range(2):
            loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        loss_of(model)
    model.eval()
    loss_of(model).backward()
    model.train()
    torch.autograd.grad(loss_of(model), list(model.parameters()))
    loss_of(model).backward()
    other = nn.Linear(1, 1)
    other(torch.ones(1)).backward()
    torch.optim.SGD(other.parameters(), 0.1).step()  # between two backwards of one step
    loss_of(model).backward()
    optimizer.step()
    assert warnings_in(caplog) == []


def test_rows_within_a_frozen_module_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    models = nn.ModuleDict({"frozen": Model(), "detached": Model("other"), "trained": Model("own")})
    models["frozen"].requires_grad_(False)
    models["detached"].requires_grad_(False)
    parameters = models["trained"].parameters()
    optimizer = tr.DistributedOptimizer(torch.optim.SGD(parameters, 0.1), models)
    for _ in range(2):
        with torch.no_grad():
            loss_of(models["detached"])
        (loss_of(models["frozen"]) + loss_of(models["trained"])).backward()
        optimizer.step()
    warnings = [r.message for r in caplog.records if "all parameters are frozen" in r.message]
    assert len(warnings) == 1
    assert warnings[0].startswith("frozen: all parameters are frozen, and rows of table 'ids' are")
