"""A checkpoint of two servers loads on 1, 3 and 5: the same bits in all buckets and blocks, and the
same predictions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import trireme as tr
from tests.integration.resumed_script import array_dataset
from tests.jobs import Job
from trireme.job.cluster import Cluster

TABLES = ("adam", "scored", "halves")
NUM_BATCHES = 12


class Model(nn.Module):
    """Tables of different layouts: state, statistics, weights of 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        adam = tr.Table("adam", dim=3, optimizer=tr.optim.Adam(lr=0.05), seed=1)
        policy = tr.policy.CtrCommonAccessor()
        scored = tr.Table("scored", dim=4, optimizer=tr.optim.Adagrad(), policy=policy, seed=2)
        halves = tr.Table("halves", dim=2, optimizer=tr.optim.SGD(lr=0.1), dtype="bfloat16")
        self.rows = nn.ModuleList(
            tr.nn.EmbeddingBag(table, features=["a", "b"]) for table in (adam, scored, halves)
        )
        width = 2 * (3 + (2 + 4) + 2)  # a scored row is read with its shows and clicks
        self.norm = nn.BatchNorm1d(width)
        self.mlp = nn.Sequential(nn.Linear(width, 40), nn.ReLU(), nn.Linear(40, 1))

    def forward(self, batch: Any) -> torch.Tensor:
        out = torch.cat([rows(batch).flatten(1) for rows in self.rows], 1)
        return self.mlp(self.norm(out)).squeeze(1)


def make_trainer(cluster: Cluster) -> tr.Trainer:
    model = Model()
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    return tr.Trainer(
        model,
        adam,
        strategy=tr.Strategy("sync"),
        loss=nn.functional.binary_cross_entropy_with_logits,
        progress=False,
        cluster=cluster,
    )


class Found(NamedTuple):
    """buckets: (table, bucket) -> keys, classes, rows, marks. blocks: id -> tensors by name, marks.
    predictions: of all examples.
    """

    buckets: dict[tuple[str, int], tuple[bytes, bytes, bytes, dict[int, int]]]
    blocks: dict[str, tuple[dict[str, bytes], dict[int, int]]]
    predictions: np.ndarray


def everything(job: Job, trainer: tr.Trainer) -> Found:
    buckets, blocks = {}, {}
    for server in job.servers:
        state = server.state
        for name in TABLES:
            for bucket in state.assignment.owned_buckets().tolist():
                content = state.tables[name].rows.snapshot(bucket)
                order = np.argsort(content.keys)
                columns = (
                    c[order].tobytes() for c in (content.keys, content.classes, content.rows)
                )
                buckets[name, bucket] = (*columns, dict(content.marks))
        for spec in state.blocks.specs():
            parts = state.blocks.state_of(spec.id)
            tensors = {name: tensor.numpy().tobytes() for name, tensor in parts.items()}
            blocks[spec.id] = (tensors, state.blocks.marks_of(spec.id))
    outputs: list[np.ndarray] = []
    handle = trainer.model.register_forward_hook(
        lambda _, __, output: outputs.append(output.numpy().copy())
    )
    trainer.evaluate(array_dataset(NUM_BATCHES))
    handle.remove()
    return Found(buckets, blocks, np.concatenate(outputs))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Found]:
    path = tmp_path_factory.mktemp("saved") / "1"

    def work(cluster: Cluster) -> Found:
        trainer = make_trainer(cluster)
        trainer.fit(array_dataset(NUM_BATCHES))
        trainer.save(path)
        return everything(job, trainer)

    with Job(2) as job:
        [actual] = job.run(1, work)
    assert sum(len(keys) for keys, *_ in actual.buckets.values()) > 0
    return path, actual


@pytest.mark.parametrize("num_servers", [1, 3, 5])
def test_the_same_on_other_servers(saved: tuple[Path, Found], num_servers: int) -> None:
    path, expected = saved

    def work(cluster: Cluster) -> Found:
        trainer = make_trainer(cluster)
        trainer.load(path)
        return everything(job, trainer)

    with Job(num_servers) as job:
        [actual] = job.run(1, work)
    assert actual.buckets == expected.buckets
    assert actual.blocks == expected.blocks
    np.testing.assert_array_equal(actual.predictions, expected.predictions)
