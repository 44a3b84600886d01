"""Passes on a device while workers and servers are killed: the bits of a run without kills and
without passes; a pass that had not ended is repeated whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trireme as tr
from tests.integration import restarted_script
from tests.integration.durable_servers import DurableServers
from tests.integration.restarted_script import Model, make_trainer, one_stream, train_passes
from tests.integration.test_device_passes import assert_equal, contents
from tests.programs import Program, Template
from trireme.errors import Fenced
from trireme.job.embedded import embedded

SCRIPT = str(Path(restarted_script.__file__))

# Where the processes of the worker are held and killed, one after the other, and how many batches
# they train on in all: a pass that has not ended is trained on again, and outside of passes a batch
# whose push was staged only.
HOLDS: dict[str, tuple[list[str], int]] = {
    "at the beginning": (["begin_pass:1:before", "begin_pass:1:after"], 33),
    "at the end": (["end_device_pass:1:before"], 18 + 33),
    "behind the end": (["end_device_pass:1:after"], 33),
    "between passes": (["begin_pass:2:before", "push:3:after"], 1 + 33),
    "in the last": (["end_device_pass:2:before", "end_device_pass:1:after"], 6 + 33),
    "at the end of the script": (["say_goodbye:1:before"], 33),
}


@contextmanager
def worker(
    programs: Template, servers: DurableServers, hold: str | None = None
) -> Iterator[Program]:
    env = {
        "TRIREME_TIMEOUT_S": "60",
        "TRIREME_THREADS": "1",
        "TRIREME_ROLE": "worker",
        "TRIREME_SERVERS": ",".join(servers.addresses),
        "TRIREME_INDEX": "0",
        "TRIREME_NUM_WORKERS": "1",
    }
    options = [] if hold is None else ["--hold", hold]
    with programs.start(
        "worker", [SCRIPT, str(servers.folder), "--passes", *options], env
    ) as program:
        yield program


@pytest.fixture(scope="module")
def undisturbed() -> tuple[dict[str, np.ndarray], float]:
    """The contents after the same batches without passes, and the loss."""
    with embedded() as cluster:
        torch.manual_seed(0)
        trainer = make_trainer("sync", Model(tr.optim.Adam(lr=0.05)), cluster)
        loss = train_passes(trainer, on_device=False)
        return contents(cluster), loss


def loaded(path: Path) -> dict[str, np.ndarray]:
    with embedded() as cluster:
        make_trainer("sync", Model(tr.optim.Adam(lr=0.05)), cluster).load(path)
        return contents(cluster)


@pytest.mark.parametrize("name", HOLDS)
def test_a_worker_killed_anywhere_repeats_the_pass_that_has_not_ended(
    programs: Template,
    tmp_path: Path,
    undisturbed: tuple[dict[str, np.ndarray], float],
    name: str,
) -> None:
    expected, loss = undisturbed
    holds, num_batches = HOLDS[name]
    outputs = []
    with DurableServers(programs, 2, tmp_path) as servers:
        for hold in holds:
            with worker(programs, servers, hold) as program:
                program.wait_line("^held$")
                program.kill()
            outputs.append(program.output)
        with worker(programs, servers) as program:
            assert program.wait_line(r"^trained to (\S+)$")[1] == repr(loss)
            program.wait_line("^done$")
            outputs.append(program.output)
    assert_equal(loaded(tmp_path / "last"), expected)
    assert sum(output.count("\nstep ") for output in outputs) == num_batches


def kill_at(servers: DurableServers, client: Any, method: str, times: int) -> Callable[[], int]:
    """Kill and restart server 1 before calls of this method; returns how often it was done. "aside"
    behind its name: of those that a thread makes beside training.
    """
    call_all, everywhere, num_kills = client.call_all, client.everywhere, 0

    def kill(called: str) -> None:
        nonlocal num_kills
        if called == method and num_kills < times:
            num_kills += 1
            servers.kill(1)
            servers.start(1)

    def killing_call_all(calls: Sequence[Any], timeout_s: float, *, aside: bool = False) -> Any:
        kill(calls[0].method + (" aside" if aside else ""))
        return call_all(calls, timeout_s, aside=aside)

    def killing_everywhere(called: str, *args: Any, **options: Any) -> Any:
        kill(called)
        return everywhere(called, *args, **options)

    client.call_all, client.everywhere = killing_call_all, killing_everywhere
    return lambda: num_kills


@pytest.mark.parametrize(
    ("method", "times"),
    [("ps.rows", 1), ("import.wide", 2), ("import.prepare", 1), ("import.finish", 1)],
)
def test_a_server_killed_in_a_pass_costs_no_update(
    programs: Template,
    tmp_path: Path,
    undisturbed: tuple[dict[str, np.ndarray], float],
    method: str,
    times: int,
) -> None:
    expected, loss = undisturbed
    with DurableServers(programs, 2, tmp_path) as servers:
        cluster = servers.join(0, 1)
        torch.manual_seed(0)
        trainer = make_trainer("sync", Model(tr.optim.Adam(lr=0.05)), cluster)
        num_kills = kill_at(servers, cluster.client.servers, method, times)
        assert train_passes(trainer) == loss
        assert num_kills() == times
        trainer.save(tmp_path / "last")
        cluster.close()
    assert_equal(loaded(tmp_path / "last"), expected)


def test_a_process_with_a_successor_cannot_end_its_pass(programs: Template, tmp_path: Path) -> None:
    with ExitStack() as stack:
        servers = stack.enter_context(DurableServers(programs, 1, tmp_path))
        data = one_stream(0)
        old = servers.join(0, 1)
        stack.callback(old.abandon)
        first = make_trainer("sync", Model(tr.optim.Adam(lr=0.05)), old)
        first.begin_pass(data)
        first.fit(data)
        new = servers.join(0, 1)
        stack.callback(new.abandon)
        second = make_trainer("sync", Model(tr.optim.Adam(lr=0.05)), new)
        with pytest.raises(Fenced, match="pass 1 on a device of worker 0: expected its lease"):
            first.end_pass()
        with second.on_device(data):
            second.fit(data)
        assert second.optimizer.num_steps == 9
