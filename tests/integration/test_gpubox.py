"""sync_mode gpubox of PaddleRec's configurations: an epoch is a pass on the GPU, for which the CPU
stands in here, with the bits of sync.
"""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path

import numpy as np
import pytest

import trireme as tr
from tests.integration.processes import Processes, clean_environment
from tests.integration.test_device_passes import assert_equal, contents
from tests.paddlerec import sample
from tests.programs import Template
from trireme.commands import cli
from trireme.config import Config
from trireme.errors import BadRequest
from trireme.job.default import set_default
from trireme.job.embedded import embedded
from trireme.launch import environment
from trireme.run.settings import Settings
from trireme.run.stream import stream
from trireme.train.modes.device_pass import pass_mode

MODELS = {"dnn": "ctr_dnn", "wide_deep": "wide_deep"}
# As PaddleRec's config_gpubox.yaml differs from its config.yaml.
OVERRIDES = ["runner.use_gpu=True", "runner.reader_type=InmemoryDataset", "runner.seed=5"]
GPUBOX = ["runner.sync_mode=gpubox", "runner.use_fleet=True"]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in environment.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", clean_environment()["PYTHONPATH"])  # of reader scripts
    monkeypatch.setenv("TRIREME_DEVICE_GPU", "cpu")


def saved(folder: Path, name: str, model: str) -> dict[str, np.ndarray]:
    """What the last epoch of a run has saved, through a job of one process."""
    with embedded() as cluster:
        set_default(cluster)
        create = importlib.import_module(f"trireme.models.{model}").create
        recipe = create(Config.load(folder / "config.yaml", []))
        tr.Trainer.from_recipe(recipe, progress=False).load(folder / name / "1")
        return contents(cluster)


@pytest.mark.parametrize(("name", "servers"), [("dnn", 0), ("wide_deep", 2)])
def test_gpubox_gives_the_results_of_the_same_configuration_without_passes(
    name: str,
    servers: int,
    tmp_path: Path,
    programs: Template,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, model = sample.copy(name, tmp_path / name), MODELS[name]
    common = ["-m", "config.yaml", "-o", f"model={model}", *OVERRIDES]
    monkeypatch.chdir(folder)
    assert cli.main(["run", *common, "runner.sync_mode=sync", "runner.model_save_path=plain"]) == 0
    gpubox = [*common, *GPUBOX, "runner.model_save_path=passes"]
    if servers:
        launch = [programs.python, "-m", "trireme", "launch", "--server_num", str(servers)]
        with Processes(folder) as processes:
            job = [*launch, "--worker_num", "1", *gpubox]
            processes.start("job", job, {"TRIREME_DEVICE_GPU": "cpu"})
            processes.finish(100.0)
    else:
        ends = []
        end = pass_mode.DevicePass.end_device_pass
        monkeypatch.setattr(
            pass_mode.DevicePass,
            "end_device_pass",
            lambda self: ends.append(self.num_steps) or end(self),
        )
        assert cli.main(["run", *gpubox]) == 0
        assert ends == [60, 120]
    actual, expected = saved(folder, "passes", model), saved(folder, "plain", model)
    assert len(expected) > 200
    assert_equal(actual, expected)


@pytest.mark.parametrize(
    "override",
    ["runner.use_gpu=False", "runner.reader_type=QueueDataset", "runner.reader_type=DataLoader"],
)
def test_gpubox_refuses_what_passes_do_not_train(override: str, tmp_path: Path) -> None:
    folder = tmp_path / "dnn"
    shutil.copytree(sample.HERE / "dnn", folder)
    arguments = [*OVERRIDES, *GPUBOX, override]
    config = Config.load(folder / "config.yaml", arguments)
    with pytest.raises(BadRequest, match="expected reader_type: InMemoryDataset and use_gpu: True"):
        Settings.read(config)


def test_streams_refuse_gpubox(tmp_path: Path) -> None:
    folder = tmp_path / "slot_dnn"
    shutil.copytree(sample.HERE / "slot_dnn", folder)
    with pytest.raises(BadRequest, match="another mode than gpubox in `trireme stream`"):
        stream(Config.load(folder / "config.yaml", [*OVERRIDES, *GPUBOX]))
