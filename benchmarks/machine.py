"""The header line of every run: what results depend on besides the code."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

_LOADED_ABOVE = 0.3  # mean number of runnable processes in the minute before the start
_DISTRIBUTIONS = ("trireme-ps", "torch", "numpy", "pyzmq")


def header(*, is_smoke: bool) -> dict[str, Any]:
    """Commit, machine, versions, date, and whether the machine was busy before the run."""
    load_1m = os.getloadavg()[0]
    return {
        "bench": "header",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "mode": "smoke" if is_smoke else "real",
        "command": " ".join(["python -m benchmarks", *sys.argv[1:]]),
        "commit": _commit(),
        "machine": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _DISTRIBUTIONS},
        "load_1m": round(load_1m, 2),
        "is_loaded": load_1m > _LOADED_ABOVE,
    }


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None  # trireme-ps itself, when it runs from its source tree


def _commit() -> str:
    """The commit of the source tree, with + if the tree differs from it."""
    folder = Path(__file__).parent

    def git(*args: str) -> str:
        done = subprocess.run(["git", *args], cwd=folder, capture_output=True, text=True)
        return done.stdout.strip()

    try:
        is_changed = bool(git("status", "--porcelain"))
        return git("rev-parse", "--short=12", "HEAD") + ("+" if is_changed else "")
    except OSError:
        return "unknown"


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
