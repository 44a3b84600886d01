"""Admission in whole jobs: the same keys get rows on any number of servers, and after a resume."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trireme as tr
from tests.jobs import Job
from tests.own_batches import OwnBatches
from trireme.job.cluster import Cluster
from trireme.policy import Admission, CountFilter, Probability, ScoreFilter, ScorePolicy, ShowClick
from trireme.train.checkpointing import load as loading
from trireme.train.checkpointing import save as saving
from trireme.train.checkpointing.checkpoint_location import Location
from trireme.train.checkpointing.save import SaveOptions

NUM_STEPS = 40
FILTERS: dict[str, Admission] = {
    "counts": CountFilter(6),
    "sketch": CountFilter(6, sketch_bytes=4096 * 64),
    "probability": Probability(0.05),
    "score": ScoreFilter(2.5),
}

# Bucket -> rows by key, and what is pending.
Content = dict[int, tuple[dict[int, bytes], bytes]]
# Steps to make, or what to do between them.
Act = range | Callable[[tr.DistributedOptimizer], Any]


def batches_of(stream: int) -> list[dict[str, torch.Tensor]]:
    """Keys that repeat within a batch, from step to step and across workers; some are rare."""
    rng = np.random.default_rng([5, stream])
    batches = []
    for _ in range(NUM_STEPS):
        size = int(rng.integers(1, 12))
        keys = rng.geometric(0.02, (size, 3)) * 7919
        shows = torch.from_numpy(rng.integers(0, 4, size).astype(np.float32))
        label = torch.from_numpy(rng.normal(size=size).astype(np.float32))
        batch = {"show": shows, "click": shows / 2, "label": label}
        batches.append({**batch, "a": torch.from_numpy(keys)})
    return batches


class Model(nn.Module):
    def __init__(self, admit: Admission | None) -> None:
        super().__init__()
        policy = ScorePolicy(show_click=ShowClick("show", "click"))
        table = tr.Table("t", dim=3, optimizer=tr.optim.Adagrad(lr=0.1), admit=admit, policy=policy)
        self.rows = tr.nn.EmbeddingBag(table, features=["a"])

    def forward(self, batch: Any) -> torch.Tensor:
        return self.rows(batch).sum(dim=(1, 2))


def train(cluster: Cluster, admit: Admission | None, script: list[Act]) -> None:
    """Make steps in sync, and whatever else the script says."""
    model = Model(admit)
    strategy = tr.Strategy("sync")
    optimizer = tr.DistributedOptimizer(None, model, strategy=strategy, cluster=cluster)
    for act in script:
        if isinstance(act, range):
            source = OwnBatches(batches_of(cluster.worker)[act.start : act.stop])
            for batch in tr.prefetch(source, model, cluster=cluster):
                nn.functional.mse_loss(model(batch), batch["label"]).backward()
                optimizer.step(examples=batch.num_examples)
        else:
            act(optimizer)
    cluster.client.coordinator.gather({}, [])


def save(path: Path, mode: str = "full") -> Act:
    return lambda optimizer: saving.save(optimizer, Location(path), options=SaveOptions(mode))


def load(path: Path) -> Act:
    return lambda optimizer: loading.load(optimizer, Location(path))


def content(job: Job) -> Content:
    actual: Content = {}
    for server in job.servers:
        state = server.state
        for bucket in state.assignment.owned_buckets().tolist():
            content = state.tables["t"].rows.snapshot(bucket)
            rows = zip(content.keys.tolist(), (row.tobytes() for row in content.rows), strict=True)
            actual[bucket] = dict(rows), content.pending.tobytes()
    assert len(actual) == 4096
    return actual


def run(num_servers: int, admit: Admission | None, script: list[Act]) -> Content:
    with Job(num_servers) as job:
        job.run(2, lambda cluster: train(cluster, admit, script))
        return content(job)


@pytest.mark.parametrize("name", FILTERS)
def test_any_number_of_servers_admits_the_same_keys(name: str) -> None:
    alone = run(1, FILTERS[name], [range(NUM_STEPS)])
    assert run(3, FILTERS[name], [range(NUM_STEPS)]) == alone
    everyone = run(1, None, [range(NUM_STEPS)])
    num_rows, num_keys = (
        sum(len(rows) for rows, _ in content.values()) for content in (alone, everyone)
    )
    assert 0 < num_rows < num_keys
    assert any(pending for _, pending in alone.values()) == isinstance(FILTERS[name], CountFilter)


def test_exact_counts_follow_from_the_data() -> None:
    occurred, pushes, updates = Counter[int](), Counter[int](), Counter[int]()
    for of_step in zip(batches_of(0), batches_of(1), strict=True):
        keys = [key for batch in of_step for key in batch["a"].flatten().tolist()]
        occurred.update(keys)
        for key in set(keys):
            pushes[key] += 1
            updates[key] += occurred[key] >= 6
    with Job(2) as job:
        job.run(2, lambda c: train(c, FILTERS["counts"], [range(NUM_STEPS)]))
        rows = {key for rows, _ in content(job).values() for key in rows}
        actual = Counter[str]()
        for server in job.servers:
            actual.update(server.state.tables["t"].rows.counters)
    assert rows == {key for key, count in occurred.items() if count >= 6}
    assert actual["admitted"] == len(rows)
    assert actual["rejected"] == sum(pushes.values()) - sum(updates.values())


@pytest.mark.parametrize("name", FILTERS)
def test_admission_resumes_from_a_checkpoint_and_from_a_delta(name: str, tmp_path: Path) -> None:
    full, delta = tmp_path / "full", tmp_path / "delta"
    whole = run(2, FILTERS[name], [range(NUM_STEPS)])
    run(3, FILTERS[name], [range(15), save(full), range(15, 25), save(delta, "delta")])
    resumed = run(1, FILTERS[name], [load(full), load(delta), range(25, NUM_STEPS)])
    for bucket, (rows, pending) in whole.items():
        assert (resumed[bucket][0].keys(), resumed[bucket][1]) == (rows.keys(), pending), bucket
