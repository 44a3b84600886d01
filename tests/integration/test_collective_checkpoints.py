"""Checkpoints of collective: of any job, for any job, and continued by any number of workers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trireme as tr
from tests.integration import all_rules_model as all_rules
from tests.integration import test_sync as exact
from tests.jobs import Job
from tests.ranks import run_ranks
from tests.tables import T_ROWS
from trireme import _core
from trireme.errors import BadRequest, Stopped
from trireme.job.cluster import Cluster

NUM_EXAMPLES, BATCH, EPOCHS = 151, 4, 2
SCHEMA = tr.data.Schema([tr.data.Sparse("a"), tr.data.Label()])


@pytest.mark.parametrize(("first", "second"), [("sync", "collective"), ("collective", "sync")])
def test_each_continues_from_the_checkpoint_of_the_other_bit_for_bit(
    first: str, second: str, tmp_path: Path
) -> None:
    def begin(cluster: Cluster, mode: str, path: Path) -> None:
        trainer = all_rules.make_trainer(cluster, mode, clips=False)
        trainer.fit(all_rules.Data())
        trainer.save(path)

    def go_on(cluster: Cluster, mode: str, path: Path) -> dict[str, np.ndarray]:
        trainer = all_rules.make_trainer(cluster, mode, clips=False)
        trainer.load(path)
        trainer.fit(all_rules.Data())
        trainer.save(path.with_name(f"{path.name} and {mode}"))
        return all_rules.weights_of(trainer)

    def run(mode: str, work: Any, path: Path) -> list[Any]:
        if mode == "collective":
            return run_ranks(3, lambda cluster: work(cluster, mode, path))
        with Job(2) as job:
            return job.run(3, lambda cluster: work(cluster, mode, path))

    run("sync", begin, tmp_path / "all")
    expected = run("sync", go_on, tmp_path / "all")
    run(first, begin, tmp_path / first)
    exact.assert_same_bits(expected + run(second, go_on, tmp_path / first))
    all_rules.assert_same_checkpoints(tmp_path / "all and sync", tmp_path / f"{first} and {second}")


class CountedModel(nn.Module):
    """Counts the updates of each key. stops_at: asks all workers to stop after that many batches of
    this one.
    """

    def __init__(self, cluster: Cluster, stops_at: int) -> None:
        super().__init__()
        start = tr.initializer.Constant(0.0)
        table = tr.Table("t", dim=1, optimizer=tr.optim.Count(), initializer=start)
        self.rows = tr.nn.EmbeddingBag(table, features=["a"])
        self.head = nn.Linear(1, 1)
        self._cluster, self._left = cluster, stops_at

    def forward(self, batch: Any) -> torch.Tensor:
        self._left -= 1
        if self._left == 0:
            self._cluster.stop_request.reason = "a test"
        return self.head(self.rows(batch).flatten(1)).squeeze(1)


def counts(cluster: Cluster) -> np.ndarray:
    keys = _core.unique(np.arange(NUM_EXAMPLES, dtype=np.uint64), cluster.pool)[0]
    return cluster.client.pull({T_ROWS: keys}).rows[T_ROWS].numpy()[:, 0]


def fit(cluster: Cluster, folder: Path, stops_at: int, dataset: Any = None) -> np.ndarray | None:
    """Train on, and return how often each example was trained on; None: stopped before the end."""
    model = CountedModel(cluster, stops_at)
    trainer = tr.Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        loss=nn.functional.binary_cross_entropy_with_logits,
        strategy=tr.Strategy("collective"),
        progress=False,
        cluster=cluster,
    )
    keys = np.arange(NUM_EXAMPLES)  # each in one example alone
    columns = {"a": keys, "label": np.ones(NUM_EXAMPLES, np.float32)}
    data = tr.data.ArrayDataset(columns, schema=SCHEMA, batch_size=BATCH, shuffle=True, seed=1)
    checkpoints = tr.Checkpoints(folder, every_steps=100)
    try:
        trainer.fit(dataset or data, epochs=EPOCHS, checkpoints=checkpoints, resume=True)
    except Stopped:
        return None
    cluster.client.coordinator.gather({}, [])
    return counts(cluster)


@pytest.mark.parametrize(
    "runs",
    [
        # (workers, batches of worker 0 until all stop)
        [(3, 5), (2, 0)],
        [(2, 5), (3, 3), (1, 4), (2, 2), (2, 3), (4, 0)],
        [(1, 17), (4, 3), (2, 6), (3, 0)],
        [(2, 21), (3, 0)],  # in the second epoch
        [(3, 16), (1, 0)],
    ],
)
def test_any_number_of_workers_goes_on_within_an_epoch_and_trains_once_on_each_example(
    runs: list[tuple[int, int]], tmp_path: Path
) -> None:
    for num_ranks, batches in runs[:-1]:
        results = run_ranks(num_ranks, partial(fit, folder=tmp_path, stops_at=batches))
        assert results == [None] * num_ranks
    for result in run_ranks(runs[-1][0], lambda cluster: fit(cluster, tmp_path, 0)):
        assert result is not None
        assert np.unique(result).tolist() == [EPOCHS]


def test_batches_that_only_their_workers_know_are_refused_for_another_number(
    tmp_path: Path,
) -> None:
    batches = [{"a": torch.arange(4), "label": torch.ones(4)} for _ in range(20)]
    run_ranks(2, lambda cluster: fit(cluster, tmp_path, 3, batches))
    with pytest.raises(BadRequest, match="another number of workers has begun, found list"):
        run_ranks(3, lambda cluster: fit(cluster, tmp_path, 0, batches))
