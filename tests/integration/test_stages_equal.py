"""Stages on compute workers find the same bits as stages in one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.stages_jobs import StagesJob, stages_alone
from tests.programs import Template

SYNC: dict[str, Any] = {"strategy": {"mode": "sync"}}
# Stages, and the labels of the compute workers.
PLACES: dict[str, tuple[list[str], list[str]]] = {
    "middle": (["cpu", "gpu", "cpu_2"], ["gpu"]),
    "last": (["cpu", "gpu"], ["gpu", "gpu"]),
    "together": (["cpu", "gpu", "gpu_2", "cpu_2"], ["gpu", "gpu"]),
    "apart": (["cpu", "gpu", "cpu_2", "gpu_2"], ["gpu", "gpu"]),
    "two_labels": (["cpu", "gpu", "cpu_2", "gpu_2"], ["gpu", "gpu_2"]),
    "numbered": (["cpu", "cpu_2", "cpu_3"], ["cpu_2"]),
    "all": (["gpu", "gpu_2", "gpu_3"], ["gpu"]),
}
CASES: dict[str, dict[str, Any]] = {
    "dropout": {**SYNC, "dropout": 0.4, "epochs": 2},
    "norm": {**SYNC, "norm": True},
    "clip": {**SYNC, "clip_norm": 0.1},
    "admission": {**SYNC, "admit": 4},
    "empty": {**SYNC, "empty": 3},
    "batch_loss": {**SYNC, "label": None, "dropout": 0.2},
    "geo": {"strategy": {"mode": "geo", "k": 1}},
    # Rows are pulled while a push is under way, which makes their age a matter of chance.
    "hybrid": {"strategy": {"mode": "hybrid"}, "dropout": 0.4, "norm": True, "rows_lr": 0.0},
}


@pytest.mark.parametrize("place", PLACES)
def test_stages_anywhere_equal_one_process(place: str, programs: Template) -> None:
    stages, labels = PLACES[place]
    options = {**SYNC, "stages": stages, "dropout": 0.3, "norm": True}
    expected = stages_alone(programs, options)
    with StagesJob(programs, options, labels) as job:
        [result] = job.finish()
    assert result == expected


@pytest.mark.parametrize("stages", [["cpu", "gpu", "cpu_2"], ["cpu", "gpu"]])
@pytest.mark.parametrize("case", CASES)
def test_one_worker_with_two_compute_workers_equals_one_process(
    case: str, stages: list[str], programs: Template
) -> None:
    options = {**CASES[case], "stages": stages}
    expected = stages_alone(programs, options)
    with StagesJob(programs, options, ["gpu", "gpu"]) as job:
        [result] = job.finish()
    assert result == expected
