"""Passes on devices of two workers while these and servers are killed: the bits of a run without
kills and without passes; a pass that had not ended is repeated whole, by all.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trireme as tr
from tests.integration import restarted_script as script
from tests.integration.durable_servers import DurableServers
from tests.integration.test_collective_jobs import torchrun_ranks
from tests.integration.test_device_pass_kills import kill_at
from tests.integration.test_device_passes import assert_equal
from tests.integration.test_device_ranks import contents
from tests.jobs import Job, in_threads
from tests.long import sample, sampled
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


HELD = [SCRIPT, "--passes", "--hold", "answer:5:before"]


@contextmanager
def workers(
    programs: Template, servers: DurableServers, holds: dict[int, str], how: str = "passes"
) -> Iterator[list[Program]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(start(programs, servers, w, holds.get(w), how)) for w in range(2)
        ]


def start(
    programs: Template, servers: DurableServers, worker: int, where: str | None, how: str = "passes"
) -> Program:
    env = {
        "TRIREME_TIMEOUT_S": "60",
        "TRIREME_THREADS": "1",
        "TRIREME_ROLE": "worker",
        "TRIREME_SERVERS": ",".join(servers.addresses),
        "TRIREME_INDEX": str(worker),
        "TRIREME_NUM_WORKERS": "2",
    }
    arguments = [SCRIPT, str(servers.folder), f"--{how}"]
    arguments += [] if where is None else ["--hold", where]
    return programs.start(f"worker {worker}", arguments, env)


def make_trainer(cluster: Cluster) -> tr.Trainer:
    return script.make_trainer("sync", script.Model(tr.optim.Adam(lr=0.05)), cluster)


@pytest.fixture(scope="module")
def undisturbed() -> tuple[list[float], dict[str, np.ndarray]]:
    """The figures and contents of sync without passes."""
    with Job(1) as job:

        def work(cluster: Cluster) -> list[float]:
            return script.train_passes_together(make_trainer(cluster), "plain")

        figures, _ = job.run(2, work)
        return figures, contents([server.state for server in job.servers])


def loaded(path: Path) -> dict[str, np.ndarray]:
    with embedded() as cluster:
        make_trainer(cluster).load(path)
        assert cluster.server is not None
        return contents([cluster.server])


@sampled(keep=5)
@pytest.mark.parametrize("how", ["passes", "following", "windows"])
@pytest.mark.parametrize("name", HOLDS)
def test_a_killed_worker_ends_the_pass_for_all_and_all_repeat_it(
    programs: Template, tmp_path: Path, undisturbed: Any, name: str, how: str
) -> None:
    figures, expected = undisturbed
    worker, where = HOLDS[name]
    with DurableServers(programs, 2, tmp_path) as servers:
        with workers(programs, servers, {worker: where}, how) as programs_of:
            programs_of[worker].wait_line("^held$")
            programs_of[worker].kill()
            other = programs_of[1 - worker]
            assert other.finish() == 1
            assert "Unavailable: pass on devices: all-to-all of 2 workers: " in other.output
        with workers(programs, servers, {}, how) as programs_of:
            for program in programs_of:
                assert program.wait_line(r"^trained to (.*)$")[1] == repr(figures)
                program.wait_line("^done$")
    assert_equal(loaded(tmp_path / "last"), expected)


def test_a_worker_killed_before_all_have_met_is_replaced_alone(
    programs: Template, tmp_path: Path, undisturbed: Any
) -> None:
    figures, expected = undisturbed
    with ExitStack() as stack:
        servers = stack.enter_context(DurableServers(programs, 2, tmp_path))
        first = stack.enter_context(start(programs, servers, 0, None))
        killed = stack.enter_context(start(programs, servers, 1, "meet_in_pass:1:before"))
        killed.wait_line("^held$")
        killed.kill()
        second = stack.enter_context(start(programs, servers, 1, None))
        for program in (first, second):
            assert program.wait_line(r"^trained to (.*)$")[1] == repr(figures)
            program.wait_line("^done$")
    assert_equal(loaded(tmp_path / "last"), expected)


@pytest.mark.parametrize("how", ["passes", "windows"])
def test_a_worker_killed_while_another_waits_at_a_meeting_within_the_pass_is_not_waited_for(
    programs: Template, tmp_path: Path, undisturbed: Any, how: str
) -> None:
    """Its successor begins the pass again, and waits for the other to do so, too."""
    figures, expected = undisturbed
    with ExitStack() as stack:
        servers = stack.enter_context(DurableServers(programs, 2, tmp_path))
        first = stack.enter_context(start(programs, servers, 0, None, how))
        where = "gather:2:before"  # of the figures; all steps have been made
        killed = stack.enter_context(start(programs, servers, 1, where, how))
        killed.wait_line("^held$")
        killed.kill()
        second = stack.enter_context(start(programs, servers, 1, None, how))
        assert first.finish() == 1
        assert "Unavailable: " in first.output
        assert "workers [1] have been restarted and begin pass 1 on devices again" in first.output
        first = stack.enter_context(start(programs, servers, 0, None, how))
        for program in (first, second):
            assert program.wait_line(r"^trained to (.*)$")[1] == repr(figures)
            program.wait_line("^done$")
    assert_equal(loaded(tmp_path / "last"), expected)


def test_a_worker_killed_behind_the_meeting_is_missed_in_time(
    programs: Template, tmp_path: Path
) -> None:
    env = {"TRIREME_TIMEOUT_S": "3", "TRIREME_ROOT": str(tmp_path)}
    script_of = [SCRIPT, "--passes", "--hold", "meet_in_pass:1:after"]
    with torchrun_ranks(2, [*script_of, str(tmp_path)], programs, **env) as ranks:
        for rank in ranks:
            rank.wait_line("^held$")
        ranks[1].kill()
        ranks[0].send("go on")
        assert ranks[0].finish() == 1
        assert "DeadlineExceeded: pass on devices: the workers' process group" in ranks[0].output


def test_a_pass_does_not_end_when_a_worker_of_it_has_a_successor(
    programs: Template, tmp_path: Path, undisturbed: Any
) -> None:
    figures, expected = undisturbed
    with ExitStack() as stack:
        servers = stack.enter_context(DurableServers(programs, 2, tmp_path))
        with workers(programs, servers, {0: "end_device_pass:1:before"}) as (first, second):
            first.wait_line("^held$")
            second.kill()
            successor = stack.enter_context(start(programs, servers, 1, "create_table:1:before"))
            successor.wait_line("^held$")  # it has joined; what follows waits for the first
            first.send("go on")
            assert first.finish() == 1
            assert "Unavailable" in first.output
        successor.send("go on")
        again = stack.enter_context(start(programs, servers, 0, None))
        for program in (again, successor):
            assert program.wait_line(r"^trained to (.*)$")[1] == repr(figures)
            program.wait_line("^done$")
    assert_equal(loaded(tmp_path / "last"), expected)


@pytest.mark.parametrize(
    ("worker", "method", "how"),
    sample(
        [
            *(
                (worker, method, "passes")
                for worker in (0, 1)
                for method in ("ps.rows", "import.wide")
            ),
            *(
                (0, method, "passes") for method in ("import.prepare", "import.finish")
            ),  # it alone does
            *((worker, "ps.rows aside", "following") for worker in (0, 1)),
        ],
        keep=5,
    ),
)
def test_a_server_killed_in_a_pass_costs_no_update(
    programs: Template, tmp_path: Path, undisturbed: Any, worker: int, method: str, how: str
) -> None:
    figures, expected = undisturbed
    num_kills = []
    with DurableServers(programs, 2, tmp_path) as servers:

        def work(number: int) -> list[float]:
            cluster = servers.join(number, 2)
            trainer = make_trainer(cluster)
            if number == worker:
                num_kills.append(kill_at(servers, cluster.client.servers, method, 1))
            trained = script.train_passes_together(trainer, how)
            trainer.save(tmp_path / "last")
            cluster.close()
            return trained

        assert in_threads([lambda: work(0), lambda: work(1)]) == [figures, figures]
        assert [count() for count in num_kills] == [1]
    assert_equal(loaded(tmp_path / "last"), expected)


def test_a_killed_worker_that_hosts_rows_is_named(programs: Template, tmp_path: Path) -> None:
    env = {"TRIREME_TIMEOUT_S": "10", "TRIREME_ROOT": str(tmp_path)}
    with torchrun_ranks(2, [*HELD, str(tmp_path)], programs, **env) as ranks:
        for rank in ranks:
            rank.wait_line("^held$")
        ranks[1].kill()
        ranks[0].send("go on")
        assert ranks[0].finish() == 1
        assert "pass on devices: all-to-all of 2 workers: workers [1] have gone" in ranks[0].output
        assert "workers that hosted rows have gone" in ranks[0].output


def test_a_worker_that_stops_is_named_at_the_deadline(programs: Template, tmp_path: Path) -> None:
    env = {"TRIREME_TIMEOUT_S": "2", "TRIREME_ROOT": str(tmp_path)}
    with torchrun_ranks(2, [*HELD, str(tmp_path)], programs, **env) as ranks:
        for rank in ranks:
            rank.wait_line("^held$")
        ranks[1].signal(signal.SIGSTOP)
        ranks[0].send("go on")
        assert ranks[0].finish() == 1
        assert re.search(
            r"DeadlineExceeded: pass on devices: all-to-all of 2 workers: not complete within 2 s;"
            r" silent: workers \[1\]",
            ranks[0].output,
        )
