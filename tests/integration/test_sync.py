"""Sync training is exact: the same bits on any number of servers, and several workers equal plain
torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trireme as tr
from tests.jobs import Job
from tests.long import pick
from tests.own_batches import OwnBatches
from tests.tables import T_ROWS
from trireme import _core
from trireme.job.cluster import Cluster
from trireme.job.embedded import embedded
from trireme.rows.core_table import make_core_table

FEATURES = ["a", "b", "c"]
DIM = 4
NUM_KEYS = 60
# Unequal batch sizes and lengths: gradients must be weighted, and the shorter stream must leave.
BATCH_SIZES = (8, 5)
LENGTHS = pick(short=(60, 45), long=(200, 150))
ATOL = 1e-5

Weights = dict[str, np.ndarray]


@dataclass(frozen=True)
class Rule:
    """An update rule of tables and the same in torch, for rows and for dense parameters."""

    table: tr.optim.Rule
    dense: type[torch.optim.Optimizer]
    sparse: type[torch.optim.Optimizer]
    options: dict[str, float]


RULES = {
    "sgd": Rule(tr.optim.SGD(lr=0.1), torch.optim.SGD, torch.optim.SGD, {"lr": 0.1}),
    "adagrad": Rule(
        tr.optim.Adagrad(lr=0.05, initial_accumulator_value=0.1),
        torch.optim.Adagrad,
        torch.optim.Adagrad,
        {"lr": 0.05, "initial_accumulator_value": 0.1},
    ),
    "adam": Rule(tr.optim.Adam(lr=0.01), torch.optim.Adam, torch.optim.SparseAdam, {"lr": 0.01}),
}


def stream_batches(stream: int) -> list[dict[str, torch.Tensor]]:
    """Keys from a small space, so that every batch repeats keys within and across workers."""
    generator = np.random.default_rng([7, stream])
    batches = []
    for _ in range(LENGTHS[stream]):
        size = BATCH_SIZES[stream]
        batch = {f: torch.from_numpy(generator.integers(0, NUM_KEYS, size)) for f in FEATURES}
        batch["dense"] = torch.from_numpy(generator.normal(size=(size, 3)).astype(np.float32))
        batch["label"] = torch.from_numpy(generator.normal(size=size).astype(np.float32))
        batches.append(batch)
    return batches


class Model(nn.Module):
    def __init__(self, rule: Rule) -> None:
        super().__init__()
        self.table = tr.Table("t", dim=DIM, optimizer=rule.table, seed=3)
        self.rows = tr.nn.EmbeddingBag(self.table, features=FEATURES)
        self.mlp = nn.Sequential(nn.Linear(3 * DIM + 3, 16), nn.Tanh(), nn.Linear(16, 1))
        generator = torch.Generator().manual_seed(0)
        for parameter in self.mlp.parameters():
            nn.init.uniform_(parameter, -0.3, 0.3, generator=generator)

    def forward(self, batch: Any) -> torch.Tensor:
        x = torch.cat([self.rows(batch).flatten(1), batch["dense"]], 1)
        return self.mlp(x).squeeze(1)

    def dense_weights(self) -> Weights:
        return {name: p.detach().numpy().copy() for name, p in self.mlp.named_parameters()}


def train(
    cluster: Cluster,
    rule: Rule,
    streams: list[int],
    num_passes: int = 1,
    strategy: tr.Strategy | None = None,
) -> Weights:
    """Train on these streams' batches, one stream after the other, and return all weights."""
    model = Model(rule)
    dense = rule.dense(model.parameters(), **rule.options)
    strategy = strategy or tr.Strategy("sync")
    optimizer = tr.DistributedOptimizer(dense, model, strategy=strategy, cluster=cluster)
    source = OwnBatches([batch for stream in streams for batch in stream_batches(stream)])
    for _ in range(num_passes):
        for batch in tr.prefetch(source, model, cluster=cluster):
            nn.functional.mse_loss(model(batch), batch["label"]).backward()
            optimizer.step(examples=batch.num_examples)
    cluster.client.coordinator.gather({}, [])
    optimizer.refresh()
    keys = keys_in_bucket_order()
    rows = cluster.client.pull({T_ROWS: keys}).rows[T_ROWS].numpy()
    return {"rows": rows[np.argsort(keys)], **model.dense_weights()}


def keys_in_bucket_order() -> np.ndarray:
    keys = np.arange(NUM_KEYS, dtype=np.uint64)
    buckets = np.empty(NUM_KEYS, dtype=np.uint16)
    _core.buckets(keys, buckets)
    return keys[np.argsort(buckets, kind="stable")]


def initial_rows(table: tr.Table) -> np.ndarray:
    """(NUM_KEYS, DIM) weights of keys without a row."""
    initial = np.empty((NUM_KEYS, DIM), dtype=np.float32)
    keys = np.arange(NUM_KEYS, dtype=np.uint64)
    make_core_table(table.schema).lookup(keys, initial, _core.Pool(1))
    return initial


def plain_torch(
    rule: Rule, num_passes: int = 1, streams: Sequence[int] = (0, 1)
) -> tuple[Weights, Weights]:
    """The same training without Trireme, on the union of the streams' batches: weights before and
    after.
    """
    model = Model(rule)
    initial = initial_rows(model.table)
    rows = nn.Embedding.from_pretrained(torch.tensor(initial), freeze=False, sparse=True)
    dense = rule.dense(model.mlp.parameters(), **rule.options)
    sparse = rule.sparse(rows.parameters(), **rule.options)
    before = {"rows": initial, **model.dense_weights()}
    union = [stream_batches(stream) for stream in streams]
    for step in list(range(max(LENGTHS))) * num_passes:
        parts = [batches[step] for batches in union if step < len(batches)]
        batch = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        ids = torch.stack([batch[f] for f in FEATURES], 1)
        x = torch.cat([rows(ids).flatten(1), batch["dense"]], 1)
        dense.zero_grad()
        sparse.zero_grad()
        nn.functional.mse_loss(model.mlp(x).squeeze(1), batch["label"]).backward()
        dense.step()
        with torch.sparse.check_sparse_tensor_invariants(enable=True):
            sparse.step()
    return before, {"rows": rows.weight.detach().numpy(), **model.dense_weights()}


def assert_same_bits(results: list[Weights]) -> None:
    for result in results[1:]:
        for name, values in results[0].items():
            np.testing.assert_array_equal(result[name], values, err_msg=name)


@pytest.mark.parametrize("name", RULES)
def test_two_workers_equal_plain_torch_and_one_another_on_1_2_and_3_servers(name: str) -> None:
    rule = RULES[name]
    results = []
    for num_servers in (1, 2, 3):
        with Job(num_servers) as job:
            results += job.run(2, lambda cluster: train(cluster, rule, [cluster.worker]))
    assert_same_bits(results)
    before, after = plain_torch(rule)
    for part, values in after.items():
        np.testing.assert_allclose(results[0][part], values, atol=ATOL, rtol=0, err_msg=part)
        assert np.abs(values - before[part]).max() >= 100 * ATOL


@pytest.mark.parametrize("name", RULES)
def test_one_worker_gives_the_same_bits_in_sync_and_async_embedded_and_on_1_and_3_servers(
    name: str,
) -> None:
    rule, results = RULES[name], []
    for strategy in (tr.Strategy("sync"), tr.Strategy("async")):
        with embedded(threads=1) as cluster:
            results.append(train(cluster, rule, [0, 1], strategy=strategy))
        for num_servers in (1, 3):
            with Job(num_servers) as job:
                results += job.run(1, lambda c, s=strategy: train(c, rule, [0, 1], strategy=s))
    assert_same_bits(results)


def test_a_second_pass_counts_its_steps_on_from_the_longest_stream_of_the_first() -> None:
    rule = RULES["adam"]  # whose rate depends on the step
    with Job(2) as job:
        results = job.run(2, lambda cluster: train(cluster, rule, [cluster.worker], 2))
    assert_same_bits(results)
    _, after = plain_torch(rule, 2)
    for part, values in after.items():
        np.testing.assert_allclose(results[0][part], values, atol=2 * ATOL, rtol=0, err_msg=part)
