"""Configurations in PaddleRec's style run unchanged: their readers, data and paths."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.integration.processes import Processes, clean_environment
from tests.paddlerec import sample
from tests.programs import Template
from trireme.commands import cli
from trireme.launch import environment

MODELS = {"dnn": "ctr_dnn", "wide_deep": "wide_deep", "slot_dnn": "slot_dnn"}
NUM_TRAIN = {"dnn": 3000, "wide_deep": 3000, "slot_dnn": 450}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for name in environment.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", clean_environment()["PYTHONPATH"])  # of reader scripts
    caplog.set_level(logging.INFO)


def epochs(lines: Sequence[str], title: str) -> list[dict[str, float]]:
    result = [re.search(rf"run: {title} \d+: (.*);", line) for line in lines]
    return [
        {name: float(value) for name, value in re.findall(r"(\w+) ([\d.e+-]+)", match[1])}
        for match in result
        if match
    ]


@pytest.mark.parametrize("name", MODELS)
def test_a_configuration_trains_and_infers_as_it_is(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = sample.copy(name, tmp_path / name)
    (folder / "model.py").write_text(f"from trireme.models.{MODELS[name]} import create\n")
    monkeypatch.chdir(folder)
    assert cli.main(["run", "-m", "config.yaml"]) == 0
    trained = epochs(caplog.messages, "epoch")
    assert {figures["examples"] for figures in trained} == {NUM_TRAIN[name]}
    assert cli.main(["run", "--infer", "-m", "config.yaml"]) == 0
    tested = epochs(caplog.messages, "infer epoch")
    if name == "slot_dnn":
        assert tested[0]["examples"] == NUM_TRAIN[name]
        assert "runner.start_day: no effect: " in caplog.text
        assert "accessor" not in caplog.text
    else:
        assert {figures["examples"] for figures in tested} == {500}
        assert tested[-1]["auc"] > 0.8


def test_a_configuration_trains_as_a_job(tmp_path: Path, programs: Template) -> None:
    folder = sample.copy("slot_dnn", tmp_path / "slot_dnn")
    job = [programs.python, "-m", "trireme", "launch", "--server_num", "1"]
    job += ["--worker_num", "1", "-m", "config.yaml", "-o", "model=slot_dnn"]
    with Processes(folder) as processes:
        processes.start("job", job, {})
        output = processes.finish(100.0)["job"]
    (trained,) = epochs(output.splitlines(), "epoch")
    assert trained["examples"] == NUM_TRAIN["slot_dnn"]
    assert (folder / "output_model" / "0" / "manifest.json").is_file()


def test_a_dump_and_a_reader_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = sample.copy("dnn", tmp_path / "dnn")
    monkeypatch.chdir(folder)
    text = "1 {} 1 {} " + " ".join(f"1 {i}" for i in range(1, 27)) + " 13" + " 0.5" * 13 + "\n"
    named = [text.format(f"name-{i}", i % 2) for i in range(60)]
    (folder / "named").mkdir()
    (folder / "named" / "part").write_text("".join(named))
    command = ["run", "-m", "config.yaml", "-o", "model=ctr_dnn", "runner.epochs=1"]
    dump = ["runner.need_dump=True", "runner.dump_fields_path=dumped", "runner.parse_ins_id=True"]
    dump += ["runner.dump_fields=[click]", "runner.dump_param=[mlp.0.bias]"]
    data = ["runner.train_data_dir=named", "runner.pipe_command=cat"]
    assert cli.main([*command, *dump, *data]) == 0
    lines = (folder / "dumped" / "0" / "part-00000").read_text().splitlines()
    assert [line.split("\t")[0] for line in lines] == [f"name-{i}" for i in range(60)]
    assert lines[1].split("\t")[2] == "click:1:1"

    with (folder / "data" / "sample_data" / "train" / "part-1").open("a") as file:
        file.write("click:yes\n")
    assert cli.main([*command, "runner.model_save_path=none"]) == 2
    error = capsys.readouterr().err
    assert "part-1" in error
    assert "invalid literal for int() with base 10: 'yes'" in error
    assert not list((folder / "none").glob("*"))  # made at the start, to know that it can be
