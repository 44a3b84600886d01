"""One script started in four ways: alone, launched, with Fleet's variables, under torchrun."""

from __future__ import annotations

import re
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.integration.criteo_folder import NUM_TEST, write_criteo_folder
from tests.programs import Program, Template

SCRIPT = str(Path(__file__).parents[2] / "examples" / "train.py")
WAIT_S = 100.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_criteo_folder(tmp_path)
    return tmp_path


def check(output: str, folder: Path) -> None:
    """Whoever printed metrics has seen all test examples, once, and has learned; it is saved."""
    actual = re.findall(r"'auc': ([\d.]+), 'examples': (\d+)", output)
    assert actual, output
    for auc, examples in actual:
        assert float(auc) > 0.9
        assert int(examples) == NUM_TEST
    assert (folder / "ckpt" / "1").is_dir()


def test_train_py_runs_alone(folder: Path, programs: Template) -> None:
    output = programs.run(folder, [SCRIPT])
    assert "trireme: embedded" in output
    check(output, folder)


def test_train_py_runs_launched(folder: Path, programs: Template) -> None:
    options = ["--server_num", "2", "--worker_num", "2"]
    output = programs.run(folder, ["-m", "trireme", "launch", *options, SCRIPT], wait_s=WAIT_S)
    assert "2 servers and 2 workers ended well" in output
    check(output, folder)
    for index in range(2):
        log = (folder / "log" / f"serverlog.{index}").read_text()
        assert "all workers have said goodbye" in log
    check((folder / "log" / "workerlog.1").read_text(), folder)


def test_train_py_runs_by_hand_with_the_variables_of_fleets_guide(
    folder: Path, programs: Template
) -> None:
    ports = free_ports(2)
    listed = ",".join(f"127.0.0.1:{port}" for port in ports)
    job = {"PADDLE_PSERVERS_IP_PORT_LIST": listed, "PADDLE_TRAINERS_NUM": "2"}
    with ExitStack() as stack:

        def start(name: str, place: dict[str, str]) -> Program:
            command = [SCRIPT, "--is_cloud=1"]
            return stack.enter_context(
                programs.start(name, command, {**job, **place}, folder=folder)
            )

        places = [
            {"TRAINING_ROLE": "PSERVER", "POD_IP": "127.0.0.1", "PADDLE_PORT": str(port)}
            for port in ports
        ]
        servers = [start(f"server {index}", place) for index, place in enumerate(places)]
        places = [{"TRAINING_ROLE": "TRAINER", "PADDLE_TRAINER_ID": index} for index in "01"]
        workers = [start(f"worker {index}", place) for index, place in enumerate(places)]
        assert [program.finish() for program in (*workers, *servers)] == [0, 0, 0, 0]
    for index in range(2):
        assert f"trireme: server {index} of 2" in servers[index].output
        assert "TRAINING_ROLE" in workers[index].output
        check(workers[index].output, folder)


def free_ports(num: int) -> list[int]:
    """Ports that were free a moment ago: Fleet's variables leave no way to hold them."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(num)]
    ports = [server.getsockname()[1] for server in held]
    for server in held:
        server.close()
    return ports


def test_train_py_runs_under_torchrun_with_servers_without_a_script(
    folder: Path, programs: Template
) -> None:
    with ExitStack() as stack:
        servers = []
        for index in range(2):
            command = ["-m", "trireme", "server", "--listen", "127.0.0.1:0"]
            server = programs.start(f"server {index}", command, {}, folder=folder)
            servers.append(stack.enter_context(server))
        addresses = [server.wait_line(r"^listening on (\S+)")[1] for server in servers]
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", SCRIPT]
        env = {"TRIREME_SERVERS": ",".join(addresses)}
        output = programs.run(folder, torchrun, env, wait_s=WAIT_S)
        assert [server.finish() for server in servers] == [0, 0]
    check(output, folder)
    assert "trireme: worker 1 of 2" in output
    for server in servers:
        assert "all workers have said goodbye" in server.output
