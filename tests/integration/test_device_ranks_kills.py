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

from tests.integration import device_ranks_script as script
from tests.integration.durable_servers import DurableServers
from tests.integration.test_device_passes import assert_equal, contents
from tests.jobs import Job
from tests.programs import Program, Template
from trireme.job.cluster import Cluster
from trireme.job.embedded import embedded

SCRIPT = str(Path(script.__file__))
GONE = "a worker has gone|have gone"

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
            stack.enter_context(start(programs, servers, w, holds.get(w, "none"), timeout_s))
            for w in range(2)
        ]


def start(
    programs: Template, servers: DurableServers, worker: int, where: str, timeout_s: int = 60
) -> Program:
    env = {
        "TRIREME_TIMEOUT_S": str(timeout_s),
        "TRIREME_THREADS": "1",
        "TRIREME_ROLE": "worker",
        "TRIREME_SERVERS": ",".join(servers.addresses),
        "TRIREME_INDEX": str(worker),
        "TRIREME_NUM_WORKERS": "2",
    }
    arguments = [SCRIPT, str(servers.folder), "sync", where]
    return programs.start(f"worker {worker}", arguments, env)


@pytest.fixture(scope="module")
def undisturbed() -> tuple[list[float], Path | None, dict[str, np.ndarray]]:
    """The figures and contents of sync without passes."""
    with Job(1) as job:

        def work(cluster: Cluster) -> list[float]:
            return script.train(script.make_trainer(cluster, "sync"), on_device=False)

        [figures, _] = job.run(2, work)
        return figures, None, state_contents(job)


def state_contents(job: Job) -> dict[str, np.ndarray]:
    from tests.integration.test_device_ranks import contents as contents_of

    return contents_of([server.state for server in job.servers])


def loaded(path: Path) -> dict[str, np.ndarray]:
    with embedded() as cluster:
        script.make_trainer(cluster, "sync").load(path)
        return contents(cluster)


@pytest.mark.parametrize("name", HOLDS)
def test_a_killed_worker_ends_the_pass_for_all_and_all_repeat_it(
    programs: Template, tmp_path: Path, undisturbed: Any, name: str
) -> None:
    figures, _, expected = undisturbed
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
