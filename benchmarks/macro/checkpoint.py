"""Checkpoints and interchange: one module per group of workloads, together one benchmark."""

from __future__ import annotations

from benchmarks.harness import Contest, Settings
from benchmarks.macro import import_fleet, save_load, train_while_saving


def contests(settings: Settings) -> list[Contest]:
    modules = (import_fleet, save_load, train_while_saving)
    return [contest for module in modules for contest in module.contests(settings)]
