"""Processes that get a part of a core each, by cgroups of Linux (version 1 or 2)."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from benchmarks.harness import Absent

_ROOTS = {1: Path("/sys/fs/cgroup/cpu"), 2: Path("/sys/fs/cgroup")}
_PERIOD_US = 20_000
_WEIGHT = 10_000  # over other work of the machine, whose processes have 1024 or 100


@contextmanager
def cgroups(cores: Mapping[str, float]) -> Iterator[Path]:
    """Groups by name, each with so many cores; a process joins by `join(FOLDER / NAME)`.

    Raises:
        Absent: this process may not make groups that limit the CPU.
    """
    version = 1 if (_ROOTS[1] / "cpu.cfs_quota_us").exists() else 2
    folder = _ROOTS[version] / f"trireme-{uuid.uuid4().hex[:8]}"
    made: list[Path] = []
    try:
        try:
            for group in (folder, *(folder / name for name in cores)):
                group.mkdir()
                made.append(group)
                if version == 2 and group == folder:
                    (folder / "cgroup.subtree_control").write_text("+cpu")
            _weigh(folder, version)
            for name, share in cores.items():
                _limit(folder / name, version, share)
        except OSError as error:
            raise Absent(f"it needs cgroups whose CPU it may limit: {error}") from error
        yield folder
    finally:
        for group in reversed(made):
            group.rmdir()


def _weigh(group: Path, version: int) -> None:
    (group / ("cpu.shares" if version == 1 else "cpu.weight")).write_text(str(_WEIGHT))


def _limit(group: Path, version: int, share: float) -> None:
    quota = int(share * _PERIOD_US)
    if version == 2:
        (group / "cpu.max").write_text(f"{quota} {_PERIOD_US}")
        return
    (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
    (group / "cpu.cfs_quota_us").write_text(str(quota))


def join(group: Path) -> None:
    """Let this process, and those that it starts, use the cores of the group."""
    (group / "cgroup.procs").write_text(str(os.getpid()))
