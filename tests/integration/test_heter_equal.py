"""Workers with compute workers find the same bits as workers that compute themselves."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.heter_jobs import HeterJob, alone
from tests.programs import Template

SYNC: dict[str, Any] = {"strategy": {"mode": "sync"}}
CASES: dict[str, dict[str, Any]] = {
    "adagrad": SYNC,
    "dropout": {**SYNC, "dropout": 0.4, "epochs": 2},
    "norm": {**SYNC, "norm": True},
    "clip": {**SYNC, "clip_norm": 0.1},
    "clip_value": {**SYNC, "clip_value": 0.01},
    "admission": {**SYNC, "admit": 4},
    "geo": {"strategy": {"mode": "geo", "k": 1}},
    # Rows are pulled while a push is under way, which makes their age a matter of chance.
    "hybrid": {"strategy": {"mode": "hybrid"}, "dropout": 0.4, "norm": True, "rows_lr": 0.0},
    "empty": {**SYNC, "empty": 3},
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
