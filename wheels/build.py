"""Build Trireme's source distribution and its wheels for the Pythons of this machine: `make wheel`.

Each wheel is built from the source distribution, so that a file which that lacks is missed here.
auditwheel then names the oldest systems on which the wheel runs, and refuses one that needs a
library of this machine. The last wheel is installed into a clean environment and used (`trial.py`).

Pythons from 3.12 on share one wheel, for the stable ABI; older ones need a wheel each.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "wheels"
TIMEOUT_S = 3600  # of a command; a build takes minutes
OLDEST, STABLE_ABI = (3, 10), (3, 12)
PYTHONS = "python3 python3.10 python3.11 python3.12 python3.13 python3.14"

_ASK = """
import os, sys, sysconfig
import ensurepip, venv
header = os.path.join(sysconfig.get_path("include"), "Python.h")
print(sys.executable, *sys.version_info[:2], os.path.isfile(header))
"""


class BuildError(Exception):
    """A wheel cannot be built, or does not work."""


@dataclass(frozen=True)
class Python:
    """An interpreter with which a wheel can be built."""

    executable: str
    version: tuple[int, int]

    @property
    def wheel(self) -> tuple[int, int]:
        """The oldest Python that its wheel is for."""
        return min(self.version, STABLE_ABI)


def find_python(command: str) -> Python:
    """The interpreter of a command or path. Raises BuildError: none that can build a wheel."""
    try:
        asked = subprocess.run([command, "-c", _ASK], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command}: expected a Python, found none ({error})") from error
    if asked.returncode:
        reason = asked.stderr.strip().splitlines()[:1] or ["no message"]
        raise BuildError(f"{command}: expected a Python with venv, found {reason[0]!r}")
    executable, major, minor, has_header = asked.stdout.rsplit(maxsplit=3)
    version = int(major), int(minor)
    if version < OLDEST:
        raise BuildError(f"{command}: expected Python >= 3.10, found {major}.{minor}")
    if has_header != "True":
        raise BuildError(f"{command}: expected Python.h (a package python3-dev), found none")
    return Python(executable, version)


def find_pythons(commands: Sequence[str], *, skip: bool) -> list[Python]:
    """One interpreter per version, in their order. skip: name those that are none, and go on."""
    pythons: dict[tuple[int, int], Python] = {}
    for command in commands:
        try:
            python = find_python(command)
        except BuildError as error:
            if not skip:
                raise
            say(str(error))
        else:
            pythons.setdefault(python.version, python)
    if not pythons:
        raise BuildError("expected a Python >= 3.10 with venv and Python.h, found none")
    return [pythons[version] for version in sorted(pythons)]


def say(text: str) -> None:
    print(f"wheel: {text}", flush=True)


def run(command: Sequence[str | Path], env: Mapping[str, str] | None = None) -> str:
    """The output of a command. Raises BuildError with its last lines: it failed."""
    try:
        done = subprocess.run(
            list(map(str, command)),
            cwd=ROOT,
            env={**os.environ, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise BuildError(str(error)) from error
    if done.returncode:
        end = "\n".join(done.stdout.splitlines()[-60:])
        raise BuildError(
            f"{' '.join(map(str, command[:6]))} ... exits with {done.returncode}:\n{end}"
        )
    return done.stdout


def tools(python: Python) -> Path:
    """The folder of programs of an environment with what builds wheels of a Python."""
    folder = FOLDER / "tools-{}.{}".format(*python.version)
    shutil.rmtree(folder, ignore_errors=True)
    run([python.executable, "-m", "venv", folder])
    pip = [folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check"]
    run([*pip, "install", "--quiet", "-r", ROOT / "wheels" / "requirements.txt"])
    return folder / "bin"


def build_source(programs: Path) -> Path:
    """The source distribution, in dist/."""
    code = "from scikit_build_core.build import build_sdist; print(build_sdist('dist'))"
    source = ROOT / "dist" / run([programs / "python", "-c", code]).split()[-1]
    say(f"{source.relative_to(ROOT)}: {source.stat().st_size / 1e6:.1f} MB")
    return source


def build_wheel(programs: Path, source: Path) -> Path:
    """A wheel in dist/, with its platform as auditwheel found it."""
    start = time.monotonic()
    raw, repaired = FOLDER / "raw", FOLDER / "repaired"
    for folder in (raw, repaired):
        shutil.rmtree(folder, ignore_errors=True)
    env = {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    env["CMAKE_BUILD_PARALLEL_LEVEL"] = str(len(os.sched_getaffinity(0)))
    pip = [programs / "python", "-m", "pip", "--disable-pip-version-check"]
    run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", raw, source], env)
    (built,) = raw.glob("*.whl")
    run([programs / "auditwheel", "repair", "--only-plat", "-w", repaired, built], env)
    (wheel,) = repaired.glob("*.whl")
    wheel = wheel.replace(ROOT / "dist" / wheel.name)
    seconds, size = time.monotonic() - start, wheel.stat().st_size
    say(f"{wheel.relative_to(ROOT)}: {size / 1e6:.1f} MB, {seconds:.0f} s")
    return wheel


def build(pythons: Sequence[Python]) -> None:
    """The source distribution and a wheel for each kind of Python, and a trial of the last."""
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    (ROOT / "dist").mkdir()
    source: Path | None = None
    wheels: dict[tuple[int, int], Path] = {}
    for python in pythons:
        if python.wheel in wheels:
            continue
        programs = tools(python)
        source = source or build_source(programs)
        wheels[python.wheel] = build_wheel(programs, source)
    versions = [f"3.{minor}" for minor in range(OLDEST[1], STABLE_ABI[1])]
    for version in [*versions, f"3.{STABLE_ABI[1]} and later"]:
        if not any(version.startswith("{}.{}".format(*oldest)) for oldest in wheels):
            say(f"none for Python {version}: name one with PYTHONS=")
    newest = pythons[-1]
    say(f"trying {wheels[newest.wheel].name} in a clean environment")
    run([newest.executable, ROOT / "wheels" / "trial.py", wheels[newest.wheel]])
    say("it trains, alone and as a job of two processes")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--pythons", help=f"commands or paths; default: those found of {PYTHONS}")
    arguments = parser.parse_args()
    try:
        named = arguments.pythons
        pythons = find_pythons((named or PYTHONS).split(), skip=not named)
        build(pythons)
    except BuildError as error:
        print(f"wheel: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
