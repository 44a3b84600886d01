"""`trireme launch` with GPUs and machines: hosts are addresses of loopback, and the CPU stands in
for GPUs.
"""

from __future__ import annotations

import json
import re
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.integration.test_collective_jobs import MODE, result_of
from tests.integration.test_modes import SCRIPT, examples
from tests.ports import free_ports
from tests.programs import Program, Template

COUNTING_SCRIPT = str(Path(__file__).with_name("collective_script.py"))
HOSTS = ("127.0.0.1", "127.0.0.2")
ON_CPU = {"TRIREME_DEVICE_GPU": "cpu", "TRIREME_TIMEOUT_S": "30"}
LENGTHS = (120, 0, 90, 60)
WAIT_S = 120.0
SHOW = """
import os, torch, trireme as tr
cluster = tr.init()
group = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "FLAGS_selected_gpus", "CUDA_VISIBLE_DEVICES")
print("SEEN", cluster.address, cluster.device("gpu"), *(os.environ.get(n) for n in group))
"""


def launch_on_each_host(
    stack: ExitStack,
    programs: Template,
    folder: Path,
    options: list[str],
    env: dict[str, str],
    *,
    is_quick: bool,
) -> list[Program]:
    """The same command on both hosts, which differs in the address of the host alone."""
    port = free_ports(HOSTS, 2)
    machines = ["--ips", ",".join(HOSTS), "--start_port", str(port)]
    started = []
    for host in HOSTS:
        logs = ["--log_dir", str(folder / host)]
        command = ["-m", "trireme", "launch", *machines, "--host", host, *logs, *options]
        one = programs.start(f"on {host}", command, env, folder=folder, is_quick=is_quick)
        started.append(stack.enter_context(one))
    return started


def test_workers_on_the_gpus_of_two_hosts_train_together(
    tmp_path: Path, programs: Template
) -> None:
    script = [SCRIPT, MODE, ",".join(map(str, LENGTHS))]
    with ExitStack() as stack:
        options = ["--gpus", "0,1", *script]
        for launcher in launch_on_each_host(
            stack, programs, tmp_path, options, ON_CPU, is_quick=True
        ):
            assert launcher.finish(WAIT_S) == 0
    logs = [tmp_path / HOSTS[i // 2] / f"workerlog.{i}" for i in range(4)]
    results = [result_of(log.read_text()) for log in logs]
    assert len({json.dumps(result["weights"]) for result in results}) == 1
    assert {result["trained"] for result in results} == {examples(LENGTHS)}


# Its processes are new ones: a killed one has given its port back when the launcher has reaped it.
@pytest.mark.parametrize("place", ["one host", "two hosts"])
def test_all_workers_start_again_from_the_newest_checkpoint_when_one_dies(
    place: str, tmp_path: Path, programs: Template
) -> None:
    (tmp_path / "saved").mkdir()
    script = [COUNTING_SCRIPT, str(tmp_path / "saved"), "20", "die"]
    options = ["--max_restart", "1", "--nproc_per_node", "2" if place == "one host" else "1"]
    env = {**ON_CPU, "TRIREME_ROOT": str(tmp_path)}
    if place == "one host":
        command = ["-m", "trireme", "launch", *options, *script]
        with programs.start("launcher", command, env, folder=tmp_path) as launcher:
            assert launcher.finish(WAIT_S) == 0
        outputs = [launcher.output]
        logs = [tmp_path / "log" / f"workerlog.{i}" for i in range(2)]
    else:
        with ExitStack() as stack:
            launchers = launch_on_each_host(
                stack, programs, tmp_path, [*options, *script], env, is_quick=False
            )
            assert [launcher.finish(WAIT_S) for launcher in launchers] == [0, 0]
            outputs = [launcher.output for launcher in launchers]
        logs = [tmp_path / HOSTS[i] / f"workerlog.{i}" for i in range(2)]
    for output in outputs:
        assert "starting all workers of this machine again (1 of at most 1 times)" in output
    for log in logs:  # 38 steps an epoch; the newest checkpoint was of the 15th
        assert re.findall(r"COUNTS \[2\.0\] steps (\d+)", log.read_text()) == [str(2 * 38 - 15)]


def test_a_job_whose_workers_die_too_often_fails(tmp_path: Path, programs: Template) -> None:
    (tmp_path / "dies.py").write_text("import sys; print('dying'); sys.exit(7)")
    command = ["-m", "trireme", "launch", "--nproc_per_node", "2", "--max_restart", "2", "dies.py"]
    with programs.start("launcher", command, {}, folder=tmp_path) as launcher:
        assert launcher.finish() == 7
        output = launcher.output
    assert (output.count("starting all workers"), output.count("failed: worker")) == (2, 1)
    assert (tmp_path / "log" / "workerlog.1").read_text().count("dying") <= 3


def test_a_launched_worker_without_its_gpu_says_what_helps(
    tmp_path: Path, programs: Template
) -> None:
    (tmp_path / "show.py").write_text(SHOW)
    output = programs.run(tmp_path, ["-m", "trireme", "launch", "--gpus", "0", "show.py"], code=1)
    assert re.search("expected a GPU for the label gpu.* TRIREME_DEVICE_GPU=cpu lets", output)


def test_the_network_device_and_the_gpu_reach_each_worker(
    tmp_path: Path, programs: Template
) -> None:
    (tmp_path / "show.py").write_text(SHOW)
    launch = ["-m", "trireme", "launch", "--gpus", "5,6"]
    programs.run(tmp_path, [*launch, "--interface", "lo", "show.py"], ON_CPU)
    for worker, gpu in enumerate(("5", "6")):
        log = (tmp_path / "log" / f"workerlog.{worker}").read_text()
        assert f"SEEN 127.0.0.1 cpu lo lo 0 {gpu}" in log
    output = programs.run(tmp_path, [*launch, "--interface", "eth77", "show.py"], ON_CPU, code=2)
    assert "expected a network device with an IPv4 address, of lo" in output
    elsewhere = ["--ips", HOSTS[1], "--start_port", str(free_ports(HOSTS[1:], 2))]
    output = programs.run(
        tmp_path, [*launch, *elsewhere, "--interface", "lo", "show.py"], ON_CPU, code=1
    )
    assert "expected to listen at 127.0.0.1, the address of the network device lo" in output
