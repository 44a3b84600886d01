"""Workers with compute workers find the same bits as workers that compute themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.all_rules_model import assert_same_checkpoints
from tests.integration.heter_jobs import HeterJob, alone, plain
from tests.programs import Template

RULES_SCRIPT = str(Path(__file__).with_name("heter_rules_script.py"))
SYNC: dict[str, Any] = {"strategy": {"mode": "sync"}}
CASES: dict[str, dict[str, Any]] = {
    "adagrad": SYNC,
    "dropout": {**SYNC, "dropout": 0.4, "epochs": 2},
    "norm": {**SYNC, "norm": True},
    "accumulate": {**SYNC, "accumulate": 3, "dropout": 0.4},
    "clip": {**SYNC, "clip_norm": 0.1},
    "clip_value": {**SYNC, "clip_value": 0.01},
    "admission": {**SYNC, "admit": 4},
    "geo": {"strategy": {"mode": "geo", "k": 1}},
    # Rows are pulled while a push is under way, which makes their age a matter of chance.
    "hybrid": {"strategy": {"mode": "hybrid"}, "dropout": 0.4, "norm": True, "rows_lr": 0.0},
    "empty": {**SYNC, "empty": 3},
    "autocast": {**SYNC, "autocast": "bfloat16", "norm": True},
}


@pytest.mark.parametrize("case", CASES)
def test_one_worker_with_two_compute_workers_equals_one_process(
    case: str, programs: Template
) -> None:
    options = CASES[case]
    expected = alone(programs, options)
    with HeterJob(programs, options, num_workers=1, num_compute=2) as job:
        [result] = job.finish()
    assert result == expected


@pytest.mark.parametrize("case", ["dropout", "norm", "clip", "geo"])
def test_two_uneven_workers_with_one_compute_worker_equal_two_that_compute(
    case: str, programs: Template
) -> None:
    options = {**CASES[case], "lengths": [17, 9]}
    expected = plain(programs, options, 2)
    with HeterJob(programs, options, num_workers=2, num_compute=1) as job:
        results = job.finish()
    for result, same in zip(results, expected, strict=True):
        del result["pushes"], same["pushes"]  # of a worker that has ended first
        assert case == "geo" or result == same
        assert result["trained"]["examples"] == same["trained"]["examples"]
        assert result["steps"] == same["steps"]


@pytest.mark.parametrize(
    ("mode", "lengths", "num_compute", "in_flight"),
    [
        ("bounded", [120, 80], 2, 2),
        ("async", [90, 10, 60, 0], 2, 2),
        ("bounded", [150], 4, 8),
    ],
)
def test_any_number_of_both_trains_on_every_example_once(
    mode: str, lengths: list[int], num_compute: int, in_flight: int, programs: Template
) -> None:
    strategy = {"mode": mode, "staleness": 3} if mode == "bounded" else {"mode": mode}
    options = {"strategy": strategy, "lengths": lengths, "dropout": 0.1, "norm": True}
    num = len(lengths)
    with HeterJob(programs, options, num_workers=num, num_compute=num_compute) as job:
        threads = [worker.wait_line(r"TRAINER (\d)")[1] for worker in job.workers]
        assert threads == [str(in_flight)] * num
        results = job.finish()
    num_batches = sum(lengths)
    for result in results:
        assert result["trained"]["examples"] == sum(
            8 + n % 3 for length in lengths for n in range(length)
        )
        assert result["figures"]["auc"] > 0.9
    assert max(result["pushes"][0] for result in results) == num_batches


@pytest.mark.parametrize(("num_workers", "num_compute", "clips"), [(3, 1, True), (1, 2, False)])
def test_every_rule_has_the_same_rows_and_figures(
    num_workers: int, num_compute: int, clips: bool, programs: Template, tmp_path: Path
) -> None:
    results = []
    for number in (0, num_compute):
        folder = tmp_path / str(number)
        folder.mkdir()
        script = [RULES_SCRIPT, "sync", "clips" if clips else "-", str(folder)]
        with HeterJob(programs, script=script, num_workers=num_workers, num_compute=number) as job:
            results.append(job.finish())
    assert results[0] == results[1]
    for name in ("after 2", "after 3"):
        assert_same_checkpoints(tmp_path / "0" / name, tmp_path / str(num_compute) / name)
