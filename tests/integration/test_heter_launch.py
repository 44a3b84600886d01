"""`trireme launch` with compute workers: controlled scripts that execute the test's commands."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from tests.integration.launcher import CONTROLLED_SCRIPT, ELSEWHERE, Launcher, refused
from tests.ports import free_ports

ONE = ("--server_num", "1", "--worker_num", "1")
JOB = (*ONE, "--heter_worker_num", "1")


def test_launch_starts_compute_workers_of_each_kind_at_addresses_that_all_know(
    launcher: Launcher,
) -> None:
    options = ("--server_num", "1", "--worker_num", "2", "--heter_worker_num", "2;1")
    stale = {"TRIREME_LABEL": "old", "STAGE_ID": "1", "HETER_DEVICE_TYPE": "xpu"}
    launcher.start(*options, "--heter_devices", "gpu;npu", num=6, **stale)
    peers = launcher.peers
    assert sorted(name for name in peers if "heter" in name) == ["heter 0", "heter 1", "heter 2"]
    listed = peers["worker 1"].ask("env TRIREME_HETER")
    pairs = [part.split("=") for part in listed.split(",")]
    assert [label for label, _ in pairs] == ["gpu", "gpu", "npu"]
    for index, (label, address) in enumerate(pairs):
        peer = peers[f"heter {index}"]
        asked = ("HETER", "LABEL", "LISTEN", "NUM_WORKERS", "SERVERS")
        answers = [peer.ask(f"env TRIREME_{name}") for name in asked]
        servers = peers["worker 0"].ask("env TRIREME_SERVERS")
        assert answers == [listed, label, address, "2", servers]
        assert peer.ask("env STAGE_ID") == ""
        peers["worker 1"].ask(f"greet {address}")  # the port already listens
        assert peer.ask("accept") == "worker 1"
        peer.ask(f"print hello from {index}\\n")
    assert peers["server 0"].ask("env TRIREME_LABEL") == ""
    for peer in peers.values():
        peer.send("exit 0")
    code, _, err = launcher.finish()
    assert code == 0
    assert f"compute workers {listed}; logs in log/" in err
    assert "1 server, 2 workers and 3 compute workers ended well" in err.splitlines()[-1]
    assert launcher.log("heterlog.2") == "hello from 2\n"


def test_launch_restarts_a_compute_worker_at_its_address(launcher: Launcher) -> None:
    launcher.start(*JOB, "--max_restart", "2", num=3)
    address = launcher.peers["heter 0"].ask("env TRIREME_LISTEN")
    for ending in ("kill", "raise no memory"):
        compute = launcher.peers["heter 0"]
        if ending == "kill":
            os.kill(int(compute.ask("pid")), signal.SIGKILL)
        else:
            compute.send(ending)
        compute.wait_gone()
        launcher.accept(1)
        assert launcher.peers["heter 0"].ask("env TRIREME_LISTEN") == address
        launcher.peers["worker 0"].ask(f"greet {address}")
        assert launcher.peers["heter 0"].ask("accept") == "worker 0"
        compute.close()
    for peer in launcher.peers.values():
        peer.send("exit 0")
    code, _, err = launcher.finish()
    assert code == 0
    assert "compute worker 0 was killed by SIGKILL" in err
    assert "compute worker 0 failed with exit code 1; starting it again (2 of at most 2" in err


def test_launch_ends_with_the_code_and_last_lines_of_a_compute_worker_that_fails(
    launcher: Launcher,
) -> None:
    launcher.start(*JOB, num=3)
    launcher.peers["heter 0"].send("raise no such device")
    code, _, err = launcher.finish()
    assert code == 1
    assert (
        f"compute worker 0 failed with exit code 1; last lines of {Path('log/heterlog.0')}" in err
    )
    assert "    RuntimeError: no such device" in err


def test_a_compute_worker_killed_after_the_workers_does_not_fail_the_job(
    launcher: Launcher,
) -> None:
    launcher.start(*JOB, "--max_restart", "1", num=3)
    pid = int(launcher.peers["heter 0"].ask("pid"))
    launcher.peers["worker 0"].end()
    os.kill(pid, signal.SIGKILL)
    launcher.peers["heter 0"].wait_gone()
    launcher.peers["server 0"].send("exit 0")
    code, _, err = launcher.finish()
    assert code == 0, err
    assert "when the job was over: no loss" in err
    assert "starting it again" not in err


def test_launch_stops_the_workers_before_compute_workers_and_servers(launcher: Launcher) -> None:
    process = launcher.start(*JOB, num=3)
    for peer in launcher.peers.values():
        assert peer.ask("polite") == "done"
    process.send_signal(signal.SIGTERM)
    code, _, err = launcher.finish()
    lines = [line for line in err.splitlines() if "stopping" in line]
    assert "stopping worker 0 (" in lines[0]
    assert len(lines) > 1
    assert "stopping server 0, compute worker 0 (" in lines[1]
    assert code == 143


def test_gpus_go_to_compute_workers_of_labels_gpu_and_gpu_2(launcher: Launcher) -> None:
    kinds = ("--heter_worker_num", "1;1;1", "--heter_devices", "npu;gpu;gpu_2", "--gpus", "4,6")
    launcher.start(*ONE, *kinds, num=5, TRIREME_DEVICE_GPU="cpu", CUDA_VISIBLE_DEVICES="4,5,6")
    seen = {n: p.ask("env CUDA_VISIBLE_DEVICES") for n, p in sorted(launcher.peers.items())}
    all_gpus = "4,5,6"
    assert list(seen.values()) == [all_gpus, "4", "6", all_gpus, all_gpus]
    assert launcher.peers["heter 2"].ask("env FLAGS_selected_gpus") == "0"
    assert launcher.peers["heter 1"].ask("env TRIREME_DEVICE_GPU") == "cpu"
    for peer in launcher.peers.values():
        peer.send("exit 0")
    assert launcher.finish()[0] == 0


def test_compute_workers_without_gpus_of_their_own_share_those_of_the_machine(
    launcher: Launcher,
) -> None:
    kinds = ("--heter_worker_num", "1;1;1", "--heter_devices", "npu;gpu;gpu_2")
    launcher.start(*ONE, *kinds, num=5)
    places = [launcher.peers[f"heter {index}"].ask("env LOCAL_RANK") for index in range(3)]
    assert places == ["", "0", "1"]
    assert launcher.peers["heter 1"].ask("env LOCAL_WORLD_SIZE") == "2"
    for peer in launcher.peers.values():
        peer.send("exit 0")
    assert launcher.finish()[0] == 0


def test_each_machine_starts_its_own_compute_workers(launcher: Launcher) -> None:
    port = free_ports(("127.0.0.1",), 1)
    own = f"127.0.0.1:{port}"
    options = ("--servers", ELSEWHERE, "--workers", ELSEWHERE, "--metrics", "9100")
    options += ("--heter_devices", "gpu;npu", "--heter_workers", f"{ELSEWHERE};{own}")
    launcher.start(*options, num=1)
    assert list(launcher.peers) == ["heter 1"]
    compute = launcher.peers["heter 1"]
    assert compute.ask("env TRIREME_HETER") == f"gpu={ELSEWHERE},npu={own}"
    assert compute.ask("env TRIREME_METRICS") == "127.0.0.1:9103"
    compute.send("exit 0")
    assert launcher.finish()[0] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--server_num=0", "--worker_num=2", "--heter_worker_num=1"), "expected servers with"),
        (
            ("--join=a:1", "--heter_worker_num=1"),
            "with --join, because the job has the rest, found",
        ),
        (("--gpus=0,1", "--heter_worker_num=1"), "--server_num or --servers"),
        (("--ips=127.0.0.1", "--gpus=0", "--heter_worker_num=1"), "--ips with --gpus or --nproc"),
        ((*ONE, "--heter_devices=gpu"), "--heter_workers with --heter_devices, found neither"),
        (
            (*ONE, "--heter_worker_num=1;2"),
            "each of the 2 kinds of compute workers (1;2), found no",
        ),
        ((*ONE, "--heter_worker_num=2", "--heter_devices=gpu;npu"), "the 1 kinds"),
        ((*ONE, "--heter_worker_num=1;0", "--heter_devices=gpu;npu"), "at least 1, found 1;0"),
        ((*ONE, "--heter_worker_num=two"), "numbers such as 2 or 2;1, found 'two'"),
        ((*JOB, "--heter_devices=GPU"), "lower-case letters, digits and _, found 'GPU'"),
        ((*JOB, "--heter_workers=127.0.0.1:1,127.0.0.1:2"), "--heter_workers, 2, found 1"),
        ((*ONE, "--heter_workers=127.0.0.1:1,127.0.0.1:1"), "different addresses in --heter_work"),
        ((*ONE, f"--heter_workers={ELSEWHERE}"), "--servers and --workers to list all others"),
        (
            (*JOB, "--gpus=0,1"),
            "for each of the 1 compute workers of labels such as gpu and gpu_2 of this",
        ),
        (
            (f"--servers={ELSEWHERE}", "--workers=127.0.0.1:0", "--heter_worker_num=1"),
            "--heter_workers to list all compute workers",
        ),
    ],
)
def test_launch_refuses_compute_workers_that_cannot_be(
    tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    assert message in refused(tmp_path, *options, CONTROLLED_SCRIPT)


def test_launch_refuses_the_port_of_a_compute_worker_that_is_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        error = refused(tmp_path, *ONE, "--heter_workers", address, CONTROLLED_SCRIPT)
    assert f"expected to listen on {address}" in error


@pytest.mark.parametrize("ending", ["stays", "fails"])
def test_a_compute_worker_that_comes_too_late_to_hear_of_the_end_does_not_fail_the_job(
    launcher: Launcher, ending: str
) -> None:
    launcher.start(*JOB, num=3)
    for name in ("worker 0", "server 0"):
        launcher.peers[name].end()
    if ending == "fails":
        launcher.peers["heter 0"].send("exit 1")
    code, _, err = launcher.finish()
    assert code == 0, err
    assert ("stopping compute worker 0" in err) == (ending == "stays")
    assert "when the job was over: no loss" in err
