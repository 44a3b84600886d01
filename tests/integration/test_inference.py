"""Exports: what the trained model answers, without it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import trireme as tr
from tests import zoo_trainers
from tests.jobs import Job
from trireme.cluster import Cluster, embedded
from trireme.inference import Predictor

NAMES = tuple(zoo_trainers.SMALL)


def answers(trainer: tr.Trainer, batch: tr.data.Batch) -> torch.Tensor:
    """Of the trained model itself."""
    found = {}
    trainer.model.eval()
    planner = tr.nn.Planner(trainer.model, pool=trainer.cluster.pool)
    plan = planner.plan(batch)
    pulled = trainer.cluster.pull({part.table.name: part.keys for part in plan.tables})
    rows = {name: torch.from_numpy(rows.copy()) for name, rows in pulled.rows.items()}
    plan.attach(batch, rows, train=False)
    with torch.no_grad():
        found = trainer.model(batch)
    batch.lookups = {}
    trainer.model.train()
    return found


def check_export(name: str, cluster: Cluster, folder: Path) -> None:
    recipe = zoo_trainers.recipe_of(name)
    trainer = zoo_trainers.trainer_of(name, cluster, recipe)
    schema = recipe.schema
    zoo_trainers.train(name, trainer, schema)
    example = zoo_trainers.examples(name, 16, 99, schema=schema)
    trainer.save_inference_model(folder, batch=example)
    predictor = Predictor(folder)
    for num in (1, 2, 7, 40):
        batch = zoo_trainers.examples(name, num, 100 + num, schema=schema, keys=1000)
        prediction = predictor.predict(batch)
        torch.testing.assert_close(
            prediction.outputs["output"], answers(trainer, batch), atol=1e-5, rtol=0
        )
        assert 0 < prediction.num_missing < prediction.num_keys


@pytest.mark.parametrize("name", NAMES)
def test_a_predictor_answers_as_the_trained_model(name: str, tmp_path: Path) -> None:
    with embedded(threads=2) as cluster:
        check_export(name, cluster, tmp_path / "export")


@pytest.mark.parametrize("name", ["deepfm", "din"])
def test_two_servers_write_one_export(name: str, tmp_path: Path) -> None:
    with Job(2) as job:
        job.run(1, lambda cluster: check_export(name, cluster, tmp_path / "export"))
