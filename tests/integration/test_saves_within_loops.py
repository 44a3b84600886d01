"""What a loop of the user's own saves or exports between two batches has every step made so far."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch
from torch import nn

import trireme as tr
from tests.integration.saved_rows import saved_rows
from tests.jobs import Job
from trireme.interchange import export_parquet
from trireme.job.cluster import Cluster

NUM_WORKERS = 2
STRATEGIES = {
    "sync": tr.Strategy("sync"),
    "bounded": tr.Strategy("bounded", staleness=2),
    "async": tr.Strategy("async"),
    "geo": tr.Strategy("geo", k=3),
}


class Model(nn.Module):
    """Its rows begin at 0, and one step makes them 1."""

    def __init__(self) -> None:
        super().__init__()
        table = tr.Table(
            "t", dim=1, optimizer=tr.optim.SGD(lr=1.0), initializer=tr.initializer.Constant(0.0)
        )
        self.rows = tr.nn.EmbeddingBag(table, features=["id"])
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, batch: Any) -> torch.Tensor:
        return self.rows(batch).flatten(1).sum(1) + self.bias


@pytest.mark.parametrize("mode", STRATEGIES)
def test_what_is_saved_between_two_batches_has_the_last_step(mode: str, tmp_path: Path) -> None:
    def train(cluster: Cluster) -> None:
        model = Model()
        trainer = tr.Trainer(
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            loss=nn.functional.mse_loss,
            strategy=STRATEGIES[mode],
            cluster=cluster,
            progress=False,
        )
        data = [{"id": torch.tensor([number])} for number in range(4 * NUM_WORKERS)]
        for batch in tr.prefetch(data, model, cluster=cluster):
            model(batch).sum().neg().backward()
            trainer.optimizer.step()
            if trainer.optimizer.num_steps == 2:
                trainer.save(tmp_path / "saved")
                export_parquet(trainer, tmp_path / "exported")
        trainer.load(tmp_path / "saved")
        assert trainer.optimizer.num_steps == 2
        # In sync a step has the mean of the workers' gradients.
        assert model.bias.item() == (2.0 if mode == "sync" else 4.0)

    with Job(2) as job:
        job.run(NUM_WORKERS, train)
    rows = saved_rows(tmp_path / "saved")["t"]
    np.testing.assert_array_equal(rows["key"], np.arange(2 * NUM_WORKERS))
    exported = pyarrow.parquet.read_table(tmp_path / "exported")
    assert sorted(exported["key"].to_pylist()) == list(range(2 * NUM_WORKERS))
