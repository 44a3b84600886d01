"""examples/stages.py through the real launcher, and in one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.processes import Processes
from tests.programs import Template

SCRIPT = str(Path(__file__).parents[2] / "examples" / "stages.py")
SMALL = ["--examples", "10000", "--mode", "sync"]
LAUNCH = ["--server_num", "1", "--worker_num", "1", "--heter_worker_num", "2"]
WAIT_S = 100.0


def result_of(line: str) -> dict[str, Any]:
    assert line.startswith("RESULT ")
    result: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return result


def test_the_example_of_stages_is_the_same_alone_and_with_compute_workers(
    tmp_path: Path, programs: Template
) -> None:
    env = {"TRIREME_DEVICE_GPU": "cpu"}
    with Processes(tmp_path) as processes:
        options = [*LAUNCH, "--heter_devices", "gpu", SCRIPT, *SMALL]
        processes.start("launch", [programs.python, "-m", "trireme", "launch", *options], env)
        processes.start("alone", [programs.python, SCRIPT, *SMALL], env)
        outputs = processes.finish(WAIT_S)
    launched = result_of((tmp_path / "log" / "workerlog.0").read_text().splitlines()[-1])
    alone = result_of(outputs["alone"].splitlines()[-1])
    assert launched["examples"] == alone["examples"] == 2000
    assert launched["auc"] == pytest.approx(alone["auc"], abs=0.002)  # the threads may differ
    assert alone["auc"] > 0.7
    assert "after" in (tmp_path / "log" / "heterlog.0").read_text()
