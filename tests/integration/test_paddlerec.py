"""Configurations in PaddleRec's style run as they are: their readers, their data, their paths."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.processes import clean_environment
from tests.paddlerec import sample

MODELS = {"dnn": "ctr_dnn"}
NUM_TRAIN = {"dnn": 3000, "wide_deep": 3000, "slot_dnn": 450}


def trireme(folder: Path, *arguments: str) -> str:
    """What a command says, which must end well, in the folder of the configuration."""
    done = subprocess.run(
        [sys.executable, "-m", "trireme.cli", *arguments],
        cwd=folder,
        env={**clean_environment(), "OMP_NUM_THREADS": "1", "PATH": os.environ["PATH"]},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def epochs(output: str, title: str) -> list[dict[str, float]]:
    lines = re.findall(rf"run: {title} \d+: (.*);", output)
    return [
        {name: float(value) for name, value in re.findall(r"(\w+) ([\d.e+-]+)", line)}
        for line in lines
    ]


@pytest.mark.parametrize("name", MODELS)
def test_a_configuration_trains_and_infers_as_it_is(name: str, tmp_path: Path) -> None:
    folder = sample.copy(name, tmp_path / name)
    (folder / "model.py").write_text(f"from trireme.models.{MODELS[name]} import create\n")
    output = trireme(folder, "run", "-m", "config.yaml")
    trained = epochs(output, "epoch")
    assert {figures["examples"] for figures in trained} == {NUM_TRAIN[name]}
    assert "did you mean" not in output
    if name == "slot_dnn":
        assert "runner.start_day: no effect: training by day and pass comes" in output
        assert "decay" in output  # row statistics come later: each key says so
    else:
        tested = epochs(trireme(folder, "run", "--infer", "-m", "config.yaml"), "infer epoch")
        assert tested[-1]["auc"] > 0.8
        assert {figures["examples"] for figures in tested} == {500}


@pytest.mark.parametrize("name", ["dnn"])
def test_a_configuration_trains_as_a_job(name: str, tmp_path: Path) -> None:
    folder = sample.copy(name, tmp_path / name)
    job = ["launch", "--server_num", "1", "--worker_num", "1", "-m", "config.yaml"]
    output = trireme(folder, *job, "-o", f"model={MODELS[name]}", "runner.epochs=1")
    (trained,) = epochs(output, "epoch")
    assert trained["examples"] == NUM_TRAIN[name]
    assert "1 server and 1 worker ended well" in output
    where = "output_model_dnn" if name == "dnn" else "output_model"
    assert (folder / where / "0" / "manifest.json").is_file()


def test_a_reader_that_fails_ends_the_job_with_its_last_lines(tmp_path: Path) -> None:
    folder = sample.copy("dnn", tmp_path / "dnn")
    with (folder / "data" / "sample_data" / "train" / "part-1").open("a") as file:
        file.write("click:yes\n")
    command = [sys.executable, "-m", "trireme.cli", "launch", "--server_num", "1"]
    command += ["--worker_num", "1", "-m", "config.yaml", "-o", "model=ctr_dnn"]
    done = subprocess.run(
        command, cwd=folder, env=clean_environment(), capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 2
    assert "invalid literal for int() with base 10: 'yes'" in done.stderr
    assert "part-1" in done.stderr
    assert list((folder / "output_model_dnn").iterdir()) == []
