"""How `trireme launch` takes the ends of its processes: killed with nothing left to do, stopped by
others, or too late.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.integration.launcher import Launcher


def join(launcher: Launcher, name: str) -> None:
    """As tr.init() does when the worker has come to the servers."""
    Path(launcher.peers[name].ask("env TRIREME_JOINING")).unlink()


@pytest.mark.parametrize("options", [[], ["--max_restart", "1"]])
@pytest.mark.parametrize(("first", "last"), [("worker", "server"), ("server", "worker")])
def test_a_process_killed_with_nothing_left_to_do_does_not_fail_the_job(
    launcher: Launcher, first: str, last: str, options: list[str]
) -> None:
    launcher.start("--server_num", "1", "--worker_num", "1", *options, num=2)
    pid = int(launcher.peers[f"{last} 0"].ask("pid"))
    launcher.peers[f"{first} 0"].end()
    os.kill(pid, signal.SIGKILL)
    code, _, err = launcher.finish()
    assert code == 0, err
    assert f"{last} 0 was killed by SIGKILL" in err
    assert "when the job was over: no loss" in err
    assert "starting it again" not in err


def test_a_server_and_a_worker_killed_when_the_job_is_over_do_not_fail_it(
    launcher: Launcher,
) -> None:
    launcher.start("--server_num", "2", "--worker_num", "1", "--max_restart", "1", num=3)
    launcher.peers["server 0"].end()  # it has heard the goodbyes of all workers
    for name in ("server 1", "worker 0"):
        os.kill(int(launcher.peers[name].ask("pid")), signal.SIGKILL)
    code, _, err = launcher.finish()
    assert code == 0, err
    assert "starting it again" not in err


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_server_that_others_have_stopped_has_not_ended_well(
    launcher: Launcher, is_restarted: bool
) -> None:
    options = ["--max_restart", "1"] if is_restarted else []
    launcher.start("--server_num", "1", "--worker_num", "1", *options, num=2)
    launcher.peers["server 0"].send("exit 143")
    if is_restarted:
        launcher.peers["server 0"].close()
        launcher.accept(1)
        for peer in launcher.peers.values():
            peer.send("exit 0")
    code, _, err = launcher.finish()
    assert code == (0 if is_restarted else 143), err
    assert "server 0 failed with exit code 143 (was it stopped by a signal from elsewhere?)" in err


def test_a_worker_that_is_asked_to_stop_again_is_named_once(launcher: Launcher) -> None:
    launcher.start("--server_num", "1", "--worker_num", "1", "--grace_s", "0.1", num=2)
    assert launcher.peers["worker 0"].ask("stubborn") == "done"
    launcher.peers["server 0"].send("exit 3")
    code, _, err = launcher.finish()
    assert code == 3
    assert err.count("stopping worker 0") == 1


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_compute_worker_that_others_have_stopped_has_not_ended_well(
    launcher: Launcher, is_restarted: bool
) -> None:
    options = ["--server_num", "1", "--worker_num", "1", "--heter_worker_num", "1"]
    launcher.start(*options, *(["--max_restart", "1"] if is_restarted else []), num=3)
    launcher.peers["heter 0"].send("exit 143")
    if is_restarted:
        launcher.peers["heter 0"].close()
        launcher.accept(1)
        for peer in launcher.peers.values():
            peer.send("exit 0")
    code, _, err = launcher.finish()
    assert code == (0 if is_restarted else 143), err
    assert "compute worker 0 failed with exit code 143 (was it stopped by a signal" in err


def test_a_compute_worker_stopped_after_the_workers_does_not_fail_the_job(
    launcher: Launcher,
) -> None:
    options = ["--server_num", "1", "--worker_num", "1", "--heter_worker_num", "1"]
    launcher.start(*options, num=3)
    launcher.peers["worker 0"].end()
    launcher.peers["heter 0"].send("exit 143")
    launcher.peers["heter 0"].wait_gone()
    launcher.peers["server 0"].send("exit 0")
    code, _, err = launcher.finish()
    assert code == 0, err
    assert "when the job was over: no loss" in err


def test_a_server_killed_after_the_workers_comes_back_to_remove_its_state(
    launcher: Launcher,
) -> None:
    launcher.start("--server_num", "1", "--worker_num", "1", "--max_restart", "1", num=2)
    server = launcher.peers["server 0"]
    pid, folder = int(server.ask("pid")), Path(server.ask("env TRIREME_STATE_DIR"))
    launcher.peers["worker 0"].end()
    (launcher.folder / folder).mkdir(parents=True)
    (launcher.folder / folder / "log-00000001").touch()
    os.kill(pid, signal.SIGKILL)
    server.close()
    launcher.accept(1)
    launcher.peers["server 0"].send("exit 0")
    code, _, err = launcher.finish()
    assert code == 0, err


def test_a_server_killed_when_it_had_removed_its_state_is_not_waited_for(
    launcher: Launcher,
) -> None:
    launcher.start("--server_num", "1", "--worker_num", "1", "--max_restart", "1", num=2)
    join(launcher, "worker 0")
    server = launcher.peers["server 0"]
    (launcher.folder / server.ask("env TRIREME_STATE_DIR")).mkdir(parents=True)
    os.kill(int(server.ask("pid")), signal.SIGKILL)  # and the worker has not quite ended
    launcher.peers["worker 0"].ask("print batch 1\\n")
    launcher.peers["worker 0"].end()
    code, _, err = launcher.finish()
    assert code == 0, err
    assert "starting it again" not in err


def test_a_worker_that_fails_after_the_servers_have_ended_is_not_restarted(
    launcher: Launcher,
) -> None:
    launcher.start("--server_num", "1", "--worker_num", "1", "--max_restart", "1", num=2)
    join(launcher, "worker 0")
    launcher.peers["server 0"].end()
    launcher.peers["worker 0"].send("exit 7")
    code, _, err = launcher.finish()
    assert code == 7
    assert "starting it again" not in err


def test_a_worker_started_again_after_its_goodbye_is_not_waited_for(launcher: Launcher) -> None:
    launcher.start("--server_num", "1", "--worker_num", "2", "--max_restart", "1", num=3)
    join(launcher, "worker 0")
    worker = launcher.peers["worker 1"]
    os.kill(int(worker.ask("pid")), signal.SIGKILL)  # its goodbye has been heard
    worker.close()
    launcher.accept(1)  # one that finds no server
    launcher.peers["server 0"].end()
    launcher.peers["worker 0"].send("exit 0")
    code, _, err = launcher.finish()
    assert code == 0, err
    assert "worker 1 was killed by SIGTERM when the job was over: no loss" in err


def test_a_worker_started_again_that_has_joined_ends_its_script(launcher: Launcher) -> None:
    launcher.start("--server_num", "1", "--worker_num", "1", "--max_restart", "1", num=2)
    worker = launcher.peers["worker 0"]
    os.kill(int(worker.ask("pid")), signal.SIGKILL)
    worker.close()
    launcher.accept(1)
    join(launcher, "worker 0")
    worker = launcher.peers["worker 0"]
    launcher.peers["server 0"].end()
    worker.ask("print batch 1\\n")
    worker.send("exit 7")
    assert launcher.finish()[0] == 7
    assert launcher.log("workerlog.0") == "batch 1\n"


def test_a_server_killed_when_it_had_removed_its_state_begins_no_job_anew(
    launcher: Launcher,
) -> None:
    launcher.start("--server_num", "2", "--worker_num", "2", "--max_restart", "1", num=4)
    for index in range(2):
        folder = launcher.peers[f"server {index}"].ask("env TRIREME_STATE_DIR")
        (launcher.folder / folder).mkdir(parents=True)
    join(launcher, "worker 0")
    worker = launcher.peers["worker 1"]
    os.kill(int(worker.ask("pid")), signal.SIGKILL)
    worker.close()
    launcher.accept(1)
    for index in range(2):
        os.kill(int(launcher.peers[f"server {index}"].ask("pid")), signal.SIGKILL)
    launcher.peers["worker 0"].end()
    code, _, err = launcher.finish()
    assert code == 0, err
    assert err.count("starting it again") == 1
