"""`trireme top` beside a job of real processes."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from tests.programs import Program, Template
from trireme.commands import cli
from trireme.errors import BadRequest, Unavailable
from trireme.protocol.block_messages import map_to_wire
from trireme.protocol.routing import BucketMap
from trireme.rpc import Handler, Reply, Request, RpcClient, Server, make_keys
from trireme.top.job_snapshot import take_snapshot

TRAINING_SCRIPT = str(Path(__file__).with_name("training_script.py"))
SERVER = ["-m", "trireme", "server", "--listen", "127.0.0.1:0"]


class Job:
    """Servers and a worker, which trains until the test ends."""

    def __init__(self, programs: Template, stack: ExitStack) -> None:
        self._programs, self._stack = programs, stack
        self.servers: list[Program] = []
        self.addresses: list[str] = []

    def start(self, num_servers: int, **env: str) -> None:
        env = {"TRIREME_TIMEOUT_S": "60", "TRIREME_THREADS": "1", **env}
        for _ in range(num_servers):
            server = self._stack.enter_context(self._programs.start("server", SERVER, env))
            self.servers.append(server)
            self.addresses.append(server.wait_line(r"^listening on (\S+)")[1])
        place = {"TRIREME_ROLE": "worker", "TRIREME_SERVERS": ",".join(self.addresses)}
        place |= {"TRIREME_INDEX": "0", "TRIREME_NUM_WORKERS": "1"}
        worker = self._programs.start("worker 0", [TRAINING_SCRIPT], env | place)
        self._stack.enter_context(worker).wait_line(r"^batch 9$")


@pytest.fixture
def job(programs: Template) -> Iterator[Job]:
    with ExitStack() as stack:
        yield Job(programs, stack)


def top(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str, str]:
    code = cli.main(["top", *options, "--once", "--interval_s", "0.5"])
    output = capsys.readouterr()
    return code, output.out, output.err


def test_one_server_tells_of_the_whole_job(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    job.start(2)
    code, out, _ = top(capsys, "--servers", job.addresses[0], "--timeout_s", "60")
    assert code == 0
    assert "trireme top: 2 servers, 1 workers" in out
    lines = {line.split()[0]: line.split() for line in out.splitlines() if line.strip()}
    for address in job.addresses:
        assert len(lines[address]) > 12
    assert "rows" in lines  # the trainee's table
    assert int(lines["0"][3]) > 0  # steps of worker 0
    assert re.search(r"^staleness .*mean \d", out, re.MULTILINE)


def test_a_pipe_gets_one_view_after_the_other(job: Job, programs: Template) -> None:
    job.start(1)
    arguments = ["-m", "trireme", "top", "--servers", job.addresses[0]]
    arguments += ["--interval_s", "0.2", "--timeout_s", "60"]
    with programs.start("top", arguments, {}) as shown:
        for _ in range(3):
            shown.wait_line("^trireme top: 1 servers, 1 workers")
            shown.wait_line("^staleness")
        shown.signal(signal.SIGINT)
        assert shown.finish() == 0


def test_servers_that_do_not_answer_are_shown_unless_none_does() -> None:
    """Errors come at once here; a server that is not there costs the timeout."""

    def gone(_: Request) -> Reply:
        raise Unavailable("gone")

    text = np.frombuffer(b"trireme_blocks 3.0\n", np.uint8)
    answers: dict[str, Handler] = {"server.metrics": lambda _: Reply({}, [text])}
    handlers = {
        method: lambda r: answers[r.method](r) for method in ("server.metrics", "coord.map")
    }
    with (
        Server("127.0.0.1:0", {"server.metrics": gone}, name="b") as silent,
        Server("127.0.0.1:0", handlers, name="a") as server,
        RpcClient(name="top") as client,
    ):
        head, arrays = map_to_wire(BucketMap.even((server.endpoint, silent.endpoint)))
        answers["coord.map"] = lambda _: Reply({"map": head}, arrays)
        answering, other = take_snapshot(client, [server.endpoint], 60).servers
        assert (answering.total("trireme_blocks"), answering.error) == (3, "")
        assert (other.endpoint, other.samples) == (silent.endpoint, {})
        assert other.error.startswith(f"server.metrics at {silent.endpoint} (b): gone")
        answers["server.metrics"] = gone
        with pytest.raises(Unavailable, match="gone"):
            take_snapshot(client, [server.endpoint], 60)
        with pytest.raises(BadRequest, match="no such method"):  # it tells of no servers either
            take_snapshot(client, [silent.endpoint], 60)


def test_of_a_job_with_keys_an_admitted_client_sees_all_and_others_nothing(
    job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = tmp_path / "keys"
    keys.mkdir()
    server, client = make_keys(keys / "server.key"), make_keys(keys / "client.key")
    (keys / "server.pub").write_text(server.public)
    (keys / "clients.pub").write_text(client.public)
    job.start(1, TRIREME_KEYS=str(keys))
    options = ("--servers", job.addresses[0])
    code, out, _ = top(capsys, *options, "--keys", str(keys), "--timeout_s", "60")
    assert code == 0
    assert "trireme top: 1 servers, 1 workers" in out
    code, out, err = top(capsys, *options, "--timeout_s", "2")
    assert (code, out) == (1, "")
    assert "trireme top: error: coord.map at" in err


def test_wrong_use_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = top(capsys, "--servers", "nowhere")
    assert code == 2
    assert "host:port" in err
    code, _, err = top(capsys)
    assert code == 2
    assert "TRIREME_SERVERS" in err


def test_a_terminal_of_eighty_columns_has_all_numbers_of_a_large_job() -> None:
    """A real terminal, as the program sees it: no line is cut, and all fits in its lines."""
    names = [f"the_{n}th_table_of_a_job_with_long_names" for n in range(40)]
    lines = ["# TYPE trireme_table_rows gauge"]
    lines += [f'trireme_table_rows{{table="{name}"}} {i}e6' for i, name in enumerate(names)]
    text = np.frombuffer("\n".join([*lines, ""]).encode(), np.uint8)
    handlers: dict[str, Handler] = {
        "server.metrics": lambda _: Reply({"waits": ["step 2 waits for streams [1]"]}, [text]),
        "coord.map": lambda _: Reply({"map": head}, arrays),
    }
    with ExitStack() as stack:
        servers = [
            stack.enter_context(Server("127.0.0.1:0", handlers, name=f"server {n}"))
            for n in range(12)
        ]
        head, arrays = map_to_wire(BucketMap.even(tuple(one.endpoint for one in servers)))
        shown = in_terminal(["top", "--servers", servers[0].endpoint, "--interval_s", "0.2"])
    assert "12 servers, 0 workers" in shown
    for what in ("push ms", "log age", "pushed keys/s", "staleness:", "... and 33 more"):
        assert what in shown
    assert "waits: step 2 waits for streams [1]" in shown
    assert max(len(line) for line in shown.splitlines()) <= 80
    assert "the_39th_" in shown, "the largest table"
    assert "the_0th_" not in shown


def in_terminal(arguments: list[str]) -> str:
    """What a command shows first on a terminal of 80 columns and 60 lines, without its codes."""
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (60, 80))
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    command = [sys.executable, "-m", "trireme", *arguments]
    with subprocess.Popen(command, stdout=slave, stderr=slave, env=env | {"TERM": "xterm"}) as top:
        os.close(slave)
        seen = b""
        while b"staleness:" not in seen:
            assert select.select([master], [], [], 60.0)[0], seen
            seen += os.read(master, 1 << 16)
        top.send_signal(signal.SIGINT)
        assert top.wait(60.0) == 0
    os.close(master)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.decode()).replace("\r", "")
