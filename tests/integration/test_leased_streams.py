"""Jobs with leased streams: workers may come late, others take over from one that is killed, each
batch counts once.
"""

from __future__ import annotations

import signal
import socket
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from tests.integration import leased_streams_script as script
from tests.integration.durable_servers import DurableServers
from tests.programs import Program, Template
from tests.tables import T_ROWS
from trireme import _core
from trireme.job.embedded import embedded

SCRIPT = str(Path(script.__file__))
STEPS = sum(script.LENGTHS)
EXAMPLES = STEPS * script.BATCH


class LeasedJob:
    """A job of leased_streams_script.py on one server, which keeps its state."""

    def __init__(self, programs: Template, folder: Path, num_workers: int) -> None:
        self.folder, self._num_workers = folder, num_workers
        self._programs, self._exit = programs, ExitStack()
        self._heter: dict[str, str] = {}
        self.servers = DurableServers(programs, 1, folder)

    def __enter__(self) -> LeasedJob:
        self._exit.enter_context(self.servers)
        return self

    def __exit__(self, *error: object) -> None:
        self._exit.__exit__(*error)  # type: ignore[arg-type]

    def start(self, worker: int, *options: str, timeout_s: float = 60.0) -> Program:
        """A worker that is there from the beginning."""
        place = {
            "TRIREME_INDEX": str(worker),
            "TRIREME_NUM_WORKERS": str(self._num_workers),
            "TRIREME_STREAMS": str(script.NUM_STREAMS),
            **self._heter,
        }
        return self._start(f"worker {worker}", options, place, timeout_s)

    def start_compute(self, *options: str) -> Program:
        """A compute worker, which workers that are there from the beginning know."""
        listener = self._exit.enter_context(socket.create_server(("127.0.0.1", 0)))
        self._heter = {"TRIREME_HETER": f"gpu=127.0.0.1:{listener.getsockname()[1]}"}
        place = {
            "TRIREME_ROLE": "heter",
            "TRIREME_INDEX": "0",
            "TRIREME_NUM_WORKERS": str(self._num_workers),
            "TRIREME_DEVICE_GPU": "cpu",
            **self._heter,
        }
        return self._start("heter 0", options, place, 60.0, listener)

    def start_late(self, *options: str) -> Program:
        """One that joins."""
        return self._start("late worker", options, {"TRIREME_JOIN": "1"}, 60.0)

    def _start(
        self,
        name: str,
        options: tuple[str, ...],
        place: dict[str, str],
        timeout_s: float,
        listener: socket.socket | None = None,
    ) -> Program:
        env = {
            "TRIREME_ROLE": "worker",
            "TRIREME_SERVERS": ",".join(self.servers.addresses),
            "TRIREME_TIMEOUT_S": str(timeout_s),
            "TRIREME_THREADS": "1",
            "TRIREME_ROOT": str(self.folder),
            **place,
        }
        arguments = [SCRIPT, str(self.folder), *options]
        program = self._programs.start(name, arguments, env, listener=listener)
        return self._exit.enter_context(program)

    def finish(self, *workers: Program) -> list[list[str]]:
        """The figures that each has come to; the server has ended."""
        for worker in workers:
            worker.wait_line("^done$")
        self.servers.program(0).wait_line("all workers have said goodbye")
        return [figures(worker) for worker in workers]


def figures(worker: Program) -> list[str]:
    names = ("first", "rest", "evaluated")
    return [line for line in worker.output.splitlines() if line.startswith(names)]


def streams_of(worker: Program) -> Counter[int]:
    """How many batches of each stream a process has trained on."""
    lines = [line.split() for line in worker.output.splitlines() if line.startswith("step ")]
    return Counter(int(line[3]) for line in lines)


def assert_each_batch_counted_once(path: Path) -> None:
    expected = Counter[int]()
    for stream in range(script.NUM_STREAMS):
        for epoch in range(script.EPOCHS):
            for batch in script.Data().stream(stream, script.NUM_STREAMS, epoch=epoch):
                expected.update(set(batch["a"].values.tolist()))
    with embedded(threads=1) as cluster:
        script.make_trainer(script.Model(), cluster).load(path)
        keys = _core.unique(np.arange(script.NUM_KEYS, dtype=np.uint64), cluster.pool)[0]
        rows = cluster.client.pull({T_ROWS: keys}).rows[T_ROWS].numpy()
        actual = dict(zip(keys.tolist(), rows[:, 0].astype(int).tolist(), strict=True))
    assert {key: count for key, count in actual.items() if count} == dict(expected)


def test_a_late_worker_takes_the_unleased_streams(programs: Template, tmp_path: Path) -> None:
    with LeasedJob(programs, tmp_path, 1) as job:
        first = job.start(0, "--hold", "7")
        first.wait_line("^held$")  # in stream 1, all of stream 0 is done
        late = job.start_late()
        late.wait_line("^step 4 of 3$")  # all of stream 3, after the empty one
        first.send("")
        actual = job.finish(first, late)
    assert actual[0] == actual[1]
    assert [line.split()[-1] for line in actual[0]] == [str(EXAMPLES)] * 3
    assert_each_batch_counted_once(tmp_path / "last")
    assert (streams_of(first) + streams_of(late)).total() == script.EPOCHS * STEPS


def test_a_late_worker_has_its_batches_computed_by_the_compute_workers_of_the_job(
    programs: Template, tmp_path: Path
) -> None:
    with LeasedJob(programs, tmp_path, 1) as job:
        compute = job.start_compute("--hold", "2")
        first = job.start(0)
        compute.wait_line("^held$")
        late = job.start_late()
        late.wait_line("^reads stream [1-3]$")
        compute.send("")
        actual = job.finish(first, late)
        assert compute.finish() == 0
    assert actual[0] == actual[1]
    assert_each_batch_counted_once(tmp_path / "last")
    assert not streams_of(first) + streams_of(late)
    assert streams_of(compute).total() == script.EPOCHS * STEPS


def test_a_late_worker_with_another_model_is_refused_and_the_job_continues(
    programs: Template, tmp_path: Path
) -> None:
    with LeasedJob(programs, tmp_path, 1) as job:
        first = job.start(0, "--hold", "2")
        first.wait_line("^held$")
        other = job.start_late("--dim", "3")
        other.wait_line(
            r"SchemaMismatch: .* t of dims \[2\].* has 'tables t of dims \[3\]; 2 param"
        )
        first.send("")
        job.finish(first)
    assert_each_batch_counted_once(tmp_path / "last")


def test_others_take_over_the_streams_of_a_silent_worker_and_fence_it(
    programs: Template, tmp_path: Path
) -> None:
    """Silent for a quarter of its timeout during stream 1, then active again."""
    with LeasedJob(programs, tmp_path, 2) as job:
        first = job.start(0, "--hold", "1", "11", timeout_s=40)
        silent = job.start(1, "--hold", "2", timeout_s=40)
        silent.wait_line("^step 2 of [01]$")
        silent.wait_line("^held$")
        silent.signal(signal.SIGSTOP)
        first.send("")
        job.servers.program(0).wait_line("^worker 1 sent no heartbeat for 10 s: others take over")
        first.wait_line("^step 11 ")  # the last but one of stream 1, or the last one
        silent.signal(signal.SIGCONT)
        silent.send("")
        silent.wait_line("^trireme.errors.Fenced: ")
        first.send("")
        job.finish(first)
    assert_each_batch_counted_once(tmp_path / "last")


def test_a_killed_coordinator_still_knows_which_worker_has_which_stream(
    programs: Template, tmp_path: Path
) -> None:
    with LeasedJob(programs, tmp_path, 2) as job:
        workers = [job.start(0, "--hold", "1"), job.start(1, "--hold", "2")]
        for worker in workers:
            worker.wait_line("^held$")
        job.servers.kill(0)
        job.servers.start(0)
        late = job.start_late()
        late.wait_line("^step 4 of 3$")
        assert set(streams_of(late)) == {3}
        for worker in workers:
            worker.send("")
        actual = job.finish(*workers, late)
    assert actual[0] == actual[1] == actual[2]
    assert [line.split()[-1] for line in actual[0]] == [str(EXAMPLES)] * 3
    assert_each_batch_counted_once(tmp_path / "last")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_leaving_worker_hands_its_stream_to_another(
    programs: Template, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    with LeasedJob(programs, tmp_path, 1) as job:
        first = job.start(0, "--hold", "2")
        first.wait_line("^held$")
        late = job.start_late("--hold", "2")
        late.wait_line("^step 2 of 1$")
        late.wait_line("^held$")
        late.signal(number)
        late.send("")
        late.wait_line(f"^worker 1 has got {number.name}: others continue with its stream$")
        first.send("")
        job.finish(first)
        assert late.finish() == code
    assert streams_of(late) == {1: 2}
    assert_each_batch_counted_once(tmp_path / "last")
