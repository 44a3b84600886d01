"""Passes on devices of two workers while these and servers are killed: the bits of a run without
kills and without passes; a pass that had not ended is repeated whole, by all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trireme as tr
from tests.integration import restarted_script as script
from tests.integration.durable_servers import DurableServers
from tests.integration.test_device_passes import assert_equal
from tests.integration.test_device_ranks import contents
from tests.jobs import Job
from tests.programs import Program, Template
from trireme.job.cluster import Cluster
from trireme.job.embedded import embedded

SCRIPT = str(Path(script.__file__))

# Which worker is held and killed, and where; the other then ends by itself.
HOLDS: dict[str, tuple[int, str]] = {
    "at the first step": (1, "answer:1:before"),
    "between two steps": (0, "answer:5:after"),
    "before the decision": (0, "end_device_pass:1:before"),
    "behind the decision": (0, "end_device_pass:1:after"),
    "in the last": (1, "answer:12:before"),
}


@contextmanager
def workers(
    programs: Template, servers: DurableServers, holds: dict[int, str], timeout_s: int = 60
) -> Iterator[list[Program]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(start(programs, servers, w, holds.get(w), timeout_s))
            for w in range(2)
        ]


def start(
    programs: Template, servers: DurableServers, worker: int, where: str | None, timeout_s: int = 60
) -> Program:
    env = {
        "TRIREME_TIMEOUT_S": str(timeout_s),
        "TRIREME_THREADS": "1",
        "TRIREME_ROLE": "worker",
        "TRIREME_SERVERS": ",".join(servers.addresses),
        "TRIREME_INDEX": str(worker),
        "TRIREME_NUM_WORKERS": "2",
    }
    arguments = [SCRIPT, str(servers.folder), "--passes"]
    arguments += [] if where is None else ["--hold", where]
    return programs.start(f"worker {worker}", arguments, env)


def make_trainer(cluster: Cluster) -> tr.Trainer:
    return script.make_trainer("sync", script.Model(tr.optim.Adam(lr=0.05)), cluster)


@pytest.fixture(scope="module")
def undisturbed() -> tuple[list[float], dict[str, np.ndarray]]:
    """The figures and contents of sync without passes."""
    with Job(1) as job:

        def work(cluster: Cluster) -> list[float]:
            return script.train_passes_together(make_trainer(cluster), on_device=False)

        figures, _ = job.run(2, work)
        return figures, contents([server.state for server in job.servers])


def loaded(path: Path) -> dict[str, np.ndarray]:
    with embedded() as cluster:
        make_trainer(cluster).load(path)
        assert cluster.server is not None
        return contents([cluster.server])


@pytest.mark.parametrize("name", HOLDS)
def test_a_killed_worker_ends_the_pass_for_all_and_all_repeat_it(
    programs: Template, tmp_path: Path, undisturbed: Any, name: str
) -> None:
    figures, expected = undisturbed
    worker, where = HOLDS[name]
    with DurableServers(programs, 2, tmp_path) as servers:
        with workers(programs, servers, {worker: where}) as programs_of:
            programs_of[worker].wait_line("^held$")
            programs_of[worker].kill()
            other = programs_of[1 - worker]
            assert other.finish() == 1
            assert "Unavailable: pass on devices: all-to-all of 2 workers: " in other.output
        with workers(programs, servers, {}) as programs_of:
            for program in programs_of:
                assert program.wait_line(r"^trained to (.*)$")[1] == repr(figures)
                program.wait_line("^done$")
    assert_equal(loaded(tmp_path / "last"), expected)
