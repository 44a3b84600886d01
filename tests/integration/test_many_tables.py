"""What a step of a model with many tables costs: Python code that runs once for each of them."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from types import FrameType

import torch
from torch import Tensor, nn

import trireme as tr
from trireme.job.cluster import Cluster
from trireme.job.embedded import embedded

NUM_STEPS = 3


class Model(nn.Module):
    def __init__(self, num_tables: int) -> None:
        super().__init__()
        tables = [tr.Table(f"t{i}", dim=2) for i in range(num_tables)]
        self.rows = nn.ModuleList(
            tr.nn.Embedding(table, features=f"f{i}") for i, table in enumerate(tables)
        )
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, batch: tr.data.Batch) -> Tensor:
        return torch.stack([rows(batch).sum(1) for rows in self.rows]).sum(0) * self.scale


def num_calls(cluster: Cluster, num_tables: int) -> int:
    """Python calls and steps of generators in training, in all threads."""
    model = Model(num_tables)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = nn.functional.mse_loss
    trainer = tr.Trainer(model, optimizer, loss=loss, cluster=cluster, threads=1, progress=False)
    columns = {f"f{i}": torch.arange(4) for i in range(num_tables)}
    batches = [{**columns, "label": torch.zeros(4)}] * NUM_STEPS
    trainer.fit(batches)
    counts = Counter[str]()

    def note(_: FrameType, event: str, __: object) -> None:
        counts[event] += 1

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        trainer.fit(batches)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return counts["call"]


def test_a_step_costs_no_more_for_a_table_where_there_are_many() -> None:
    with embedded() as cluster:
        few = num_calls(cluster, 20) / 20
    with embedded() as cluster:
        many = num_calls(cluster, 200) / 200
    assert many < 1.2 * few
