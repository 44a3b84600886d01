"""A slow server slows its clients down; no queue grows on either side."""

from __future__ import annotations

import signal
from collections.abc import Mapping

import pytest
from prometheus_client import Metric

from tests.integration.test_metrics import (
    AT,
    families,
    start_server,
    values,
    wait_for_health,
    worker,
)
from tests.programs import Template
from trireme.train.modes.on_servers.push_stream import WAITING_MAX

MIB = 1 << 20
DEPTH = 2  # batches that a Pipeline plans ahead


def number(families: Mapping[str, Metric], name: str) -> float:
    return values(families[name])[()]


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_suspended_server_stops_its_worker_within_its_queues(
    programs: Template, mode: str
) -> None:
    server, server_url, address = start_server(programs)
    with server, worker(programs, address, "--mode", mode) as training:
        url = training.wait_line(AT)[1]
        training.wait_line(r"^batch 99$")
        before = families(server_url)
        server.signal(signal.SIGSTOP)
        training.wait_line(r"no answer for 3 s")
        stopped = families(url)
        training.wait_line(r"no answer for 6 s")
        later = families(url)
        queues = values(later["trireme_worker_queue_depth"], "queue")
        assert queues["planned",] <= DEPTH
        assert queues["pulled",] <= 1
        assert queues.get(("pushes",), 0) <= WAITING_MAX + 1
        steps = number(later, "trireme_worker_steps") - number(stopped, "trireme_worker_steps")
        assert steps <= WAITING_MAX + 1
        memory = "process_resident_memory_bytes"
        assert number(later, memory) - number(stopped, memory) < 32 * MIB
        server.signal(signal.SIGCONT)
        wait_for_health(url, "ok\n")
        training.wait_line(r"^batch \d+$")
        after = families(server_url)
        # One connection for pulls, one for pushes, two more: each has a request or none.
        assert number(after, "trireme_server_queue_bytes") < MIB
        assert number(after, memory) - number(before, memory) < 32 * MIB
