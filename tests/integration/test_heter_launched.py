"""Heterogeneous jobs of `trireme launch`, with the script of a plain job and real processes."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.integration.criteo_folder import write_criteo_folder
from tests.integration.test_metrics import documented, scraped
from tests.integration.test_run import CONFIG, MODEL
from tests.programs import Program, Template
from trireme.commands import cli

SCRIPT = str(Path(__file__).with_name("heter_launched_script.py"))
LAUNCH = ["-m", "trireme", "launch", "--server_num", "1", "--worker_num"]
ON_CPU = {"TRIREME_DEVICE_GPU": "cpu", "TRIREME_DEVICE_NPU": "cpu", "TRIREME_TIMEOUT_S": "60"}
ONE_COMPUTE_WORKER = ["--heter_worker_num", "1", "--heter_devices", "gpu"]


def launch(programs: Template, folder: Path, options: list[str], script: dict[str, Any]) -> Program:
    arguments = [*LAUNCH, *options, SCRIPT, json.dumps(script)]
    return programs.start("launch", arguments, ON_CPU, folder=folder, is_quick=True)


def result(programs: Template, folder: Path, options: list[str], script: dict[str, Any]) -> str:
    """What the first worker of a job computes that ends well."""
    with launch(programs, folder, options, script) as job:
        line = job.wait_line("^RESULT (.*)")[1]
        assert job.finish() == 0, job.output
    return line


def log(folder: Path, name: str) -> str:
    return (folder / "log" / name).read_text()


def open_the_gate(folder: Path) -> None:
    """Lets the worker go on that reads the pipe."""
    (folder / "go").write_text("")


def test_the_unchanged_script_equals_the_plain_job_in_sync(
    programs: Template, tmp_path: Path
) -> None:
    plain = result(programs, tmp_path, ["2"], {})
    assert result(programs, tmp_path, ["2", *ONE_COMPUTE_WORKER], {}) == plain
    assert "trireme: compute worker 0 of 1, gpu, listening on" in log(tmp_path, "heterlog.0")
    assert re.search("ends: all workers have left, after 40 batches", log(tmp_path, "heterlog.0"))


def test_stages_of_two_labels_equal_the_plain_job_in_sync(
    programs: Template, tmp_path: Path
) -> None:
    stages = {"labels": ["cpu", "gpu", "npu", "cpu_2"]}
    plain = result(programs, tmp_path, ["1"], stages)
    kinds = ["--heter_worker_num", "2;1", "--heter_devices", "gpu;npu"]
    assert result(programs, tmp_path, ["1", *kinds], stages) == plain
    for index, label in enumerate(("gpu", "gpu", "npu")):
        assert f"compute worker {index} ({label}) ends" in log(tmp_path, f"heterlog.{index}")


@pytest.mark.parametrize(
    ("mode", "number", "end"),
    [
        ("sync", signal.SIGKILL, "was killed by SIGKILL"),
        ("async", signal.SIGKILL, "was killed by SIGKILL"),
        ("sync", signal.SIGTERM, "failed with exit code 143"),
    ],
)
def test_a_killed_compute_worker_is_restarted_and_nothing_is_lost(
    programs: Template, tmp_path: Path, mode: str, number: signal.Signals, end: str
) -> None:
    script = {"mode": mode, "gate": 10}
    os.mkfifo(tmp_path / "go")
    options = ["2", *ONE_COMPUTE_WORKER, "--max_restart", "2"]
    with launch(programs, tmp_path, options, script) as job:
        job.wait_line("at the gate")
        os.kill(int((tmp_path / "pid-2").read_text()), number)
        job.wait_line(rf"compute worker 0 {end}.*; starting it again \(1 of at most")
        open_the_gate(tmp_path)
        computed = job.wait_line("^RESULT (.*)")[1]
        assert job.finish() == 0, job.output
    assert computed.split()[1] == "640"
    if mode == "sync":
        assert computed == result(programs, tmp_path, ["2"], {"mode": mode})


def test_sigterm_ends_workers_and_then_compute_workers_with_a_checkpoint(
    programs: Template, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "go")
    script = {"gate": 10, "batches": 1000, "checkpoint": "saved"}
    with launch(programs, tmp_path, ["1", *ONE_COMPUTE_WORKER], script) as job:
        job.wait_line("at the gate")
        job.signal(signal.SIGTERM)
        job.wait_line("stopping worker 0")
        open_the_gate(tmp_path)
        assert job.finish() == 0, job.output
    assert "and 1 compute worker, stopped by SIGTERM, ended well" in job.output
    assert list((tmp_path / "saved").iterdir())
    assert "ends: all workers have left" in log(tmp_path, "heterlog.0")


def test_top_and_metrics_tell_of_compute_workers(
    programs: Template, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "go")
    options = ["1", *ONE_COMPUTE_WORKER, "--metrics", "0", "--timeout_s", "2"]
    with launch(programs, tmp_path, options, {"gate": 10}) as job:
        server = job.wait_line(r"servers (\S+); 1 worker; compute workers gpu=\S+; logs")[1]
        worker = job.wait_line(r"metrics at (\S+)/metrics")[1]
        job.wait_line("at the gate")
        compute = re.search(r"metrics at (\S+)/metrics", log(tmp_path, "heterlog.0"))
        assert compute is not None
        pages = documented()
        assert scraped(compute[1]) == pages["C"]
        expected = pages["W"] | pages["H"]
        expected["trireme_worker_figure"] = ("gauge", set())  # none has been shown yet
        assert scraped(worker) == expected
        shown, deadline = "", time.monotonic() + 60
        while "gpu " not in shown:  # the next heartbeat brings it
            assert time.monotonic() < deadline, shown
            top = ["top", "--servers", server, "--once", "--interval_s", "0.3", "--timeout_s", "60"]
            assert cli.main(top) == 0
            shown = capsys.readouterr().out
        open_the_gate(tmp_path)
        assert job.finish() == 0, job.output
    [line] = [line.split() for line in shown.splitlines() if line.startswith("gpu ")]
    assert line[:3] == ["gpu", "1", "1"]  # one compute worker, and in sync one batch in flight


def test_a_configuration_trains_with_compute_workers_and_says_when_it_has_none(
    programs: Template, tmp_path: Path
) -> None:
    write_criteo_folder(tmp_path, repeats=4)
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "model.py").write_text(MODEL)
    heter = ["-m", "config.yaml", "-o", "runner.sync_mode=heter", "runner.epochs=1"]
    says = "runner.sync_mode: heter is async here: the job has no compute workers"
    for options, is_said in (([], True), (ONE_COMPUTE_WORKER, False)):
        saved = f"runner.model_save_path=saved{is_said}"
        programs.run(tmp_path, [*LAUNCH, "1", *options, *heter, saved], ON_CPU)
        assert (says in log(tmp_path, "workerlog.0")) == is_said
        assert (tmp_path / f"saved{is_said}" / "0").is_dir()
    ends = re.search(r"all workers have left, after (\d+) batches", log(tmp_path, "heterlog.0"))
    assert ends is not None
    assert int(ends[1]) > 0
