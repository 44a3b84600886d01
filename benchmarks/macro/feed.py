"""Feeding: from files to batches. One module per group of workloads, together one benchmark."""

from __future__ import annotations

from benchmarks.harness import Contest, Settings
from benchmarks.macro import feed_memory, feed_parse, feed_pipe, feed_share


def contests(settings: Settings) -> list[Contest]:
    modules = (feed_parse, feed_share, feed_memory, feed_pipe)
    return [module.contest(settings) for module in modules]
