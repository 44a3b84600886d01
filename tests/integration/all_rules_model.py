"""A model with a table of every update rule and kind of row, and a job that trains, evaluates,
shrinks and saves it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import trireme as tr
from tests.integration.saved_rows import saved_rows
from trireme.data import Batch, Ragged
from trireme.job.cluster import Cluster
from trireme.policy import CountFilter, Probability, ScorePolicy, ShowClick

NUM_IDS, DAY = 50, 86400
LENGTHS = (4, 0, 7)  # batches of the workers
OPTIMIZERS = {
    "sgd": tr.optim.SGD(lr=0.1, weight_decay=0.01),
    "momentum": tr.optim.SGD(lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": tr.optim.Adagrad(lr=0.1),
    "shared_adagrad": tr.optim.Adagrad(lr=0.1, shared=True),
    "adam": tr.optim.Adam(lr=0.05),
    "row_adam": tr.optim.Adam(lr=0.05, bias_correction="row"),
    "shared_adam": tr.optim.Adam(lr=0.05, shared=True),
    "ftrl": tr.optim.FTRL(lr=0.1, l1=0.001),
    "count": tr.optim.Count(),
    "fleet_sgd": tr.optim.FleetSGD(lr=0.1, scale="loss"),
    "fleet_adagrad": tr.optim.FleetAdagrad(lr=0.1, scale="loss"),
    "fleet_adagrad_v2": tr.optim.FleetAdagradV2(lr=0.1, scale="loss"),
    "fleet_adam": tr.optim.FleetAdam(lr=0.05, scale="loss"),
    "fleet_shared_adam": tr.optim.FleetSharedAdam(lr=0.05, scale="loss"),
}


def make_tables() -> list[tr.Table]:
    zero = tr.initializer.Constant(0.0)
    tables = [
        tr.Table(name, dim=3, optimizer=rule, initializer=zero if name == "ftrl" else None)
        for name, rule in OPTIMIZERS.items()
    ]
    rule = tr.optim.Adagrad(lr=0.1)
    scored = ScorePolicy(show_click=ShowClick("show", "label"), delete_threshold=1.0)
    return [
        *tables,
        tr.Table("half", dim=4, optimizer=rule, dtype="float16"),
        tr.Table("brain", dim=4, optimizer=rule, dtype="bfloat16"),
        tr.Table("counted", dim=2, optimizer=rule, admit=CountFilter(4)),
        tr.Table("drawn", dim=2, optimizer=rule, admit=Probability(0.3)),
        tr.Table("scored", dim=2, optimizer=tr.optim.FleetAdagrad(lr=0.1), policy=scored),
    ]


class Model(nn.Module):
    def __init__(self, *, scored: bool) -> None:
        super().__init__()
        tables = [table for table in make_tables() if scored or table.name != "scored"]
        self.rows = nn.ModuleList(
            tr.nn.EmbeddingBag(table, features=["bag", "id"], mode=("sum", "mean")[number % 2])
            for number, table in enumerate(tables)
        )
        width = sum(2 * table.dim for table in tables)
        self.top = nn.Sequential(nn.Linear(width, 6), nn.Tanh(), nn.Linear(6, 1))
        generator = torch.Generator().manual_seed(3)  # workers may be threads of one process
        for parameter in self.top.parameters():
            nn.init.uniform_(parameter, -0.3, 0.3, generator=generator)

    def forward(self, batch: Any) -> torch.Tensor:
        x = torch.cat([rows(batch).flatten(1) for rows in self.rows], 1)
        return self.top(x).squeeze(1)


class Data:
    """Bags of 0 to 3 ids, batches of unequal sizes, streams of unequal lengths."""

    def stream(self, index: int, num_streams: int, *, epoch: int = 0) -> Any:
        assert num_streams <= len(LENGTHS)
        for number in range(LENGTHS[index - num_streams]):
            rng = np.random.default_rng([4, epoch, index, number])
            size = int(rng.integers(1, 9))
            sizes = rng.integers(0, 4, size)
            offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)]))
            bag = torch.from_numpy(rng.integers(0, NUM_IDS, int(sizes.sum())))
            columns: dict[str, Any] = {"bag": Ragged(bag, offsets)}
            columns["id"] = torch.from_numpy(rng.geometric(0.05, size))
            columns["label"] = torch.from_numpy(rng.integers(0, 2, size).astype(np.float32))
            columns["show"] = torch.ones(size)
            yield Batch(columns)


def make_trainer(cluster: Cluster, mode: str, *, clips: bool) -> tr.Trainer:
    model = Model(scored=not clips)
    return tr.Trainer(
        model,
        torch.optim.Adam(model.parameters(), lr=0.02),
        loss=nn.functional.binary_cross_entropy_with_logits,
        strategy=tr.Strategy(mode),
        clip_norm=0.3 if clips else None,
        metrics=[tr.metrics.AUC()],
        progress=False,
        cluster=cluster,
    )


def weights_of(trainer: tr.Trainer) -> dict[str, np.ndarray]:
    trainer.optimizer.refresh()  # streams that are longer than this worker's have gone on
    return {name: p.detach().numpy().copy() for name, p in trainer.model.named_parameters()}


def figures_of(figures: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in figures.items() if name != "examples_per_s"}


def run(cluster: Cluster, mode: str, folder: Path, *, clips: bool) -> dict[str, Any]:
    """Train two epochs, evaluate, shrink, save, train one more; returns what must be equal."""
    trainer = make_trainer(cluster, mode, clips=clips)
    trainer.set_time(100 * DAY)
    trained = figures_of(trainer.fit(Data(), epochs=2))
    evaluated = figures_of(trainer.evaluate(Data()))
    trainer.set_time(103 * DAY)
    shrunk = trainer.shrink()
    trainer.save(folder / "after 2")
    trainer.fit(Data())
    trainer.save(folder / "after 3")
    return {
        "figures": [trained, evaluated, shrunk, trainer.optimizer.num_steps],
        "weights": weights_of(trainer),
    }


def assert_same_checkpoints(first: Path, second: Path) -> None:
    """Rows with their state and statistics, bit for bit."""
    expected, actual = saved_rows(first), saved_rows(second)
    assert expected.keys() == actual.keys()
    for table, columns in expected.items():
        assert columns.keys() == actual[table].keys()
        for column, values in columns.items():
            np.testing.assert_array_equal(actual[table][column], values, f"{table} {column}")
