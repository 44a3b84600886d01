"""Scripts of Fleet's documents run as they are written, alone and as jobs."""

from __future__ import annotations

import re
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from tests.ports import free_ports
from tests.programs import Template
from trireme.inference import Predictor

SCRIPTS = Path(__file__).with_name("fleet_scripts")
NUM_FILES, NUM_LINES = 4, 30
LAUNCH = ["-m", "trireme", "launch", "--server_num", "1", "--worker_num"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The scripts with data for the reader, and as MultiSlot text; clicks follow C1."""
    for script in SCRIPTS.glob("*.py"):
        shutil.copy(script, tmp_path)
    for name in ("data", "multislot"):
        (tmp_path / name).mkdir()
    for part in range(NUM_FILES):
        numbers = range(part * NUM_LINES, (part + 1) * NUM_LINES)
        lines = [(n % 3 % 2, n % 3, 10 + n % 7, 0.5, n / 100) for n in numbers]
        (tmp_path / "data" / f"part-{part}").write_text(
            "".join(f"{click} {a} {b} {x} {y}\n" for click, a, b, x, y in lines)
        )
        (tmp_path / "multislot" / f"part-{part}").write_text(
            "".join(f"1 {click} 1 {a} 1 {b}\n" for click, a, b, _, _ in lines)
        )
    return tmp_path


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_wide_and_deep_script_trains_saves_and_infers(
    num_workers: int, folder: Path, programs: Template
) -> None:
    launch = [*LAUNCH, str(num_workers)] if num_workers else []
    output = programs.run(folder, [*launch, "wide_deep.py"])
    if num_workers:
        output = (folder / "log" / "workerlog.0").read_text()
    trained = re.search(r"TRAINED (\d+) (\S+) (\d)", output)
    assert trained, output
    assert int(trained[1]) == NUM_FILES * NUM_LINES
    assert float(trained[2]) > 0.8
    assert int(trained[3]) == max(1, num_workers)
    assert "each read all of the same" not in output
    assert re.search(r"batch 2: loss [\d.]+, auc [\d.]+", output)
    assert all((folder / "ckpt" / str(epoch) / "manifest.json").is_file() for epoch in range(2))
    predictor = Predictor(folder / "inference")
    batch = {"C1": torch.tensor([0, 1]), "C2": torch.tensor([11, 11]), "dense": torch.ones(2, 2)}
    no, yes = predictor.predict(batch).outputs["output"].tolist()
    assert no < yes


def test_workers_with_the_same_list_of_files_are_named(folder: Path, programs: Template) -> None:
    script = folder / "wide_deep.py"
    script.write_text(script.read_text().replace("fleet.util.get_file_shard(files)", "files"))
    programs.run(folder, [*LAUNCH, "2", "wide_deep.py"])
    logs = [(folder / "log" / f"workerlog.{index}").read_text() for index in range(2)]
    warnings = ["workers 0, 1 each read all of the same 4 files" in log for log in logs]
    assert warnings == [True, False]
    assert re.search(rf"TRAINED {2 * NUM_FILES * NUM_LINES} ", logs[0])


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_gpups_script_trains_a_pass_on_the_device(
    num_workers: int, folder: Path, programs: Template
) -> None:
    launch = [*LAUNCH, str(num_workers)] if num_workers else []
    output = programs.run(folder, [*launch, "gpups.py"])
    if num_workers:
        output = (folder / "log" / "workerlog.0").read_text()
    trained = re.search(r"TRAINED (\d+) (\S+)", output)
    assert trained, output
    assert int(trained[1]) == NUM_FILES * NUM_LINES
    assert 0.1 < float(trained[2]) < 0.7
    assert "batch 1: loss" in output


def test_a_transpiled_script_serves_and_trains_step_by_step(
    folder: Path, programs: Template
) -> None:
    endpoint = f"127.0.0.1:{free_ports(['127.0.0.1'], 1)}"
    with ExitStack() as end:
        server, worker = (
            end.enter_context(
                programs.start(role, ["transpiled.py", role, endpoint], {}, folder=folder)
            )
            for role in ("PSERVER", "TRAINER")
        )
        assert (worker.finish(), server.finish()) == (0, 0), worker.output + server.output
    assert re.findall("trireme: (server|worker) 0 of 1", server.output) == ["server"]
    assert re.findall("trireme: (server|worker) 0 of 1", worker.output) == ["worker"]
    losses = re.search(r"LOSSES (\S+) (\S+) (\S+) (\S+) \(3,\) float32", worker.output)
    assert losses, worker.output
    values = [float(loss) for loss in losses.groups()]
    assert values == sorted(values, reverse=True)
    assert "Strategy('sync') Blocks(None" in worker.output
