"""The stand-in for python in launched jobs: its programs end, and are ended, like real ones."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from tests.programs import Template

READY = "import os, signal, sys; print(os.getpid(), flush=True); "


def start(programs: Template, folder: Path, code: str) -> subprocess.Popen[str]:
    (folder / "script.py").write_text(READY + code)
    return subprocess.Popen(
        [programs.python, "script.py", "7"], cwd=folder, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("sys.exit(int(sys.argv[1]))", 7),
        ("os.kill(os.getpid(), signal.SIGABRT)", -signal.SIGABRT),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("os.kill(os.getpid(), signal.SIGINT); signal.pause()", -signal.SIGINT),
        ("sys.exit('a message')", 1),
    ],
)
def test_it_ends_as_its_program_ends(
    programs: Template, tmp_path: Path, code: str, expected: int
) -> None:
    with start(programs, tmp_path, code) as process:
        assert process.wait(60) == expected


def test_a_signal_reaches_the_program(programs: Template, tmp_path: Path) -> None:
    wait = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(3)); print(1, flush=True)"
    with start(programs, tmp_path, f"{wait}; signal.pause()") as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.readline()
        process.terminate()
        assert process.wait(60) == 3


def test_its_program_is_killed_with_it(programs: Template, tmp_path: Path) -> None:
    with start(programs, tmp_path, "signal.pause()") as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.kill()
        assert process.stdout.read() == "", "the program has closed its output"


def test_other_arguments_run_the_real_python(programs: Template) -> None:
    command = [programs.python, "-c", "import sys; print('torch' in sys.modules)"]
    assert subprocess.run(command, capture_output=True, text=True, timeout=60).stdout == "False\n"


def test_it_ends_with_the_functions_for_its_exit(programs: Template, tmp_path: Path) -> None:
    """Threads are waited for, then functions of atexit run, then what was printed is written."""
    code = """
import atexit, sys, threading, time
atexit.register(lambda: print("at exit", sys.last_type.__name__, sys.last_value))
threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
raise KeyError("missing")
"""
    (tmp_path / "script.py").write_text(code)
    done = subprocess.run(
        [programs.python, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert done.stdout == "thread\nat exit KeyError 'missing'\n"
    assert done.stderr.endswith("KeyError: 'missing'\n")
