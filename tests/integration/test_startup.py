"""Processes load what they use, and end without a search of all that they have loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.criteo_folder import write_criteo_folder
from tests.programs import clean_environment
from trireme.commands import cli

EXAMPLE = Path(__file__).parents[2] / "examples" / "train.py"
COMPILER = ("sympy", "torch._dynamo", "torch._inductor", "torch.onnx", "triton")
UNUSED = (*COMPILER, "rich", "yaml", "pandas", "matplotlib", "pyarrow.compute", "pyarrow.dataset")
# Of a command that only reads its arguments, or starts processes and waits for them.
HEAVY = (*UNUSED, "torch", "numpy", "pyarrow", "zmq", "fsspec", "prometheus_client")
# The example, which ends with the names of the unused modules that its process has loaded, and says
# if objects of the script are searched for cycles then.
SCRIPT = f"""
import atexit, os, runpy, sys

class Cycle:
    def __init__(self):
        self.cycle, self.write = self, os.write

    def __del__(self):
        self.write(1, b"searched\\n")

kept = [Cycle()]

@atexit.register
def report():  # runs behind what may freeze all objects
    kept.clear()
    loaded = [name for name in {UNUSED} if name in sys.modules]
    print(os.environ.get("TRIREME_ROLE", "alone"), "has loaded", loaded, flush=True)

runpy.run_path({str(EXAMPLE)!r}, run_name="__main__")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    write_criteo_folder(tmp_path)
    path = tmp_path / "report.py"
    path.write_text(SCRIPT)
    return path


def run(script: Path, *arguments: str) -> str:
    command = [sys.executable, *arguments, str(script)]
    done = subprocess.run(
        command,
        cwd=script.parent,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_job_in_one_process_loads_no_compiler(script: Path) -> None:
    assert "alone has loaded []\nsearched\n" in run(script)


CONFIG = """
runner: {train_data_dir: train, epochs: 1, train_batch_size: 4096, model_save_path: out}
"""
MODEL = """
import torch
import trireme as tr

def create(config):
    rows = tr.Table("ctr", dim=2)
    model = tr.models.CtrDnn(rows, features=[f"C{i}" for i in range(1, 27)], layers=[4])
    return tr.Recipe(
        model=model,
        loss=torch.nn.functional.binary_cross_entropy_with_logits,
        optimizer=torch.optim.Adam(model.parameters()),
        schema=tr.data.criteo(),
    )
"""


def loaded_by(folder: Path, names: tuple[str, ...], *command: str) -> list[str]:
    """Which of the modules a command has loaded at its end."""
    path = folder / "loaded.txt"
    code = f"""
import atexit, sys

@atexit.register
def report():
    open({str(path)!r}, "w").write(" ".join(n for n in {names} if n in sys.modules))

from trireme.commands import cli
sys.exit(cli.main({list(command)}))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return path.read_text().split()


HELPS = [["--help"], ["version"], *([name, "--help"] for name in cli.COMMANDS)]


@pytest.mark.parametrize("command", HELPS, ids=" ".join)
def test_a_help_loads_nothing_heavy(command: list[str], tmp_path: Path) -> None:
    assert loaded_by(tmp_path, HEAVY, *command) == []


def test_a_launcher_loads_nothing_heavy(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("")  # of a server and a worker that end at once
    command = ["launch", "--server_num", "1", "--worker_num", "1", "script.py"]
    assert loaded_by(tmp_path, HEAVY, *command) == []


def test_a_run_loads_nothing_that_it_does_not_use(tmp_path: Path) -> None:
    write_criteo_folder(tmp_path, repeats=2)
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "model.py").write_text(MODEL)
    unused = tuple(name for name in UNUSED if name != "yaml")  # which it reads
    assert loaded_by(tmp_path, unused, "run", "-m", "config.yaml") == []


def test_a_command_ends_without_a_search_of_all_that_it_has_loaded() -> None:
    code = """
import atexit, gc
by_python = gc.get_freeze_count()
atexit.register(lambda: print("frozen", gc.get_freeze_count() > by_python))  # behind later ones
from trireme.commands import cli
cli.main(["version"])
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.splitlines()[-1] == "frozen True", done.stderr


def test_forked_workers_and_servers_load_no_compiler(script: Path) -> None:
    place = ("--server_num", "1", "--worker_num", "1", "--start_method", "forkserver")
    run(script, "-m", "trireme", "launch", *place)
    log = script.parent / "log"
    assert (log / "workerlog.0").read_text().endswith("worker has loaded []\nsearched\n")
    assert (log / "serverlog.0").read_text().endswith("server has loaded []\n")
