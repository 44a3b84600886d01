"""Runs a training script in a process of its own to measure it as one type of machine would."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from trireme.children import PROGRAM
from trireme.errors import BadRequest, DeadlineExceeded
from trireme.launch.environment import PLACE_VARIABLES, inherited
from trireme.place import script_program
from trireme.place.machine_types import MachineType
from trireme.place.measurements import Measurements


def measure_script(
    script: Path, arguments: Sequence[str], kind: MachineType, *, timeout_s: float
) -> Measurements:
    """What the script needs on a machine of this type, measured on this one. The script's output
    goes to stderr.

    Raises:
        BadRequest: this machine has fewer cores; the script failed, or ended before it trained.
        DeadlineExceeded: it was not measured in time, and was killed.
    """
    if not script.is_file():
        raise BadRequest(f"place: expected SCRIPT to be a file, found {str(script)!r}")
    num_cores = len(os.sched_getaffinity(0))
    if kind.cores > num_cores:
        raise BadRequest(
            f"place: expected at least the {kind.cores} cores of type {kind.name!r} to measure it"
            f" here, found {num_cores}; on such a machine: trireme place {script} --types FILE"
            f" --type {kind.name} --measure {kind.name}.json, and here --from {kind.name}.json"
        )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "measured.json"
        _run(script, arguments, kind, file, timeout_s)
        return Measurements.load(file)


def _run(
    script: Path, arguments: Sequence[str], kind: MachineType, file: Path, timeout_s: float
) -> None:
    program = [sys.executable, "-m", script_program.__name__]
    facts = [str(file), kind.name, str(kind.cores), kind.device]
    shim = [sys.executable, "-I", "-S", PROGRAM, "run", str(os.getpid())]  # it ends with this one
    try:
        code = subprocess.run(
            [*shim, *program, *facts, str(script), *arguments],
            env=_environment(kind),
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            timeout=timeout_s,
            check=False,
        ).returncode
    except subprocess.TimeoutExpired:
        raise DeadlineExceeded(
            f"place: expected {script} to be measured on type {kind.name!r} within {timeout_s:g} s,"
            " found it still running; --timeout_s S waits longer"
        ) from None
    expected = f"place: expected {script} to call Trainer.fit or Trainer.evaluate, found that it"
    if code == script_program.NOT_TRAINED or (code == 0 and not file.exists()):
        raise BadRequest(f"{expected} ended without")
    if code != 0:
        raise BadRequest(f"{expected} ended with code {code}; what it printed is above")


def _environment(kind: MachineType) -> dict[str, str]:
    """This process's, for a script that trains alone on the cores of the type."""
    kept = {name: value for name, value in inherited().items() if name not in PLACE_VARIABLES}
    own = {"TRIREME_ROLE": "embedded", "PYTHONUNBUFFERED": "1"}
    own |= dict.fromkeys(("OMP_NUM_THREADS", "TRIREME_THREADS"), str(kind.cores))
    if kind.device == "cpu":
        own["TRIREME_DEVICE_GPU"] = "cpu"
    return kept | own
