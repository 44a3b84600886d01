"""Processes load what they use: nothing of torch's compiler where nothing is compiled."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.criteo_folder import write_criteo_folder
from tests.programs import clean_environment

EXAMPLE = Path(__file__).parents[2] / "examples" / "train.py"
UNUSED = ("sympy", "torch._dynamo", "torch._inductor", "torch.onnx", "rich", "yaml", "pandas")
# The example, which ends with the names of the unused modules that its process has loaded.
SCRIPT = f"""
import atexit, os, runpy, sys

@atexit.register
def report():
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
    assert "alone has loaded []" in run(script)


def test_a_command_ends_without_a_search_of_all_that_it_has_loaded() -> None:
    code = """
import atexit, gc
atexit.register(lambda: print("frozen", gc.get_freeze_count() > 0))  # runs behind later ones
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


def test_workers_and_servers_load_no_compiler(script: Path) -> None:
    run(script, "-m", "trireme", "launch", "--server_num", "1", "--worker_num", "1")
    log = script.parent / "log"
    assert "worker has loaded []" in (log / "workerlog.0").read_text()
    assert "server has loaded []" in (log / "serverlog.0").read_text()
