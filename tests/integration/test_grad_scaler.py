"""torch.amp.GradScaler: row gradients are unscaled and checked like those of parameters, and non-
finite ones are not pushed.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trireme as tr
from tests.integration.test_optimizers import Model, Plain, groups_of, make_model, set_gradients
from tests.jobs import Job
from tests.tables import T_ROWS
from trireme.job.cluster import Cluster

NUM_BATCHES = 20
KEYS = torch.arange(4).repeat(2)


def losses(model: nn.Module, number: int, *, breaks: str) -> torch.Tensor:
    """Of batch `number`; the gradients of some are infinite: of all, or of the rows alone."""
    generator = torch.Generator().manual_seed(number)
    batch: Any = {"key": KEYS, "label": torch.randn(8, generator=generator)}
    loss = nn.functional.mse_loss(model(batch), batch["label"])
    if breaks == "all" and number in (3, 8):
        return loss * math.inf
    if breaks == "rows" and number in (3, 8):
        rows = model.rows(batch) if isinstance(model, Model) else model.rows(KEYS)
        return loss + rows.sum() * 1e38
    return loss


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, breaks: str, unscales: bool
) -> tuple[np.ndarray, list[float]]:
    """The dense weights, and the scale after each batch."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
    scales = []
    for number in range(NUM_BATCHES):
        optimizer.zero_grad()
        scaler.scale(losses(model, number, breaks=breaks)).backward()
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return np.concatenate([p.detach().numpy().reshape(-1) for p in model.top.parameters()]), scales


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("breaks", ["none", "all", "rows"])
def test_a_scaled_loop_equals_torchs_own(
    breaks: str, unscales: bool, default_cluster: Cluster
) -> None:
    model = Model(tr.optim.SGD(lr=0.2))
    inner = torch.optim.SGD(groups_of(model), lr=0.1)
    actual, scales = train(
        model, tr.DistributedOptimizer(inner, model), breaks=breaks, unscales=unscales
    )
    rows = default_cluster.client.pull({T_ROWS: np.arange(4, dtype=np.uint64)}).rows[T_ROWS].numpy()
    plain = Plain()
    groups = [*groups_of(plain), {"params": plain.rows.parameters(), "lr": 0.2}]
    expected, expected_scales = train(
        plain, torch.optim.SGD(groups, lr=0.1), breaks=breaks, unscales=unscales
    )
    assert scales == expected_scales
    assert (min(scales) < 1024.0) == (breaks != "none")
    np.testing.assert_allclose(actual, expected, atol=1e-5, rtol=0)
    np.testing.assert_allclose(rows, plain.rows.weight.detach().numpy(), atol=1e-5, rtol=0)
    assert np.abs(rows - 0.2).max() > 100 * 1e-5


@pytest.mark.parametrize(
    "strategy",
    [
        tr.Strategy("sync"),
        tr.Strategy("bounded", staleness=2),
        tr.Strategy("geo", k=1),
        tr.Strategy("hybrid"),
    ],
    ids=lambda strategy: strategy.mode,
)
def test_a_step_that_is_skipped_is_a_push_that_changes_nothing(
    strategy: tr.Strategy, default_cluster: Cluster
) -> None:
    model = Model(tr.optim.Adagrad(lr=0.2))
    inner = torch.optim.Adam(model.top.parameters(), lr=0.1)
    optimizer = tr.DistributedOptimizer(inner, model, strategy=strategy)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def state() -> list[np.ndarray]:
        keys = {T_ROWS: np.arange(4, dtype=np.uint64)}
        rows = default_cluster.client.pull(keys).rows[T_ROWS].numpy()
        return [rows, *(p.detach().numpy().copy() for p in model.top.parameters())]

    states = [state()]
    for number in (2, 3, 4):
        scaler.scale(losses(model, number, breaks="rows")).backward()
        scaler.step(optimizer)
        scaler.update()
        states.append(state())
        assert optimizer.sequence == len(states) - 1
    changed = [
        any(not np.array_equal(a, b) for a, b in zip(one, two, strict=True))
        for one, two in itertools.pairwise(states)
    ]
    assert changed == [True, False, True]


@pytest.mark.parametrize("mode", ["sync", "hybrid"])
def test_a_worker_that_skips_a_step_leaves_it_to_the_others(mode: str) -> None:
    def work(cluster: Cluster) -> list[np.ndarray]:
        model = make_model()
        optimizer = tr.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            model,
            strategy=tr.Strategy(mode),
            cluster=cluster,
        )
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (3 + cluster.worker))
        scaler.scale(torch.zeros(1))  # which makes it ready
        for step in range(4):
            set_gradients(model, step)
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad *= scaler.get_scale()
                if cluster.worker == 1 and step == 2:
                    parameter.grad.view(-1)[0] = math.nan
            scaler.step(optimizer, examples=8)
            scaler.update()
        optimizer.end_pass()
        cluster.client.coordinator.gather({}, [])
        optimizer.refresh()
        return [p.detach().numpy().copy() for p in model.parameters()]

    with Job(2) as job:
        one, two = job.run(2, work)
    model = make_model()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):  # the workers' gradients are the same, so that their mean is, too
        set_gradients(model, step)
        plain.step()
    for first, second, expected in zip(one, two, model.parameters(), strict=True):
        np.testing.assert_array_equal(first, second)
        np.testing.assert_allclose(first, expected.detach().numpy(), atol=1e-6, rtol=0)
