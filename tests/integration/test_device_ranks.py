"""Passes on devices of several workers train to the bits of sync without passes; CPUs stand in."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trireme as tr
from tests.integration.test_device_passes import RULES, assert_equal
from tests.jobs import Job
from tests.ranks import run_ranks
from trireme.job.cluster import Cluster
from trireme.server.state import ServerState

ROUNDS = 2
SHOWS = tr.policy.ShowClick("show", "label")
LENGTHS = (5, 0, 2)  # batches of the workers


class Net(nn.Module):
    def __init__(self, table: tr.Table) -> None:
        super().__init__()
        self.rows = tr.nn.EmbeddingBag(table, features=["a", "b"])
        self.top = nn.Linear(2 * table.dim, 1)
        with torch.no_grad():  # nothing is drawn: workers are threads here
            self.top.weight.copy_(torch.linspace(-0.3, 0.4, 2 * table.dim)[None])
            self.top.bias.fill_(0.1)

    def forward(self, batch: Any) -> torch.Tensor:
        return self.top(self.rows(batch).flatten(1)).squeeze(1)


class Data:
    """Each worker has batches of its own, of uneven sizes, the same in each epoch."""

    def __init__(self, seed: int, lengths: tuple[int, ...] = LENGTHS) -> None:
        self.seed, self.lengths = seed, lengths

    def stream(self, index: int, num_streams: int, *, epoch: int = 0) -> Any:
        assert num_streams == len(self.lengths)
        drawn = torch.Generator().manual_seed(10 * self.seed + index)
        for number in range(self.lengths[index]):
            size = 5 + (number + index) % 4
            a, b = (torch.randint(0, 60, (size, 3), generator=drawn) for _ in range(2))
            label = (a.sum(1) % 2).float()
            yield {"a": a, "b": b, "label": label, "show": torch.ones(size)}


def make_trainer(cluster: Cluster, rule: Any, mode: str, **options: Any) -> tr.Trainer:
    policy = options.pop("policy", None)
    model = Net(tr.Table("keys", dim=4, optimizer=rule, policy=policy))
    return tr.Trainer(
        model,
        torch.optim.Adam(model.parameters(), 0.01),
        strategy=tr.Strategy(mode),
        loss=nn.functional.binary_cross_entropy_with_logits,
        metrics=[tr.metrics.AUC()],
        progress=False,
        cluster=cluster,
        **options,
    )


def contents(states: list[ServerState]) -> dict[str, np.ndarray]:
    """Every byte of the rows, by key, and of the blocks, of all servers."""
    actual: dict[str, np.ndarray] = {}
    for state in states:
        for name, table in state.tables.items():
            for bucket in range(4096):
                content = table.rows.snapshot(bucket)
                for key, row in zip(content.keys, content.rows, strict=True):
                    actual[f"{name}:{key}"] = np.array(row)
        for spec in state.blocks.specs():
            for tensor, values in state.blocks.state_with(spec.id, {}).items():
                actual[f"{spec.id}:{tensor}"] = np.copy(values.numpy())
    return actual


Work = Callable[[Cluster], Any]


def on_servers(num_workers: int, work: Work) -> tuple[list[Any], dict[str, np.ndarray]]:
    with Job(2) as job:
        results = job.run(num_workers, work)
        return results, contents([server.state for server in job.servers])


def on_ranks(num_workers: int, work: Work) -> tuple[list[Any], dict[str, np.ndarray]]:
    states: dict[int, ServerState] = {}

    def with_state(cluster: Cluster) -> Any:
        assert cluster.host is not None
        states[cluster.worker] = cluster.host.state
        result = work(cluster)
        cluster.client.coordinator.gather({}, [])
        return result

    results = run_ranks(num_workers, with_state)
    return results, contents([states[worker] for worker in range(num_workers)])


def training(
    rule: Callable[[], Any],
    mode: str,
    *,
    in_passes: bool,
    lengths: tuple[int, ...] = LENGTHS,
    **options: Any,
) -> Work:
    def work(cluster: Cluster) -> Any:
        one = make_trainer(cluster, rule(), mode, **options)
        figures = []
        for number in range(ROUNDS):
            data = Data(number, lengths)
            with one.on_device(data) if in_passes else nullcontext():
                trained = one.fit(data, epochs=2)
                figures += [trained["loss"], trained["auc"], trained["examples"]]
                looked = one.evaluate(Data(7, lengths))
                figures += [looked["loss"], looked["auc"]]
        cluster.client.coordinator.gather({}, [])
        weights = {name: p.detach().numpy().copy() for name, p in one.model.named_parameters()}
        return figures, one.optimizer.num_steps, weights

    return work


def assert_same(actual: Any, expected: Any) -> None:
    for of_pass, of_sync in zip(actual[0], expected[0], strict=True):
        assert of_pass[0] == of_sync[0]
        assert_equal(of_pass[2], of_sync[2])
    assert_equal(actual[1], expected[1])


@pytest.mark.parametrize("rule", RULES)
def test_a_pass_of_three_workers_trains_to_the_bits_of_sync(rule: str) -> None:
    expected = on_servers(3, training(RULES[rule], "sync", in_passes=False))
    assert len(expected[1]) > 50
    assert_same(on_servers(3, training(RULES[rule], "sync", in_passes=True)), expected)
    assert_same(on_ranks(3, training(RULES[rule], "collective", in_passes=True)), expected)
