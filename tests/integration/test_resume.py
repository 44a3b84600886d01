"""Checkpoints of a fit, and how another run goes on from them: whatever the data is read from,
whatever is damaged, and in async.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import trireme as tr
from tests.integration import resumer
from tests.integration.resumer import BATCH, NUM_BATCHES, array_dataset, columns
from trireme import _core
from trireme.cluster import embedded
from trireme.ps.process import torch_threads

LAST = 2 * NUM_BATCHES


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here outlives the machine: to wait for the disk would take most of the time."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


class Stopped(Exception):
    """The run ends here."""


class Model(resumer.Model):
    """Ends the run when it has begun so many steps."""

    stop_at: int | None = None

    def forward(self, batch: Any) -> torch.Tensor:
        if self.num_steps == self.stop_at:
            raise Stopped
        return super().forward(batch)


def run(
    path: Path, dataset: Any, *, stop_at: int | None = None, mode: str = "sync", **options: Any
) -> dict[str, Any]:
    """Two epochs with checkpoints, or until they end before; returns what is then in the tables and
    the model, and the figures.
    """
    torch.manual_seed(11)
    with torch_threads(1), embedded(threads=1) as cluster:
        model = Model()
        model.stop_at = stop_at
        trainer = resumer.make_trainer(mode, model, cluster=cluster)
        checkpoints = tr.Checkpoints(path, **{"every_steps": 13, **options})
        try:
            figures = trainer.fit(dataset, epochs=2, checkpoints=checkpoints, resume=True)
        except Stopped:
            cluster.abandon()
            return {}
        keys = _core.unique(np.arange(resumer.NUM_KEYS, dtype=np.uint64), cluster.pool)[0]
        rows = np.array(cluster.client.pull({"t": keys}).rows["t"])
        model = {name: t.detach().numpy().copy() for name, t in trainer.model.named_parameters()}
        model |= {name: t.numpy().copy() for name, t in trainer.model.named_buffers()}
        random = {"torch": torch.rand(3).numpy()}
        about = {"figures": figures, "steps": trainer.model.num_steps}
        return {"rows": rows, **model, **random, **about}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name in found.keys() - {"figures", "steps"}:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


# ---- kinds of data ----


class Positionless:
    """Streams that cannot seek."""

    def stream(self, index: int, num_streams: int, *, epoch: int) -> Iterator[dict[str, Any]]:
        for batch in array_dataset(NUM_BATCHES).stream(index, num_streams, epoch=epoch):
            yield {name: batch[name] for name in batch}


def examples() -> list[dict[str, Any]]:
    values = columns(NUM_BATCHES * BATCH)
    return [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]


def csv_file(folder: Path) -> tuple[Path, tr.data.Schema]:
    lines = [",".join(str(value) for value in row.values()) for row in examples()]
    (folder / "data.csv").write_text("a,b,label\n" + "\n".join(lines))
    return folder / "data.csv", tr.data.csv(resumer.SCHEMA.fields)


def queue(folder: Path) -> Any:
    path, schema = csv_file(folder)
    return tr.data.QueueDataset(path, schema=schema, batch_size=BATCH)


def in_memory(folder: Path) -> Any:
    path, schema = csv_file(folder)
    dataset = tr.data.InMemoryDataset(path, schema=schema, batch_size=BATCH, seed=3)
    dataset.load_into_memory(is_shuffle=True)
    return dataset


DATA: dict[str, Callable[[Path], Any]] = {
    "array": lambda _: array_dataset(NUM_BATCHES),
    "queue": queue,
    "in memory": in_memory,
    "streams that cannot seek": lambda _: Positionless(),
    "list": lambda _: list(array_dataset(NUM_BATCHES)),
    "loader": lambda _: DataLoader(
        examples(), BATCH, shuffle=True, generator=torch.Generator().manual_seed(5)
    ),
    "loader in torch's own order": lambda _: DataLoader(examples(), BATCH, shuffle=True),
}


@pytest.mark.parametrize("kind", DATA)
def test_a_run_goes_on_behind_the_last_batch(kind: str, tmp_path: Path) -> None:
    make = lambda: DATA[kind](tmp_path)  # noqa: E731 anew in every run, as a script does
    whole = run(tmp_path / "whole", make())
    assert whole["steps"] == LAST
    for stop_at, behind in ((16, 13), (20, 13), (30, 26)) if kind == "array" else ((30, 26),):
        path = tmp_path / str(stop_at)
        assert run(path, make(), stop_at=stop_at) == {}
        rest = run(path, make())
        assert rest["steps"] == LAST - behind
        assert_same(rest, whole)
