"""What steps of several workers on devices consist of is what sync makes of them: all rules, bags,
row classes, shows and time, clipping, skipped steps, schedules, empty batches.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trireme as tr
from tests.integration import all_rules_model as all_rules
from tests.integration.test_device_ranks import assert_same, on_ranks, on_servers
from tests.own_batches import OwnBatches
from trireme.data import Batch
from trireme.errors import BadRequest
from trireme.job.cluster import Cluster
from trireme.policy import ScorePolicy, ShowClick


def make_tables(*, scored: bool) -> list[tr.Table]:
    zero = tr.initializer.Constant(0.0)
    tables = [
        tr.Table(name, dim=3, optimizer=rule, initializer=zero if name == "ftrl" else None)
        for name, rule in all_rules.OPTIMIZERS.items()
    ]
    dims = {"bag": 2, "id": 5}
    tables.append(tr.Table("two classes", dims=dims, salt=True, optimizer=tr.optim.Adagrad(lr=0.1)))
    if scored:
        policy = ScorePolicy(show_click=ShowClick("show", "label"))
        rules = (tr.optim.FleetAdagrad(lr=0.1), tr.optim.FleetAdam(lr=0.05))
        tables += [
            tr.Table(f"scored {type(rule).__name__}", dim=2, optimizer=rule, policy=policy)
            for rule in rules
        ]
    return tables


class Model(nn.Module):
    def __init__(self, *, scored: bool) -> None:
        super().__init__()
        self.rows = nn.ModuleList(
            tr.nn.EmbeddingBag(table, features=[feature], mode=mode)
            for table in make_tables(scored=scored)
            for feature, mode in (("bag", "sum"), ("id", "mean"))
        )
        width = 2 * 3 * len(all_rules.OPTIMIZERS) + 2 + 5 + (8 if scored else 0)
        self.top = nn.Sequential(nn.Linear(width, 6), nn.Tanh(), nn.Linear(6, 1))
        self.unused = nn.Linear(2, 2)  # without a gradient
        generator = torch.Generator().manual_seed(3)  # workers may be threads of one process
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.3, 0.3, generator=generator)

    def forward(self, batch: Any) -> torch.Tensor:
        x = torch.cat([rows(batch).flatten(1) for rows in self.rows], 1)
        return self.top(x).squeeze(1)


class Data:
    """Bags of 0 to 3 ids, batches of unequal sizes, one of them empty, streams of unequal
    lengths.
    """

    def stream(self, index: int, num_streams: int, *, epoch: int = 0) -> Any:
        for number, batch in enumerate(all_rules.Data().stream(index, 3, epoch=epoch)):
            yield batch
            if (index, number) == (2, 4):
                columns = {name: batch[name][:0] for name in ("id", "label", "show")}
                empty = tr.data.Ragged(batch["bag"].values[:0], torch.zeros(1, dtype=torch.int64))
                yield Batch({**columns, "bag": empty})


def loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean, 0 of an empty batch."""
    total = nn.functional.binary_cross_entropy_with_logits(outputs, labels, reduction="sum")
    return total / max(1, len(labels))


def at_times_infinite(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    is_first = len(labels) > 0 and bool(labels[0] > 0)
    return loss(outputs, labels) * (torch.inf if is_first else 1.0)


def training(
    mode: str,
    *,
    in_passes: bool,
    scored: bool = False,
    schedule: bool = False,
    **options: Any,
) -> Callable[[Cluster], Any]:
    def work(cluster: Cluster) -> Any:
        model = Model(scored=scored)
        one = tr.Trainer(
            model,
            torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1),
            strategy=tr.Strategy(mode),
            metrics=[tr.metrics.AUC()],
            progress=False,
            cluster=cluster,
            **{"loss": loss, **options},
        )

        def decay(*_: object) -> None:
            for group in one.optimizer.param_groups:
                group["lr"] *= 0.9

        if schedule:  # a worker without data does not follow it
            one.optimizer.register_step_post_hook(decay)
        figures, rates = [], [group["lr"] for group in one.optimizer.param_groups]
        for day in (100, 103):
            one.set_time(day * all_rules.DAY)
            with one.on_device(Data()) if in_passes else nullcontext():
                trained = one.fit(Data(), check_nan=False)
                figures.append([trained["auc"], trained["examples"]])
            for group, rate in zip(one.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
        cluster.client.coordinator.gather({}, [])
        one.optimizer.refresh()
        weights = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
        return figures, one.optimizer.num_steps, weights

    return work


CASES: dict[str, dict[str, Any]] = {
    "scored": {"scored": True},
    "norm": {"clip_norm": 0.05},
    "value": {"clip_value": 0.002},
    "skipped": {"skip_not_finite": True, "loss": at_times_infinite},
    "schedule": {"schedule": True},
}


@pytest.fixture(scope="module")
def usual() -> dict[str, np.ndarray]:
    """What a job without any of the cases ends with."""
    return on_servers(3, training("sync", in_passes=False))[1]


@pytest.mark.parametrize("name", CASES)
def test_a_step_of_workers_on_devices_is_that_of_sync(
    name: str, usual: dict[str, np.ndarray]
) -> None:
    expected = on_servers(3, training("sync", in_passes=False, **CASES[name]))
    actual = on_ranks(3, training("collective", in_passes=True, **CASES[name]))
    assert_same(actual, expected)
    assert {steps for _, steps, _ in actual[0]} == {8 * 2}  # of the longest stream
    if name != "scored":  # it does something
        assert any((usual[key] != values).any() for key, values in expected[1].items())


def accumulating(mode: str, *, in_passes: bool) -> Callable[[Cluster], Any]:
    """A loop of its own, which makes a step of two batches."""

    def work(cluster: Cluster) -> Any:
        model = Model(scored=True)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        one = tr.Trainer(
            model, optimizer, strategy=tr.Strategy(mode), loss=loss, progress=False, cluster=cluster
        )
        batches = list(all_rules.Data().stream((0, 2)[cluster.worker], 3))[:4]
        with one.on_device(OwnBatches(batches)) if in_passes else nullcontext():
            for number, batch in enumerate(
                tr.prefetch(OwnBatches(batches), model, cluster=cluster)
            ):
                loss(model(batch), batch["label"]).backward()
                if number % 2:
                    one.optimizer.step()
        cluster.client.coordinator.gather({}, [])
        one.optimizer.refresh()
        weights = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
        return [], one.optimizer.num_steps, weights

    return work


def test_gradients_of_several_batches_make_one_step() -> None:
    expected = on_servers(2, accumulating("sync", in_passes=False))
    actual = on_ranks(2, accumulating("collective", in_passes=True))
    assert_same(actual, expected)
    assert {steps for _, steps, _ in actual[0]} == {2}


def test_rates_that_differ_are_an_error_of_all() -> None:
    def work(cluster: Cluster) -> None:
        model = Model(scored=False)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02 + 0.01 * cluster.worker)
        one = tr.Trainer(
            model, optimizer, strategy=tr.Strategy("sync"), loss=loss, progress=False,
            cluster=cluster,
        )  # fmt: skip
        one.begin_pass(all_rules.Data())
        with pytest.raises(BadRequest, match=r"groups: worker 0 has .*0\.02.* schedulers must"):
            one.fit(all_rules.Data())
        one.abandon_pass()

    on_servers(3, work)
