"""`trireme run` and `trireme launch -m`: configurations with PaddleRec's keys."""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path

import pytest

from tests.integration.criteo_folder import NUM_TEST, write_criteo_folder
from tests.integration.processes import Processes
from trireme import cli
from trireme.launch import roles

CONFIG = """
runner:
  train_data_dir: "train"
  test_data_dir: "test"
  train_batch_size: 512
  infer_batch_size: 1000
  epochs: 2
  use_auc: True
  sync_mode: "async"
  model_save_path: "out"
  reader_type: "QueueDataset"
  infer_start_epoch: 0
  infer_end_epoch: 2
hyper_parameters:
  optimizer: {class: Adam, learning_rate: 1e-2}
  fc_sizes: [16]
"""
MODEL = """
import torch
import trireme as tr


def create(config):
    rate = config.get("hyper_parameters.optimizer.learning_rate")
    features = [f"C{i}" for i in range(1, config.get("num_features", 26) + 1)]
    model = tr.models.CtrDnn(
        tr.Table("embedding", dim=4, optimizer=tr.optim.Adam(lr=rate)),
        features=features,
        layers=config.get("hyper_parameters.fc_sizes"),
    )
    return tr.Recipe(
        model=model,
        loss=torch.nn.functional.binary_cross_entropy_with_logits,
        optimizer=torch.optim.Adam(model.parameters(), lr=rate),
        schema=tr.data.criteo(),
    )
"""


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in roles.VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("criteo")
    write_criteo_folder(path, repeats=4)
    (path / "config.yaml").write_text(CONFIG)
    (path / "model.py").write_text(MODEL)
    return path


def figures(line: str) -> dict[str, float]:
    return {name: float(value) for name, value in re.findall(r"(\w+) ([\d.e+-]+)(?=[,;])", line)}


def test_training_inference_and_a_warm_start_with_a_feature_more(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    command = ["-m", str(folder / "config.yaml"), "-o", "model_save_path=unused"]
    assert cli.main(["run", *command, "num_features=25"]) == 0
    epochs = [line for line in caplog.messages if line.startswith("run: epoch")]
    assert [figures(line)["examples"] for line in epochs] == [16000, 16000]
    assert "model_save_path: no effect: nothing reads it" in caplog.text
    assert sorted(path.name for path in (folder / "out").iterdir()) == ["0", "1"]

    caplog.clear()
    assert cli.main(["run", "--infer", *command, "num_features=25"]) == 0
    tested = [line for line in caplog.messages if line.startswith("run: infer epoch")]
    assert [figures(line)["examples"] for line in tested] == [NUM_TEST, NUM_TEST]
    assert figures(tested[1])["auc"] > 0.9
    assert f"loaded from {folder / 'out' / '1'}" in tested[1]

    caplog.clear()
    warm = ["runner.warmup_model_path=out/1", "runner.model_save_path=warm", "runner.epochs=1"]
    assert cli.main(["run", *command, *warm]) == 0
    assert f"starting from {folder}/out/1; new, or of another shape: mlp.0.weight" in caplog.text
    (trained,) = [line for line in caplog.messages if line.startswith("run: epoch")]
    assert figures(trained)["auc"] > figures(epochs[0])["auc"]


def test_a_job_of_several_processes_saves_beside_the_file(folder: Path, tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "trireme.cli", "launch", "--server_num", "1"]
    launch += ["--worker_num", "2", "-m", str(folder / "config.yaml")]
    override = ["-o", "runner.model_save_path=launched", "runner.epochs=1", "runner.use_auc=False"]
    with Processes(tmp_path) as processes:
        processes.start("train", [*launch, *override, "runner.split_file_list=True"], {})
        output = processes.finish(100.0)["train"]
    (epoch,) = re.findall(r"run: epoch 0: .*", output)
    assert figures(epoch)["examples"] == 16000
    assert (folder / "launched" / "0" / "manifest.json").is_file()
