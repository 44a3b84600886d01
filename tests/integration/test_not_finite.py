"""A finite loss whose gradients are not: nothing of the step is applied, and training goes on."""

from __future__ import annotations

import logging
import math
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trireme as tr
from tests.jobs import Job
from tests.tables import T_ROWS
from trireme.errors import BadRequest, NotFinite
from trireme.job.cluster import Cluster
from trireme.job.embedded import embedded

STRATEGIES = {
    "sync": tr.Strategy("sync"),
    "async": tr.Strategy("async"),
    "bounded": tr.Strategy("bounded", staleness=2),
    "geo": tr.Strategy("geo", k=1),
    "hybrid": tr.Strategy("hybrid"),
}
KEYS = torch.arange(12).reshape(4, 3)


class Model(nn.Module):
    """breaks: what gets a gradient that is not finite, though the loss is: rows or dense."""

    def __init__(self) -> None:
        super().__init__()
        table = tr.Table("t", dim=4, optimizer=tr.optim.SGD(lr=0.1))
        self.rows = tr.nn.EmbeddingBag(table, features=["key"])
        self.top = nn.Linear(4, 1)
        self.breaks, self.value = "", math.nan

    def forward(self, batch: tr.Batch) -> torch.Tensor:
        rows = self.rows(batch).flatten(1)
        if self.breaks == "rows":
            rows = self._broken(rows)
        weight = self._broken(self.top.weight) if self.breaks == "dense" else self.top.weight
        return (rows @ weight.T + self.top.bias).squeeze(1)

    def _broken(self, values: torch.Tensor) -> torch.Tensor:
        copy = values * 1
        copy.register_hook(lambda gradient: torch.full_like(gradient, self.value))
        return copy


def batch(number: int) -> dict[str, torch.Tensor]:
    return {"key": KEYS + number, "label": torch.ones(4)}


def optimizer_of(
    model: Model, mode: str, cluster: Cluster, skips: bool = False, **clip: float
) -> tr.DistributedOptimizer:
    return tr.DistributedOptimizer(
        torch.optim.SGD(model.top.parameters(), lr=0.1),
        model,
        strategy=STRATEGIES[mode],
        skip_not_finite=skips,
        cluster=cluster,
        **clip,
    )


def train(model: Model, optimizer: tr.DistributedOptimizer, number: int, breaks: str = "") -> None:
    model.breaks = breaks
    step(model, optimizer, batch(number))


def step(model: Model, optimizer: tr.DistributedOptimizer, batch: Any) -> None:
    nn.functional.mse_loss(model(batch), batch["label"]).backward()
    optimizer.step(examples=4)


def weights(model: Model, cluster: Cluster) -> list[np.ndarray]:
    rows = cluster.client.pull({T_ROWS: np.arange(20, dtype=np.uint64)}).rows[T_ROWS].numpy()
    return [rows.copy(), *(p.detach().numpy().copy() for p in model.top.parameters())]


def equal(one: list[np.ndarray], two: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("mode", STRATEGIES)
def test_a_sparse_gradient_of_a_parameter_is_refused_and_training_goes_on(
    default_cluster: Cluster, mode: str
) -> None:
    model = Model()
    model.top.register_parameter("ids", nn.Parameter(torch.ones(5, 1)))
    optimizer = optimizer_of(model, mode, default_cluster)
    before = weights(model, default_cluster)
    bag = nn.functional.embedding(torch.tensor([3]), model.top.get_parameter("ids"), sparse=True)
    (nn.functional.mse_loss(model(batch(0)), torch.ones(4)) + bag.sum()).backward()
    with pytest.raises(BadRequest, match=r"parameter top.ids, found a sparse one: .*sparse=False"):
        optimizer.step(examples=4)
    assert equal(before, weights(model, default_cluster))
    train(model, optimizer, 1)


@pytest.mark.parametrize("clip", [{}, {"clip_norm": 1.0}, {"clip_value": 1.0}], ids=str)
@pytest.mark.parametrize("breaks", ["rows", "dense"])
@pytest.mark.parametrize("mode", STRATEGIES)
def test_nothing_of_a_step_that_is_not_finite_is_applied(
    default_cluster: Cluster, mode: str, breaks: str, clip: dict[str, float]
) -> None:
    if mode == "hybrid" and "clip_norm" in clip:
        return  # refused
    model = Model()
    optimizer = optimizer_of(model, mode, default_cluster, **clip)
    train(model, optimizer, 0)
    optimizer.refresh()
    before = weights(model, default_cluster)
    where = r"key \d+ of table 't'" if breaks == "rows" else r"parameter top.weight at \[0, 0\]"
    for model.value in (math.nan, math.inf):
        expected = f"expected finite gradients in step 2, found {model.value} for {where}"
        with pytest.raises(NotFinite, match=expected):
            train(model, optimizer, 1, breaks)
        optimizer.refresh()
        assert equal(before, weights(model, default_cluster))
        assert all(p.grad is None for p in model.top.parameters())
    assert optimizer.num_steps == 1
    train(model, optimizer, 1)
    optimizer.end_pass()
    after = weights(model, default_cluster)
    assert not equal(before, after)
    assert all(np.isfinite(values).all() for values in after)


@pytest.mark.parametrize("mode", STRATEGIES)
def test_such_steps_can_be_skipped(
    default_cluster: Cluster, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model()
    optimizer = optimizer_of(model, mode, default_cluster, skips=True)
    for number, breaks in enumerate(["", "rows", "dense", ""]):
        optimizer.refresh()
        before = weights(model, default_cluster)
        with caplog.at_level(logging.WARNING, "trireme.train"):
            train(model, optimizer, number, breaks)
        optimizer.refresh()
        assert equal(before, weights(model, default_cluster)) == bool(breaks)
    optimizer.end_pass()
    assert optimizer.num_steps == 4
    assert default_cluster.metrics.num_skipped == caplog.text.count("; skipped") == 2


@pytest.mark.parametrize("mode", STRATEGIES)
def test_other_workers_go_on(mode: str) -> None:
    """They do not wait for a worker that skips its step; all end with the same weights."""

    def work(cluster: Cluster) -> list[np.ndarray]:
        model = Model()
        optimizer = optimizer_of(model, mode, cluster, skips=True)
        batches = tr.prefetch([batch(n) for n in range(8)], model, cluster=cluster)
        for number, ready in enumerate(batches):
            model.breaks = "rows" if number == 2 and cluster.worker == 1 else ""
            step(model, optimizer, ready)
        cluster.client.coordinator.gather({}, [])
        optimizer.refresh()
        return weights(model, cluster)

    with Job(2) as job:
        one, two = job.run(2, work)
    assert equal(one, two)
    assert all(np.isfinite(values).all() for values in one)


def test_a_sum_of_the_workers_that_is_not_finite_is_a_step_of_none() -> None:
    """In hybrid: each worker's gradients are finite, and their sum is not."""

    def work(cluster: Cluster) -> None:
        model = Model()
        optimizer = optimizer_of(model, "hybrid", cluster)
        for number, ready in enumerate(
            tr.prefetch([batch(n) for n in range(6)], model, cluster=cluster)
        ):
            before = weights(model, cluster)[1:]
            model.breaks, model.value = "dense" if number == 1 else "", 1e38
            expected = "sums of the workers' gradients, found inf for"
            with pytest.raises(NotFinite, match=expected) if number == 1 else nullcontext():
                step(model, optimizer, ready)
            assert equal(before, weights(model, cluster)[1:]) == (number == 1)

    with Job(1) as job:
        job.run(2, work)


def test_differences_that_are_not_finite_are_not_exchanged(default_cluster: Cluster) -> None:
    """In geo a rate that is too large makes them of finite gradients."""
    model = Model()
    optimizer = optimizer_of(model, "geo", default_cluster)
    train(model, optimizer, 0)
    before = weights(model, default_cluster)
    optimizer.param_groups[0]["lr"] = 3e38
    model.value = 10.0
    with pytest.raises(NotFinite, match="expected finite differences of 1 steps, found"):
        train(model, optimizer, 1, "dense")
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.refresh()
    for one, two in zip(before, weights(model, default_cluster), strict=True):
        # Servers add the difference of the first step to its weights, which rounds.
        np.testing.assert_allclose(one, two, rtol=1e-6)
    train(model, optimizer, 1)
    optimizer.end_pass()
    assert all(np.isfinite(values).all() for values in weights(model, default_cluster))


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("breaks", ["rows", "dense"])
def test_a_server_refuses_a_push_that_is_not_finite(
    monkeypatch: pytest.MonkeyPatch, mode: str, breaks: str
) -> None:
    """Of a client that does not check. Nothing of it is recorded, staged or applied there."""
    monkeypatch.setattr("trireme.train.optimizer.check_finite_step", lambda *_: None)

    def work(cluster: Cluster) -> None:
        model = Model()
        optimizer = optimizer_of(model, mode, cluster)
        where = r"key \d+ of table 't'" if breaks == "rows" else "element 0 of parameter top.weight"
        batches = tr.prefetch([batch(0), batch(1)], model, cluster=cluster)
        push(model, optimizer, next(batches))
        model.breaks, ready = breaks, next(batches)
        before = weights(model, cluster)[0]
        with pytest.raises(BadRequest, match=f"expected finite gradients, found nan for {where}"):
            push(model, optimizer, ready)
        assert np.array_equal(before, weights(model, cluster)[0])

    def push(model: Model, optimizer: tr.DistributedOptimizer, ready: Any) -> None:
        step(model, optimizer, ready)
        optimizer.flush()

    with Job(1) as job:
        cluster = job.join(0, 1)
        work(cluster)
        with suppress(BadRequest):  # of the push, once more
            cluster.close()


def test_a_step_that_fails_leaves_no_gradients(default_cluster: Cluster) -> None:
    """The values of a table's param group are wrong: the next step would have both batches."""
    model = Model()
    optimizer = optimizer_of(model, "async", default_cluster)
    optimizer.param_groups[-1]["lr"] = None
    with pytest.raises(Exception, match="None"):
        train(model, optimizer, 0)
    assert all(p.grad is None for p in model.top.parameters())
    assert optimizer.num_steps == 0
    optimizer.param_groups[-1]["lr"] = 0.1
    train(model, optimizer, 1)
    optimizer.flush()
    assert optimizer.num_steps == 1


@pytest.mark.parametrize("mode", ["sync", "async", "geo", "hybrid"])
@pytest.mark.parametrize("wrong", [math.nan, math.inf, 1e39, None])
@pytest.mark.parametrize("group", [0, 1], ids=["dense", "table"])
def test_a_rate_that_is_no_finite_number_is_refused_before_the_push(
    mode: str, wrong: float | None, group: int
) -> None:
    """The server would refuse it, but the push would have its number, and no other could follow.
    Where the worker trains the dense weights, they would become NaN.
    """
    with embedded(threads=1) as cluster:
        torch.manual_seed(0)
        model = Model()
        optimizer = optimizer_of(model, mode, cluster)
        before = optimizer.param_groups[group]["lr"]

        def step() -> float:
            loss = nn.functional.mse_loss(model(batch(0)), torch.ones(4))
            loss.backward()
            optimizer.step()
            return loss.item()

        first = step()
        optimizer.param_groups[group]["lr"] = wrong
        with pytest.raises((BadRequest, TypeError), match=r"finite .*lr=|lr: .*finite|None"):
            step()
        optimizer.param_groups[group]["lr"] = before
        step()
        assert step() < first
