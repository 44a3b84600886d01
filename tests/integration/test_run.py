"""`trireme run` and `trireme launch -m`: configurations with PaddleRec's keys."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.integration.criteo_folder import NUM_TEST, write_criteo_folder
from tests.integration.processes import Processes, clean_environment
from tests.paddlerec import sample
from tests.programs import Template
from trireme.commands import cli
from trireme.config import Config
from trireme.launch import environment
from trireme.run.model_source import model_source
from trireme.run.settings import Settings

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
LINE = "\t".join(["1", *["3"] * 13, *["0000000a"] * 26]) + "\n"
MODEL = """
import torch
import trireme as tr


def create(config):
    rate = config.get("hyper_parameters.optimizer.learning_rate")
    features = [f"C{i}" for i in range(1, config.get("num_features", 26) + 1)]
    rows = tr.Table("embedding", dim=4, optimizer=tr.optim.Adam(lr=rate))
    layers = config.get("hyper_parameters.fc_sizes")
    model = tr.models.CtrDnn(rows, features=features, layers=layers)
    return tr.Recipe(
        model=model,
        loss=torch.nn.functional.binary_cross_entropy_with_logits,
        optimizer=torch.optim.Adam(model.parameters(), lr=rate),
        schema=tr.data.criteo(),
    )
"""


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in environment.VARIABLES:
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


def test_a_job_of_several_processes_saves_beside_the_file(
    folder: Path, tmp_path: Path, programs: Template
) -> None:
    launch = [programs.python, "-m", "trireme", "launch", "--server_num", "1"]
    launch += ["--worker_num", "2", "-m", str(folder / "config.yaml")]
    override = ["-o", "runner.model_save_path=launched", "runner.epochs=1", "runner.use_auc=False"]
    with Processes(tmp_path) as processes:
        processes.start("train", [*launch, *override, "runner.split_file_list=True"], {})
        output = processes.finish(100.0)["train"]
    (epoch,) = re.findall(r"run: epoch 0: .*", output)
    assert figures(epoch)["examples"] == 16000
    assert (folder / "launched" / "0" / "manifest.json").is_file()


def test_a_collective_job_on_gpus_trains_and_tests(
    folder: Path, tmp_path: Path, programs: Template
) -> None:
    launch = ["-m", "trireme", "launch", "--gpus", "0,1", "-m", str(folder / "config.yaml")]
    override = ["-o", "runner.model_save_path=collective", "runner.use_gpu=True"]
    override += ["runner.use_fleet=True", "runner.sync_mode=collective", "runner.epochs=1"]
    override += ["runner.infer_end_epoch=1", "runner.split_file_list=True"]
    env = {"TRIREME_DEVICE_GPU": "cpu"}
    (epoch,) = re.findall(r"run: epoch 0: .*", programs.run(tmp_path, [*launch, *override], env))
    assert figures(epoch)["examples"] == 16000
    (tested,) = re.findall(
        r"run: infer epoch 0: .*", programs.run(tmp_path, [*launch, "--infer", *override], env)
    )
    assert (figures(tested)["examples"], figures(tested)["auc"] > 0.8) == (NUM_TEST, True)
    output = programs.run(tmp_path, [*launch, "--max_restart", "1", *override], env, code=2)
    assert "trireme run would begin at its first epoch again" in output


def test_use_gpu_without_a_gpu_trains_on_the_cpu_with_a_warning(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["run", "-m", str(folder / "config.yaml"), "-o", "runner.use_gpu=True"]
    command.append("runner.epochs=1")
    if not torch.cuda.is_available():
        assert cli.main([*command, "runner.model_save_path=no_gpu"]) == 0
        assert re.search(r"runner\.use_gpu: .*expected a GPU.*: the CPU computes", caplog.text)
    caplog.clear()
    monkeypatch.setenv("TRIREME_DEVICE_GPU", "cpu")
    assert cli.main([*command, "runner.model_save_path=gpu"]) == 0
    assert "the CPU computes" not in caplog.text


def test_a_paddle_program_is_told_what_to_write_before_torch_is_loaded(tmp_path: Path) -> None:
    folder = tmp_path / "dnn"
    folder.mkdir()
    (folder / "config.yaml").write_text("runner: {model_path: static_model.py}\n")
    (folder / "static_model.py").write_text("import math\nimport paddle\n")
    program = (
        "import sys; from trireme.commands import cli;"
        "code = cli.main(['run', '-m', 'config.yaml']);"
        "print('torch' in sys.modules); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env=clean_environment(),
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout.strip()) == (2, "False")
    assert re.search(
        r"found a Paddle program, .*static_model\.py: write .*model\.py with create\(config\).*"
        r"trireme.models has this one: -o model=ctr_dnn",
        done.stderr,
    )


def test_a_model_beside_a_paddle_program_is_the_model(folder: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("runner: {model_path: static_model.py}\n")
    (tmp_path / "static_model.py").write_text("from paddle import nn\n")
    (tmp_path / "model.py").write_text(MODEL)
    loaded = Config.load(config)
    assert model_source(loaded, Settings.read(loaded)) == tmp_path / "model.py"
    named = Config.load(config, ["model=deepfm"])
    assert model_source(named, Settings.read(named)) == "deepfm"
    assert "runner.model_path" not in named.unread()


def test_a_reader_class_feeds_the_model_as_in_paddlerec(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    folder = sample.copy("dnn", tmp_path / "dnn")
    command = ["-m", str(folder / "config.yaml"), "-o", "runner.reader_type=DataLoader"]
    command.append("model=ctr_dnn")
    assert cli.main(["run", *command]) == 0
    assert cli.main(["run", "--infer", *command]) == 0
    trained = [line for line in caplog.messages if line.startswith("run: epoch")]
    tested = [line for line in caplog.messages if line.startswith("run: infer epoch")]
    assert [figures(line)["examples"] for line in trained] == [3000, 3000]
    assert [figures(line)["examples"] for line in tested] == [500, 500]
    assert figures(tested[1])["auc"] > 0.8
    assert "nothing reads it" not in caplog.text


@pytest.mark.parametrize(
    ("files", "overrides", "message"),
    [
        (
            {"model.py": None},
            [],
            r"expected a model, found none: write .*model\.py with create\(config\)",
        ),
        (
            {"model.py": None, "static_model.py": "x"},
            [],
            r"found none; static_model\.py is a Paddle program: write .*model\.py .*-o model=NAME",
        ),
        ({"model.py": "x = 1"}, [], r"model\.py: expected a function create"),
        ({"model.py": "def create(c): return 7"}, [], "a trireme.Recipe, found int"),
        ({}, ["model=nets/other.py"], r"expected a Python file, found none at .*nets/other\.py"),
        ({}, ["runner.train_data_dir="], "train_data_dir: expected a file, a folder or"),
        ({}, ["runner.train_data_dir=none"], "expected a file, found nothing at .*/none"),
        ({"empty/.hidden": "x"}, ["runner.train_data_dir=empty"], "files below .*empty, found"),
        ({"out/1/x": ""}, [], r"model_save_path: expected no epoch there yet, found .*out/1"),
        ({}, ["runner.warmup_model_path=out/7"], "out/7/manifest.json, found none"),
        ({}, ["runner.infer_load_path=out", "--infer"], "expected epoch 0 at .*out/0, found none"),
        (
            {"out/0/x": ""},
            ["--infer"],
            "expected epoch 1 at .*out/1, found none; -o runner.infer_end_epoch=1 evaluates those",
        ),
        (
            {"model.py": "import nets", "nets.py": "import torch\nfrom paddle.io import Dataset"},
            [],
            r"nets\.py, line 2: .*change it to 'from torch.utils.data import Dataset' \(docs/",
        ),
        ({"model.py": "\ndef create(:"}, [], r"model\.py, line 2: expected Python, found invalid"),
        ({}, [f"runner.model_save_path={'a' * 300}"], "model_save_path: .*: File name too long"),
        (
            {},
            ["runner.train_data_dir=none"],
            "runner.train_data_dir: expected a file, found nothing at '.*none'",
        ),
    ],
)
def test_wrong_configurations_end_with_an_error_before_training(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    files: dict[str, str | None],
    overrides: list[str],
    message: str,
) -> None:
    data = {"train/0.tsv": LINE, "test/0.tsv": LINE}
    for name, text in {"config.yaml": CONFIG, "model.py": MODEL, **data, **files}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if text is not None:
            path.write_text(text)
    options = [option for option in overrides if option.startswith("--")]
    values = [option for option in overrides if not option.startswith("--")]
    command = ["run", "-m", str(tmp_path / "config.yaml"), *options]
    assert cli.main([*command, *(["-o", *values] if values else [])]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_model_and_a_reader_may_declare_another_encoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    declared = "# -*- coding: gbk -*-\n# \u6a21\u578b\n"
    reader = f"{declared}import sys\nfor line in sys.stdin:\n    print(line, end='')\n"
    for name, text in {"model.py": declared + MODEL, "reader.py": reader}.items():
        (tmp_path / name).write_text(text, encoding="gbk")
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "0.tsv").write_text(LINE)
    (tmp_path / "config.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    command = ["run", "-m", "config.yaml", "-o"]
    assert cli.main([*command, "runner.pipe_command=python reader.py", "runner.epochs=1"]) == 0


def test_the_launcher_shows_a_workers_error_and_fails(tmp_path: Path, programs: Template) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "model.py").write_text("def create(config): raise RuntimeError('no such layer')")
    launch = [programs.python, "-m", "trireme", "launch", "--server_num", "1"]
    done = subprocess.run(
        [*launch, "--worker_num", "1", "-m", "config.yaml"],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 1
    assert "worker 0 failed with exit code 1" in done.stderr
    assert "RuntimeError: no such layer" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-m", "config.yaml", "-o", "runner.sync_mode=half"], "hybrid, collective, heter, gpubox"),
        (["-m", "none.yaml"], "cannot read 'none.yaml'"),
        (["-m", "config.yaml", "-o", "epochs"], "expected an override key=value, found 'epochs'"),
        (["-m", "config.yaml", "train.py"], "a script or -m config.yaml, found both: train.py"),
        (
            ["--infer", "train.py"],
            "expected -o, --infer and --stream with -m config.yaml, found train.py",
        ),
        ([], "expected a script or -m config.yaml, found neither"),
    ],
)
def test_the_launcher_finds_a_wrong_configuration_before_it_starts_anything(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["launch", "--server_num", "1", "--worker_num", "1", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "log").exists()


def test_models_for_inference_are_saved_beside_checkpoints(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    command = ["run", "-m", str(folder / "config.yaml"), "-o", "runner.use_inference=True"]
    command += ["runner.save_inference_feed_varnames=[C1]", "runner.epochs=1"]
    assert cli.main([*command, f"runner.model_save_path={tmp_path}"]) == 0
    assert f"for inference to {tmp_path}/inference/0" in caplog.text
    assert "runner.save_inference_feed_varnames: no effect: an exported model" in caplog.text
    test = next(iter((folder / "test").iterdir()))
    output = tmp_path / "scores"
    arguments = ["--format", "criteo", "--input", str(test), "--output", str(output)]
    assert cli.main(["predict", "-m", str(tmp_path / "inference/0"), *arguments]) == 0
    scores = [float(line) for line in output.read_text().splitlines()]
    assert len(scores) == len(test.read_text().splitlines())
    assert len(set(scores)) > 1
    assert cli.main([*command, "runner.model_save_path="]) == 2
