"""Loads that end half way, and loads that must not begin: nothing goes on with a mixture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trireme as tr
from tests.jobs import Job
from trireme.checkpoint.worker_side.server_operations import ServerOperations
from trireme.errors import BadRequest, SchemaMismatch, Superseded, Unavailable
from trireme.job.cluster import Cluster
from trireme.job.embedded import embedded

HALF = "ended half way.*load again"


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ModuleList(
            tr.nn.EmbeddingBag(tr.Table(name, dim=2, optimizer=tr.optim.SGD(lr=0.5)), features=name)
            for name in ("a", "b")
        )
        self.head = nn.Linear(4, 1)

    def forward(self, batch: Any) -> torch.Tensor:
        return self.head(torch.cat([rows(batch).flatten(1) for rows in self.rows], 1)).squeeze(1)


def batches(num: int) -> list[dict[str, torch.Tensor]]:
    ids = torch.arange(8)
    return [{"a": ids, "b": ids, "label": (ids % 2).float()}] * num


def make_trainer(cluster: Cluster, model: nn.Module, num_groups: int = 1) -> tr.Trainer:
    parameters = list(model.parameters())
    groups = [{"params": parameters[i::num_groups]} for i in range(num_groups)]
    return tr.Trainer(
        model,
        torch.optim.SGD(groups, lr=0.1),
        loss=nn.functional.binary_cross_entropy_with_logits,
        progress=False,
        cluster=cluster,
    )


@contextmanager
def ending(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> Iterator[None]:
    """Loads that are decided end by the error before a server begins."""
    run = ServerOperations.run

    def ends(self: ServerOperations, action: str, **body: Any) -> Any:
        if action == "load":
            raise error
        return run(self, action, **body)

    with monkeypatch.context() as patch:
        patch.setattr(ServerOperations, "run", ends)
        yield


def uses(trainer: tr.Trainer, folder: Path) -> list[Callable[[], object]]:
    return [
        lambda: trainer.fit(batches(1)),
        lambda: trainer.evaluate(batches(1)),
        lambda: trainer.predict(batches(1)),
        lambda: trainer.save(folder / "more"),
    ]


def test_after_an_interrupted_load_only_a_load_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "saved"
    with embedded(threads=1) as cluster:
        model = Model()
        trainer = make_trainer(cluster, model)
        trainer.fit(batches(3))
        trainer.save(path)
        before = trainer.evaluate(batches(1))["loss"]
        trainer.fit(batches(3))
        with ending(monkeypatch, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
            trainer.load(path)
        for use in uses(trainer, tmp_path):
            with pytest.raises(BadRequest, match=f"{path} {HALF}"):
                use()
        trainer = make_trainer(cluster, model)  # over the same rows
        for use in uses(trainer, tmp_path):
            with pytest.raises(BadRequest, match=f"{path} {HALF}"):
                use()
        trainer.load(path, tables=["a"])
        with pytest.raises(BadRequest, match=HALF):  # of the other table
            trainer.fit(batches(1))
        trainer.load(path)
        assert trainer.evaluate(batches(1))["loss"] == before
        trainer.fit(batches(3))


def test_a_new_model_begins_anew_after_an_interrupted_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with embedded(threads=1) as cluster:
        trainer = make_trainer(cluster, Model())
        trainer.fit(batches(3))
        trainer.save(tmp_path / "saved")
        with ending(monkeypatch, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
            trainer.load(tmp_path / "saved")
        for use in uses(make_trainer(cluster, Model()), tmp_path):
            use()


def test_all_workers_know_of_a_load_that_failed_half_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(cluster: Cluster) -> None:
        torch.manual_seed(0)
        trainer = make_trainer(cluster, Model())
        trainer.fit(batches(2))
        trainer.save(tmp_path / "saved")
        with pytest.raises(Unavailable, match="gone for good"):
            trainer.load(tmp_path / "saved")
        with pytest.raises(BadRequest, match=HALF):
            trainer.fit(batches(1))

    with ending(monkeypatch, Unavailable("a server is gone for good")), Job(1) as job:
        job.run(2, work)


def test_a_superseded_trainer_does_not_load_into_the_new_models_rows(tmp_path: Path) -> None:
    with embedded(threads=1) as cluster:
        old = make_trainer(cluster, Model())
        old.fit(batches(3))
        old.save(tmp_path / "saved")
        new = make_trainer(cluster, Model())
        new.fit(batches(1))
        before = new.evaluate(batches(1))["loss"]
        with pytest.raises(Superseded, match="found them dropped"):
            old.load(tmp_path / "saved")
        assert new.evaluate(batches(1))["loss"] == before
        new.fit(batches(1))


def test_another_number_of_param_groups_is_refused_before_anything_changes(tmp_path: Path) -> None:
    with embedded(threads=1) as cluster:
        trainer = make_trainer(cluster, Model())
        trainer.fit(batches(3))
        trainer.save(tmp_path / "saved")
    with embedded(threads=1) as cluster:
        trainer = make_trainer(cluster, Model(), num_groups=2)
        trainer.fit(batches(1))
        before = trainer.evaluate(batches(1))["loss"]
        with pytest.raises(SchemaMismatch, match=r"with 2 param groups .*found one with 1"):
            trainer.load(tmp_path / "saved")
        assert trainer.evaluate(batches(1))["loss"] == before
        trainer.load(tmp_path / "saved", dense="match")
        trainer.fit(batches(1))
