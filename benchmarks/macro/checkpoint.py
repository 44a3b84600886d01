"""Checkpoints and interchange: one module per group of workloads, together one benchmark."""

from __future__ import annotations

from benchmarks.harness import Contest, Settings
from benchmarks.macro import import_fleet, train_while_saving


def contests(settings: Settings) -> list[Contest]:
    return [*import_fleet.contests(settings), *train_while_saving.contests(settings)]
