"""One script started in four ways: alone, launched, with Fleet's variables, under torchrun."""

from __future__ import annotations

import re
import socket
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.integration.criteo_folder import NUM_TEST, write_criteo_folder
from tests.integration.processes import Processes
from tests.programs import Program, Template

SCRIPT = str(Path(__file__).parents[2] / "examples" / "train.py")
TRIREME = [sys.executable, "-m", "trireme"]
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


def test_train_py_runs_launched(folder: Path) -> None:
    with Processes(folder) as processes:
        options = ["--server_num", "2", "--worker_num", "2"]
        processes.start("launch", [*TRIREME, "launch", *options, SCRIPT], {})
        output = processes.finish(WAIT_S)["launch"]
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


def test_train_py_runs_under_torchrun_with_servers_without_a_script(folder: Path) -> None:
    with Processes(folder) as processes:
        held = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        addresses = [f"127.0.0.1:{server.getsockname()[1]}" for server in held]
        for index, server in enumerate(held):
            listen = ["--listen", addresses[index]]
            handed = {"TRIREME_LISTEN_FD": str(server.fileno())}
            processes.start(
                f"server {index}", [*TRIREME, "server", *listen], handed, [server.fileno()]
            )
            server.close()
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        env = {"TRIREME_SERVERS": ",".join(addresses), "OMP_NUM_THREADS": "1"}
        processes.start("torchrun", [*torchrun, "--nproc_per_node", "2", SCRIPT], env)
        outputs = processes.finish(WAIT_S)
    check(outputs["torchrun"], folder)
    assert "trireme: worker 1 of 2" in outputs["torchrun"]
    for index in range(2):
        assert "all workers have said goodbye" in outputs[f"server {index}"]
