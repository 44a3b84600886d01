"""Reading changes nothing: servers hold the same bits before and after read-only requests."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trireme as tr
from tests.jobs import InProcessServer, Job, in_threads
from trireme.job.cluster import Cluster
from trireme.job.default import set_default

NUM_BUCKETS = 4096
SEEN, UNSEEN = 1000, 10**12


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        adam = tr.optim.Adam(lr=0.05, bias_correction="row")
        self.bags = tr.nn.EmbeddingBag(tr.Table("bags", dim=3, optimizer=adam), features=["a", "b"])
        self.rows = tr.nn.Embedding(tr.Table("rows", dim=2), features="a")
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 1)

    def forward(self, batch: Any) -> torch.Tensor:
        x = torch.cat([self.bags(batch).flatten(1), self.rows(batch)], 1)
        return self.head(self.norm(x)).squeeze(1)


def batches(count: int, seed: int, first_key: int = 0) -> list[dict[str, torch.Tensor]]:
    draw = np.random.default_rng(seed)
    return [
        {name: torch.from_numpy(draw.integers(0, SEEN, 64) + first_key) for name in ("a", "b")}
        | {"label": torch.from_numpy(draw.integers(0, 2, 64).astype(np.float32))}
        for _ in range(count)
    ]


def make_trainer(cluster: Cluster, mode: str) -> tr.Trainer:
    torch.manual_seed(0)
    model = Model()
    return tr.Trainer(
        model,
        torch.optim.Adam(model.parameters(), lr=0.01),
        strategy=tr.Strategy(mode),
        loss=nn.functional.binary_cross_entropy_with_logits,
        metrics=[tr.metrics.AUC()],
        progress=False,
        cluster=cluster,
    )


def digest(server: InProcessServer) -> str:
    """A hash of all rows and blocks with their optimizer state and marks, and of all streams."""
    state, actual = server.state, hashlib.sha256()
    for name in sorted(state.tables):
        for bucket in range(NUM_BUCKETS):
            content = state.tables[name].rows.snapshot(bucket)
            for array in (content.keys, content.classes, content.rows):
                actual.update(array.tobytes())
            actual.update(repr(sorted(content.marks.items())).encode())
    for spec in state.blocks.specs():
        actual.update(state.blocks.read([spec.id]).tobytes())
        for name, tensor in sorted(state.blocks.state_of(spec.id).items()):
            actual.update(name.encode() + tensor.numpy().tobytes())
    actual.update(
        repr([(i, s.last, s.position) for i, s in sorted(state.streams.items())]).encode()
    )
    return actual.hexdigest()


class Trained:
    """Two servers and two workers that have trained a little, and stay."""

    def __init__(self, job: Job, mode: str) -> None:
        self.job = job
        self.clusters = [job.join(worker, 2) for worker in range(2)]
        self.trainers = self.run(lambda cluster: make_trainer(cluster, mode), self.clusters)
        self.run(lambda trainer: trainer.fit(batches(20, seed=1)))
        # In async a worker may end its pass before the other's last pushes.
        self.run(lambda trainer: trainer.optimizer.refresh())

    def run(self, call: Callable[[Any], Any], subjects: list[Any] | None = None) -> list[Any]:
        subjects = self.trainers if subjects is None else subjects
        return in_threads([lambda subject=subject: call(subject) for subject in subjects])

    def state(self) -> list[str]:
        """Of the servers, then of the workers' models, buffers included."""
        models = [
            repr([(n, t.tolist()) for n, t in trainer.model.state_dict().items()])
            for trainer in self.trainers
        ]
        return [digest(server) for server in self.job.servers] + models

    def num_rows(self) -> int:
        stats = self.clusters[0].client.stats()
        return sum(table["rows"] for server in stats for table in server["tables"].values())


@pytest.fixture
def trained(mode: str) -> Iterator[Trained]:
    with Job(2) as job:
        trained = Trained(job, mode)
        yield trained
        in_threads([cluster.close for cluster in trained.clusters])


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_evaluation_leaves_rows_weights_marks_and_models_as_they_are(trained: Trained) -> None:
    before, num_rows = trained.state(), trained.num_rows()
    assert 0 < num_rows <= 2 * SEEN
    for data in (batches(10, seed=2), batches(10, seed=3, first_key=UNSEEN)):
        first, second = trained.run(lambda trainer, data=data: trainer.evaluate(data))
        again, _ = trained.run(lambda trainer, data=data: trainer.evaluate(data))
        assert first["auc"] == second["auc"] == again["auc"]
        assert first["loss"] == second["loss"] == again["loss"]
    assert trained.num_rows() == num_rows
    assert trained.state() == before
    trained.run(lambda trainer: trainer.fit(batches(2, seed=4)))
    assert not set(trained.state()) & set(before), "training does change all of them"


@pytest.mark.parametrize("mode", ["async"])  # sync would wait for the other worker
def test_a_forward_pass_without_a_step_leaves_the_servers_as_they_are(trained: Trained) -> None:
    """Of a training model too, whose lookups are remembered for a step that never comes."""
    before = [digest(server) for server in trained.job.servers]
    trainer = trained.trainers[0]
    set_default(trainer.cluster)
    trainer.model.train()
    loss = trainer.model(batches(1, seed=5, first_key=UNSEEN)[0]).sum()
    loss.backward()
    trainer.model.eval()
    with torch.no_grad():
        trainer.model(batches(1, seed=6, first_key=2 * UNSEEN)[0])
    assert [digest(server) for server in trained.job.servers] == before
