"""A job at full speed keeps its memory and file descriptors: seconds here, ten minutes in `make
long`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from statistics import median

import pytest

from tests.integration.test_metrics import AT, families, start_server, values, worker
from tests.long import pick
from tests.programs import Template

SECONDS = pick(short=4.0, long=600.0)
WARM_STEPS = pick(short=150, long=1000)
PERIOD_S = 0.5
GROWTH_MAX = 1.05
METRICS = {"memory": "process_resident_memory_bytes", "descriptors": "process_open_fds"}

Reading = dict[str, float]


def read(url: str) -> Reading:
    scraped = families(url)
    return {what: values(scraped[name])[()] for what, name in METRICS.items()}


def steps(url: str) -> float:
    return values(families(url)["trireme_worker_steps"])[()]


def watch(urls: dict[str, str], seconds: float) -> dict[str, list[Reading]]:
    """What each process needed, in the order of time."""
    actual: dict[str, list[Reading]] = {name: [] for name in urls}
    pause, deadline = threading.Event(), time.monotonic() + seconds
    while time.monotonic() < deadline:
        for name, url in urls.items():
            actual[name].append(read(url))
        pause.wait(PERIOD_S)
    return actual


def check_flat(name: str, readings: Sequence[Reading]) -> None:
    """The last fifth beside the first: a leak grows, whatever comes and goes in between."""
    fifth = max(1, len(readings) // 5)
    first, last = readings[:fifth], readings[-fifth:]
    begin, end = (median(r["memory"] for r in part) for part in (first, last))
    open_before, open_after = (max(r["descriptors"] for r in part) for part in (first, last))
    print(
        f"{name}: {begin / 2**20:.1f} MiB, then {end / 2**20:.1f} ({end / begin - 1:+.2%});"
        f" {open_before:.0f} descriptors, then {open_after:.0f}; {len(readings)} readings"
    )
    assert end <= GROWTH_MAX * begin
    assert open_after <= open_before + 1  # that of a question beside ours


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_memory_and_descriptors_stay_flat(programs: Template, mode: str) -> None:
    with ExitStack() as stack:
        server, server_url, address = start_server(programs)
        stack.enter_context(server)
        training = stack.enter_context(worker(programs, address, "--mode", mode))
        urls = {"server": server_url, "worker": training.wait_line(AT)[1]}
        deadline = time.monotonic() + 80
        while (warm := steps(urls["worker"])) < WARM_STEPS:
            assert time.monotonic() < deadline, f"{warm} steps of {WARM_STEPS}"
        readings = watch(urls, SECONDS)
        done = steps(urls["worker"]) - warm
        print(f"{mode}: {done:.0f} steps in {SECONDS:g} s")
        assert done > 0
        for name in urls:
            check_flat(name, readings[name])
