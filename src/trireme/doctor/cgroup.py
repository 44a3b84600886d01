"""The limits that control groups, of version 1 or 2, set to this process: those of containers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_MOUNT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_UNLIMITED = 1 << 60
"""Version 1 writes no limit as the largest number of pages, in bytes."""


def quota_cores() -> float | None:
    """The cores' worth of time that all threads may use together; None: no quota."""
    quotas = []
    for folder in _folders("cpu"):
        quota, period = (_read(folder / "cpu.max").split() or ["max", "0"])[:2]
        if quota == "max":
            quota = _read(folder / "cpu.cfs_quota_us") or "-1"
            period = _read(folder / "cpu.cfs_period_us")
        if int(quota) > 0:
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def memory() -> tuple[int, int] | None:
    """(limit, free) bytes of memory where least is free; None: no limit. Files that are cached and
    were not used lately count as free.
    """
    limits = []
    for folder in _folders("memory"):
        limit = _read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes")
        used = _read(folder / "memory.current") or _read(folder / "memory.usage_in_bytes")
        if limit.isdecimal() and used and int(limit) < _UNLIMITED:
            free = int(limit) - int(used) + _inactive_bytes(folder)
            limits.append((int(limit), max(0, min(int(limit), free))))
    return min(limits, key=lambda pair: pair[1], default=None)


def _inactive_bytes(folder: Path) -> int:
    """Cached bytes of files, which the system frees first."""
    values = dict(line.split() for line in _read(folder / "memory.stat").splitlines())
    return int(values.get("total_inactive_file", values.get("inactive_file", 0)))


def _folders(controller: str) -> Iterator[Path]:
    """The groups of this process that a controller limits, innermost first. In a container whose
    groups have other names outside, only the outermost that it sees.
    """
    for line in _read(_OWN).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = _MOUNT / controller if controllers else _MOUNT
        own = mount / path.lstrip("/")
        yield from (own, *(above for above in own.parents if above.is_relative_to(mount)))


def _read(path: Path) -> str:
    """The text of a file of the kernel; "" where there is none."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
