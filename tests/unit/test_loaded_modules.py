"""A Predictor loads neither servers nor training code; a worker loads no server, nor does that
which workers are forked from.
"""

from __future__ import annotations

import subprocess
import sys

PREDICTOR = (
    *("train", "models", "server", "worker", "coordinator", "job"),
    *("checkpoint", "launch", "rpc", "run", "fleet"),
)
WORKER = ("server", "coordinator", "checkpoint.server_side", "interchange.server_side")


def loaded(program: str, packages: tuple[str, ...]) -> list[str]:
    """Modules of these packages of trireme that a program loads."""
    code = f"import sys\n{program}\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    prefixes = tuple(f"trireme.{package}." for package in packages)
    return [name for name in done.stdout.split() if f"{name}.".startswith(prefixes)]


def test_a_predictor_loads_no_training_code_and_no_servers() -> None:
    assert loaded("import trireme.inference", PREDICTOR) == []


def test_a_worker_loads_no_server() -> None:
    program = "import trireme.launch.init, trireme.job.connecting, trireme.train.trainer"
    assert loaded(program, WORKER) == []
    assert loaded("import trireme.job.embedded", WORKER) != []


def test_a_fork_server_loads_only_what_all_roles_do() -> None:
    program = "from trireme.launch import fork_server_program; fork_server_program.load()"
    assert loaded(program, (*WORKER, "worker", "job", "nn", "data", "train")) == []
