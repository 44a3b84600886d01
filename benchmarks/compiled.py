"""Programs of benchmarks/micro in C++, compiled when they are measured."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import Absent, Settings

_ROOT = Path(__file__).parents[1]


def compiled(settings: Settings, name: str, options: Sequence[str]) -> str:
    """The path of a program. options: of the compiler. Raises Absent: it cannot be compiled
    here.
    """
    target = _ROOT / "build" / "benchmarks" / name
    target.parent.mkdir(parents=True, exist_ok=True)
    compiler = shutil.which("g++")
    if compiler is None:
        raise Absent(f"{name}: needs g++")
    level = settings.pick(smoke="-O1", real="-O3")
    source = _ROOT / "benchmarks" / "micro" / f"{name}.cc"
    command = [compiler, level, "-std=c++20", str(source), "-o", str(target)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[:1]
        raise Absent(f"{name}: cannot be compiled here (Debian: librocksdb-dev): {last}")
    return str(target)
