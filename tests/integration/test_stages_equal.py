"""Stages on compute workers find the same bits as stages in one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.heter_jobs import STAGES_SCRIPT, HeterJob, alone
from tests.long import pick, sampled
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
    "accumulate": {**SYNC, "accumulate": 3, "dropout": 0.4},
    "clip": {**SYNC, "clip_norm": 0.1},
    "admission": {**SYNC, "admit": 4},
    "empty": {**SYNC, "empty": 3},
    "autocast": {**SYNC, "autocast": "bfloat16", "norm": True},
    "batch_loss": {**SYNC, "label": None, "dropout": 0.2},
    "geo": {"strategy": {"mode": "geo", "k": 1}},
    # Rows are pulled while a push is under way, which makes their age a matter of chance.
    "hybrid": {"strategy": {"mode": "hybrid"}, "dropout": 0.4, "norm": True, "rows_lr": 0.0},
}
RULES: tuple[str, ...] = pick(
    short=("Adam", "FleetSharedAdam"),
    long=(
        *("SGD", "Adam", "FTRL", "FleetSGD", "FleetAdagrad", "FleetAdagradV2", "FleetAdam"),
        "FleetSharedAdam",
    ),
)


@pytest.mark.parametrize("place", PLACES)
def test_stages_anywhere_equal_one_process(place: str, programs: Template) -> None:
    stages, labels = PLACES[place]
    options = {**SYNC, "stages": stages, "dropout": 0.3, "norm": True}
    expected = alone(programs, options, path=STAGES_SCRIPT)
    with HeterJob(programs, options, path=STAGES_SCRIPT, labels=labels) as job:
        [result] = job.finish()
    assert result == expected


@sampled(keep=8)
@pytest.mark.parametrize("stages", [["cpu", "gpu", "cpu_2"], ["cpu", "gpu"]])
@pytest.mark.parametrize("case", CASES)
def test_one_worker_with_two_compute_workers_equals_one_process(
    case: str, stages: list[str], programs: Template
) -> None:
    options = {**CASES[case], "stages": stages}
    expected = alone(programs, options, path=STAGES_SCRIPT)
    with HeterJob(programs, options, path=STAGES_SCRIPT, labels=["gpu", "gpu"]) as job:
        [result] = job.finish()
    assert result == expected


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_finds_the_same_bits(rule: str, programs: Template) -> None:
    options = {**SYNC, "rule": rule}
    expected = alone(programs, options, path=STAGES_SCRIPT)
    with HeterJob(programs, options, path=STAGES_SCRIPT, labels=["gpu"]) as job:
        [result] = job.finish()
    assert result == expected


def test_two_workers_with_one_compute_worker_equal_two_workers(programs: Template) -> None:
    options = {**SYNC, "norm": True, "lengths": [14, 9], "stages": ["cpu", "gpu", "cpu_2", "gpu_2"]}
    with HeterJob(programs, options, path=STAGES_SCRIPT, labels=[], num_workers=2) as job:
        expected = job.finish()
    with HeterJob(programs, options, path=STAGES_SCRIPT, labels=["gpu"], num_workers=2) as job:
        assert job.finish() == expected


@pytest.mark.parametrize(
    "strategy", [{"mode": "async"}, {"mode": "bounded", "staleness": 2}], ids=["async", "bounded"]
)
def test_several_batches_in_flight_are_each_trained_on_once(
    strategy: dict[str, Any], programs: Template
) -> None:
    options = {"strategy": strategy, "lengths": [30, 20], "dropout": 0.2, "norm": True}
    with HeterJob(
        programs, options, path=STAGES_SCRIPT, labels=["gpu", "gpu", "gpu"], num_workers=2
    ) as job:
        for worker in job.workers:
            assert worker.wait_line("TRAINER ([0-9]+)")[1] == "3"
        results = job.finish()
    assert [result["steps"] for result in results] == [30, 20]
    assert results[0]["pushes"] == [50]
    assert results[0]["trained"]["examples"] == sum(8 + n % 3 for k in (30, 20) for n in range(k))
    assert results[0]["figures"]["auc"] > 0.6
