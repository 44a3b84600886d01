"""One script, four ways to run it: alone, launched, by hand with Fleet's variables, torchrun."""

from __future__ import annotations

import re
import socket
import sys
from pathlib import Path

import pytest

from tests.integration.criteo_folder import NUM_TEST, write_criteo_folder
from tests.integration.processes import Processes

SCRIPT = str(Path(__file__).parents[2] / "examples" / "train.py")
TRIREME = [sys.executable, "-m", "trireme.cli"]
WAIT_S = 100.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_criteo_folder(tmp_path)
    return tmp_path


def check(output: str, folder: Path) -> None:
    """Whoever printed metrics has seen all test examples, once, and has learned; it is saved."""
    found = re.findall(r"'auc': ([\d.]+), 'examples': (\d+)", output)
    assert found, output
    for auc, examples in found:
        assert float(auc) > 0.9
        assert int(examples) == NUM_TEST
    assert (folder / "ckpt" / "1").is_dir()


def test_train_py_runs_alone(folder: Path) -> None:
    with Processes(folder) as processes:
        processes.start("alone", [sys.executable, SCRIPT], {})
        output = processes.finish(WAIT_S)["alone"]
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


def test_train_py_runs_by_hand_with_the_variables_of_fleets_guide(folder: Path) -> None:
    ports = free_ports(2)
    servers = ",".join(f"127.0.0.1:{port}" for port in ports)
    job = {"PADDLE_PSERVERS_IP_PORT_LIST": servers, "PADDLE_TRAINERS_NUM": "2"}
    command = [sys.executable, "-u", SCRIPT, "--is_cloud=1"]
    with Processes(folder) as processes:
        for index, port in enumerate(ports):
            place = {"TRAINING_ROLE": "PSERVER", "POD_IP": "127.0.0.1", "PADDLE_PORT": str(port)}
            processes.start(f"server {index}", command, {**job, **place})
        for index in range(2):
            place = {"TRAINING_ROLE": "TRAINER", "PADDLE_TRAINER_ID": str(index)}
            processes.start(f"worker {index}", command, {**job, **place})
        outputs = processes.finish(WAIT_S)
    for index in range(2):
        assert f"trireme: server {index} of 2" in outputs[f"server {index}"]
        assert "TRAINING_ROLE" in outputs[f"worker {index}"]
        check(outputs[f"worker {index}"], folder)


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
