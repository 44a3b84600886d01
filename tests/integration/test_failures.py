"""Nothing hangs: what real processes print, and how they end, when others fail.

Everything that fails here fails within a deadline of a few seconds (TRIREME_TIMEOUT_S); a process
that ends too late fails the test in `Program.finish`.
"""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.programs import Program, Template
from tests.proxy import Faults, Proxy

TRAINING_SCRIPT = str(Path(__file__).with_name("training_script.py"))
SERVER = ["-m", "trireme", "server"]
SHORT_S = "4"  # for what must fail
LONG_S = "60"  # for what must not

MODES = pytest.mark.parametrize("mode", ["async", "sync"])


class Cast:
    """The processes of one test; they end with it."""

    def __init__(self, programs: Template, exit_stack: ExitStack) -> None:
        self._programs, self._exit = programs, exit_stack
        self.addresses: list[str] = []
        self.timeout_s = SHORT_S

    def _start(self, name: str, arguments: list[str], listener=None, **env: str) -> Program:
        env = {"TRIREME_TIMEOUT_S": self.timeout_s, "TRIREME_THREADS": "1", **env}
        program = self._programs.start(name, arguments, env, listener=listener)
        return self._exit.enter_context(program)

    def servers(self, num: int = 1) -> list[Program]:
        """Servers that listen."""
        started = [self.server("127.0.0.1:0") for _ in range(num)]
        for server in started:
            self.addresses.append(server.wait_line(r"^listening on (\S+)")[1])
        return started

    def server(self, address: str, listener: socket.socket | None = None) -> Program:
        return self._start(f"server {address}", [*SERVER, "--listen", address], listener)

    def worker(self, index: int, num: int, *arguments: str) -> Program:
        place = {"TRIREME_ROLE": "worker", "TRIREME_SERVERS": ",".join(self.addresses)}
        place |= {"TRIREME_INDEX": str(index), "TRIREME_NUM_WORKERS": str(num)}
        return self._start(f"worker {index}", [TRAINING_SCRIPT, *arguments], **place)

    def training(self, num: int, *arguments: str) -> list[Program]:
        """Workers in the midst of training."""
        workers = [self.worker(index, num, *arguments) for index in range(num)]
        for worker in workers:
            worker.wait_line(r"^batch 9$")
        return workers


@pytest.fixture
def cast(programs: Template) -> Iterator[Cast]:
    with ExitStack() as exit_stack:
        yield Cast(programs, exit_stack)


@pytest.fixture
def silent_port() -> Iterator[socket.socket]:
    """A reserved port of this machine on which no process listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound


def address_of(bound: socket.socket) -> str:
    return "{}:{}".format(*bound.getsockname())


def last_line(program: Program) -> str:
    return program.output.splitlines()[-1]


def assert_failed(worker: Program, *words: str) -> None:
    """It ends by itself, with an exit code, and its last line is an error that says all of it."""
    assert worker.finish() == 1
    line = last_line(worker)
    assert line.startswith("trireme.errors.")
    for word in words:
        assert word in line


# Server 0 hosts the coordinator.
@pytest.mark.parametrize("place", [0, 1])
def test_an_absent_server_is_logged_and_named_in_the_error(
    cast: Cast, silent_port: socket.socket, place: int
) -> None:
    cast.servers(1)
    absent = address_of(silent_port)
    cast.addresses.insert(place, absent)
    worker = cast.worker(0, 1)
    worker.wait_line(rf"not ready endpoints: \['{absent}'\]")
    assert_failed(worker, "DeadlineExceeded", f"init: after 4 s not ready endpoints: ['{absent}']")


def test_workers_connect_to_a_server_that_starts_late(
    cast: Cast, silent_port: socket.socket
) -> None:
    cast.timeout_s = LONG_S
    cast.addresses.append(address_of(silent_port))
    worker = cast.worker(0, 1, "--batches", "5")
    worker.wait_line("not ready endpoints")
    silent_port.listen()
    server = cast.server(cast.addresses[0], silent_port)
    assert worker.finish() == 0
    assert server.finish() == 0
    assert worker.output.count("not ready endpoints") == 1
    assert last_line(worker) == "trained 5 steps"


def test_a_worker_that_waits_for_others_says_for_whom(cast: Cast) -> None:
    cast.timeout_s = "8"  # more than the 3 s until it says that it waits
    cast.servers(1)
    worker = cast.worker(0, 3)
    assert_failed(worker, "DeadlineExceeded", "waits for workers [1, 2]")
    assert "(coord.gather): no answer for 3 s; it answers when all workers have" in worker.output
    assert "workers [1, 2] have not come yet, or are silent" in worker.output


def test_a_goodbye_whose_answer_is_lost_is_said_again_before_the_server_ends(cast: Cast) -> None:
    cast.timeout_s = LONG_S
    [server] = cast.servers()
    lossy = Faults(seed=0, lose_reply_to=b"server.goodbye")
    with Proxy(cast.addresses[0], lossy) as proxy:
        cast.addresses = [proxy.endpoint]
        worker = cast.worker(0, 1, "--batches", "5")
        assert worker.finish() == 0
        assert server.finish() == 0
        assert proxy.counts["lose_reply_to"] == 1
    assert last_line(worker) == "trained 5 steps"  # no warning that it ends without goodbye


@pytest.mark.parametrize(("mode", "killed"), [("async", 0), ("async", 1), ("sync", 0)])
def test_workers_end_with_an_error_when_a_server_is_killed(
    cast: Cast, mode: str, killed: int
) -> None:
    servers = cast.servers(2)
    workers = cast.training(2, "--mode", mode)
    servers[killed].kill()
    for worker in workers:
        worker.wait_line(rf"waiting for {cast.addresses[killed]} .*not reached .* for 3 s")
        assert_failed(worker, "Unavailable: ps.pu", f"at {cast.addresses[killed]} (server)")
        assert cast.addresses[1 - killed] not in last_line(worker)


def test_a_waiting_worker_logs_which_worker_it_waits_for(cast: Cast) -> None:
    cast.servers(2)
    assert_failed(cast.worker(0, 2), "DeadlineExceeded: coord.gather", "waits for workers [1]")


def test_a_worker_that_waits_for_another_ends_when_the_coordinator_is_killed(cast: Cast) -> None:
    cast.timeout_s = "8"  # more than the 3 s until it says that it waits
    coordinator, _ = cast.servers(2)
    worker = cast.worker(0, 2)
    worker.wait_line(rf"waiting for {cast.addresses[0]} .*coord.gather.*: no answer")
    coordinator.kill()
    assert_failed(worker, "Unavailable: coord.gather", cast.addresses[0])


def test_async_a_worker_continues_when_the_other_is_killed(cast: Cast) -> None:
    [server] = cast.servers()
    survivor, killed = cast.training(2)
    killed.kill()
    survivor.wait_line(r"^batch 30$")
    survivor.send("stop")
    assert survivor.finish() == 0
    assert "trained" in last_line(survivor)
    assert server.finish() == 1
    assert "workers [1] have been silent for 10 s without saying goodbye" in last_line(server)


def test_async_the_trainer_names_the_worker_whose_metrics_it_waits_for(cast: Cast) -> None:
    cast.servers()
    survivor, killed = cast.training(2, "--trainer")
    killed.kill()
    survivor.send("stop")
    assert_failed(survivor, "DeadlineExceeded", "(end of train) waits for workers [1]")


def test_sync_a_waiting_worker_logs_whose_step_it_waits_for(cast: Cast) -> None:
    cast.servers(2)
    survivor, killed = cast.training(2, "--mode", "sync")
    killed.kill()
    assert_failed(survivor, "DeadlineExceeded", "ps.pull at", "waits for streams [1]")


@MODES
def test_a_mistake_in_the_training_loop_ends_the_worker_at_once(cast: Cast, mode: str) -> None:
    cast.timeout_s = LONG_S
    cast.servers()
    worker = cast.worker(0, 1, "--mode", mode, "--raise_at", "5")
    assert worker.finish() == 1
    assert last_line(worker) == "ValueError: a mistake in the training loop"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_worker_that_gets_a_stop_signal_ends(cast: Cast, number: signal.Signals) -> None:
    cast.timeout_s = LONG_S
    cast.servers()
    [worker] = cast.training(1)
    worker.signal(number)
    assert worker.finish() == -number


def test_a_script_whose_last_pushes_are_lost_does_not_end_well(cast: Cast) -> None:
    [server] = cast.servers()
    worker = cast.worker(0, 1, "--mode", "sync", "--leave_at", "5")
    worker.wait_line("left the loop")
    server.kill()
    worker.send("continue")
    assert_failed(worker, "Unavailable", cast.addresses[0])


def test_a_table_of_another_dim_is_refused_and_both_are_shown(cast: Cast) -> None:
    cast.servers()
    first = cast.worker(0, 2)
    second = cast.worker(1, 2, "--dim", "5")
    failed = {worker.name: worker for worker in (first, second)}
    codes = [worker.finish() for worker in failed.values()]
    assert sorted(codes) == [1, 2], "the one that is refused need not be started again"
    refused = [worker for worker in failed.values() if "SchemaMismatch" in last_line(worker)]
    assert len(refused) == 1
    assert "table 'rows'" in last_line(refused[0])
    assert "'dims': [4]" in last_line(refused[0])
    assert "'dims': [5]" in last_line(refused[0])


def test_another_strategy_is_refused(cast: Cast) -> None:
    cast.servers()
    workers = [cast.worker(i, 2, "--mode", mode) for i, mode in enumerate(("sync", "async"))]
    assert sorted(worker.finish() for worker in workers) == [1, 2]
    [line] = [last_line(w) for w in workers if "SchemaMismatch" in last_line(w)]
    assert "Strategy('sync')" in line
    assert "Strategy('async')" in line


def test_another_number_of_workers_is_refused(cast: Cast) -> None:
    cast.servers()
    workers = [cast.worker(0, 2), cast.worker(1, 3)]
    assert sorted(worker.finish() for worker in workers) == [1, 2]
    [line] = [last_line(w) for w in workers if "SchemaMismatch" in last_line(w)]
    assert "num_workers is" in line
    assert all(str(num) in line for num in (2, 3))


def test_a_server_does_not_start_on_an_address_in_use(cast: Cast) -> None:
    [first, *_] = cast.servers()
    second = cast.server(cast.addresses[0])
    assert second.finish() == 2
    assert f"cannot bind {cast.addresses[0]}: Address already in use; process" in last_line(second)
    assert f"left over from an earlier job, `kill {first.pid}` ends it" in last_line(second)


def test_a_server_that_gets_sigterm_exits_with_0(cast: Cast) -> None:
    servers = cast.servers(2)
    [worker] = cast.training(1, "--mode", "sync")
    for server, number in ((servers[1], signal.SIGTERM), (servers[0], signal.SIGINT)):
        server.signal(number)
        assert server.finish() == 0
        assert f"stopped by {number.name}" in last_line(server)
    assert_failed(worker, "Unavailable: ps.pu", cast.addresses[1])


def test_a_server_that_gets_sigterm_and_sigint_together_ends_at_once(cast: Cast) -> None:
    """So the launcher ends a failed job. Of two signals that wait Python handles SIGINT first."""
    [server] = cast.servers()
    cast.training(1, "--mode", "sync")
    for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGINT, signal.SIGCONT):
        server.signal(number)
    assert server.finish() == 0
    assert "SIGTERM: ends in" not in server.output


def test_a_launched_server_that_gets_sigterm_before_the_end_says_so(cast: Cast) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        server = cast.server(address, listener)
    server.wait_line(r"^listening on")
    server.signal(signal.SIGTERM)
    assert server.finish() == 143


@MODES
def test_a_server_that_stands_still_is_named_and_waited_for(cast: Cast, mode: str) -> None:
    cast.timeout_s = LONG_S
    servers = cast.servers(2)
    [worker] = cast.training(1, "--mode", mode)
    servers[1].signal(signal.SIGSTOP)
    for waited_s in (3, 6) if mode == "sync" else (3,):
        worker.wait_line(rf"waiting for {cast.addresses[1]} .*: no answer for {waited_s} s")
    servers[1].signal(signal.SIGCONT)
    worker.send("stop")
    assert worker.finish() == 0
    assert [server.finish() for server in servers] == [0, 0]


@MODES
def test_a_server_that_stands_still_for_good_ends_the_worker(cast: Cast, mode: str) -> None:
    servers = cast.servers(2)
    [worker] = cast.training(1, "--mode", mode)
    servers[1].signal(signal.SIGSTOP)
    assert_failed(worker, "DeadlineExceeded: ps.pu", cast.addresses[1])


def test_a_data_loader_with_4_processes_is_a_source_of_batches(cast: Cast) -> None:
    cast.timeout_s = LONG_S
    [server] = cast.servers()
    worker = cast.worker(0, 1, "--loader", "--batches", "50")
    assert worker.finish() == 0
    assert last_line(worker) == "trained 50 steps"
    assert server.finish() == 0


@MODES
def test_two_workers_share_the_batches_of_their_data_loaders(cast: Cast, mode: str) -> None:
    """Each runs a DataLoader of 4 processes, and a Trainer trains on every second batch of it."""
    cast.timeout_s = LONG_S
    servers = cast.servers(2)
    options = ("--loader", "--batches", "51", "--trainer", "--mode", mode)
    workers = [cast.worker(index, 2, *options) for index in range(2)]
    assert [worker.finish() for worker in workers] == [0, 0]
    assert [last_line(worker) for worker in workers] == [f"trained on {51 * 64} examples"] * 2
    assert [server.finish() for server in servers] == [0, 0]
