"""`trireme launch` with controlled scripts: real processes that execute the test's commands."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import socket
import struct
import subprocess
import termios
from contextlib import suppress
from pathlib import Path

import pytest

from tests.integration.launcher import (
    COMMAND,
    CONTROLLED_SCRIPT,
    ELSEWHERE,
    WAIT_S,
    Launcher,
    refused,
)
from trireme.launch.key_folder import make_shared_folder


def test_launch_runs_servers_and_workers_to_a_good_end(launcher: Launcher) -> None:
    launcher.start("--server_num", "2", "--worker_num", "2", num=4)
    peers = launcher.peers
    assert sorted(peers) == ["server 0", "server 1", "worker 0", "worker 1"]
    for name, peer in peers.items():
        assert peer.ask("env TRIREME_NUM_WORKERS") == "2"
        peer.ask(f"print hello from {name}\\n")
    addresses = peers["worker 0"].ask("env TRIREME_SERVERS").split(",")
    for index, address in enumerate(addresses):
        assert peers[f"server {index}"].ask("env TRIREME_LISTEN") == address
        peers["worker 1"].ask(f"greet {address}")  # the port already listens
        assert peers[f"server {index}"].ask("accept") == "worker 1"
    for peer in peers.values():
        peer.send("exit 0")
    code, out, err = launcher.finish()
    assert code == 0
    assert out == "hello from worker 0\n"
    assert "2 servers and 2 workers ended well" in err.splitlines()[-1]
    for name in peers:
        assert launcher.log(name.replace(" ", "log.")) == f"hello from {name}\n"


def test_launch_does_not_count_servers_where_the_workers_hold_the_rows(launcher: Launcher) -> None:
    launcher.start("--server_num", "0", "--worker_num", "2", num=2)
    for peer in launcher.peers.values():
        peer.send("exit 0")
    code, _, err = launcher.finish()
    assert code == 0
    assert re.search(r"OMP_NUM_THREADS.* = \d+ for workers; set them yourself", err)
    assert "launch: 2 workers ended well" in err.splitlines()[-1]


def test_a_second_job_does_not_write_the_logs_of_one_that_is_running(launcher: Launcher) -> None:
    launcher.start("--server_num", "1", "--worker_num", "2", num=3)
    launcher.peers["worker 1"].ask("print hello\\n")
    error = refused(launcher.folder, "--server_num", "1", "--worker_num", "1", launcher.script, "1")
    assert "expected log/serverlog.0 to be this job's alone, found another job" in error
    assert "give each job another --log_dir" in error
    assert launcher.log("workerlog.1") == "hello\n"
    for peer in launcher.peers.values():
        peer.send("exit 0")
    assert launcher.finish()[0] == 0
    for peer in launcher.peers.values():
        peer.close()
    launcher.start("--server_num", "1", "--worker_num", "2", num=3)
    assert launcher.log("workerlog.1") == ""
    for peer in launcher.peers.values():
        peer.send("exit 0")
    assert launcher.finish()[0] == 0


def test_launch_says_what_a_script_imports_in_place_of_paddle(launcher: Launcher) -> None:
    launcher.start("--server_num", "1", "--worker_num", "1", num=2)
    launcher.peers["worker 0"].send("raise No module named 'paddle'")
    err = launcher.finish()[2]
    assert "docs/paddlerec.md says what scripts import for paddle" in err


@pytest.mark.parametrize("name", ["server 1", "worker 0", "worker 1"])
def test_launch_ends_with_name_code_and_last_lines_of_the_one_that_fails(
    launcher: Launcher, name: str
) -> None:
    launcher.start("--server_num", "2", "--worker_num", "2", num=4)
    launcher.peers[name].ask("print progress 1\\rprogress 2\\n")
    launcher.peers[name].send("raise the disk is full")
    code, _, err = launcher.finish()
    assert code == 1
    assert "tools/*.py are left out" not in err
    path = Path("log") / name.replace(" ", "log.")
    assert f"{name} failed with exit code 1; last lines of {path}:" in err
    assert "    RuntimeError: the disk is full" in err
    assert "    progress 2\n" in err
    assert f"failed: {name} failed with exit code 1" in err.splitlines()[-1]


def test_a_full_disk_under_the_logs_ends_no_process(launcher: Launcher, tmp_path: Path) -> None:
    logs = tmp_path / "log"
    logs.mkdir()
    (logs / "workerlog.1").symlink_to("/dev/full")
    launcher.start("--server_num", "1", "--worker_num", "2", num=3)
    for _, peer in sorted(launcher.peers.items()):
        assert peer.ask("print batch 1\\n") == "done"
        peer.end()
    code, _, err = launcher.finish()
    assert code == 0
    assert err.count("launch: cannot write log/workerlog.1: No space left on device") == 1
    assert launcher.log("workerlog.0") == "batch 1\n"


def test_launch_passes_on_the_exit_code_and_names_a_killing_signal(tmp_path: Path) -> None:
    for command, code, words in (
        ("exit 7", 7, "worker 0 failed with exit code 7"),
        ("env", 137, "worker 0 was killed by SIGKILL (is the machine out of memory?)"),
    ):
        launcher = Launcher(tmp_path)
        try:
            launcher.start("--server_num=1", "--trainer_num=1", num=2)
            if command == "env":
                pid = int(launcher.peers["worker 0"].ask("pid"))
                os.kill(pid, signal.SIGKILL)
            else:
                launcher.peers["worker 0"].send(command)
            actual, _, err = launcher.finish()
        finally:
            launcher.close()
        assert actual == code
        assert words in err


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_launch_stops_all_processes_on_a_stop_signal(
    launcher: Launcher, number: signal.Signals, code: int
) -> None:
    process = launcher.start("--server_num", "1", "--worker_num", "2", num=3)
    assert launcher.peers["worker 1"].ask("polite") == "done"
    process.send_signal(number)
    actual, _, err = launcher.finish()
    assert actual == code
    assert f"stopped by {number.name}" in err.splitlines()[-1]
    assert "told to stop" in launcher.log("workerlog.1")


def test_launch_kills_what_does_not_stop_within_the_grace_period(launcher: Launcher) -> None:
    launcher.start("--server_num", "1", "--worker_num", "1", "--grace_s", "0.1", num=2)
    assert launcher.peers["server 0"].ask("stubborn") == "done"
    launcher.peers["worker 0"].send("exit 3")
    code, _, err = launcher.finish()
    assert code == 3
    assert "killing server 0, which did not end at SIGTERM" in err


def test_launch_kills_at_once_at_a_second_stop_signal(launcher: Launcher) -> None:
    process = launcher.start("--server_num", "1", "--worker_num", "1", "--grace_s", "600", num=2)
    assert launcher.peers["server 0"].ask("stubborn") == "done"
    process.send_signal(signal.SIGINT)
    launcher.peers["worker 0"].wait_gone()
    while process.poll() is None:  # within a second it is the first one again
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.2)
    code, _, err = launcher.finish()
    assert code == 130
    assert "killing server 0" in err


def test_launch_leaves_nothing_running_when_it_is_killed(launcher: Launcher) -> None:
    process = launcher.start("--server_num", "1", "--worker_num", "2", num=3)
    for peer in launcher.peers.values():
        assert peer.ask("stubborn") == "done"
    process.kill()
    assert launcher.finish()[0] == -signal.SIGKILL


def test_launch_ends_the_children_of_its_processes(launcher: Launcher) -> None:
    launcher.start("--server_num", "1", "--worker_num", "1", num=2)
    launcher.peers["worker 0"].ask("spawn reader")
    launcher.peers["server 0"].ask("spawn backup")
    launcher.accept(2)
    assert launcher.peers["reader"].ask("stubborn") == "done"
    launcher.peers["server 0"].send("exit 0")
    launcher.peers["worker 0"].send("exit 0")
    assert launcher.finish()[0] == 0


def test_launch_gives_worker_0_a_terminal_when_it_has_one(launcher: Launcher) -> None:
    ours, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 33, 111, 0, 0))
    launcher.start("--server_num", "1", "--worker_num", "1", num=2, stdout=terminal)
    size = launcher.peers["worker 0"].ask("terminal")
    assert size == "True os.terminal_size(columns=111, lines=33)"
    assert launcher.peers["server 0"].ask("terminal").strip() == "False"
    launcher.peers["worker 0"].ask(r"print \x1b[31m10%\x1b[0m\r20%\r30%\nend\n")
    for peer in launcher.peers.values():
        peer.send("exit 0")
    code, _, _ = launcher.finish()
    os.close(terminal)
    shown = b""
    while not shown.endswith(b"end\r\n"):
        shown += os.read(ours, 4096)
    os.close(ours)
    assert code == 0
    assert shown == b"\x1b[31m10%\x1b[0m\r20%\r30%\r\nend\r\n"
    assert launcher.log("workerlog.0") == "30%\nend\n"


def test_launch_shares_the_cores_unless_the_user_has_chosen(launcher: Launcher) -> None:
    launcher.start("--server_num", "1", "--worker_num", "2", num=3, OMP_NUM_THREADS="5")
    expected = str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert launcher.peers["worker 0"].ask("env OMP_NUM_THREADS") == "5"
    assert launcher.peers["worker 0"].ask("env TRIREME_THREADS") == expected
    assert launcher.peers["worker 0"].ask("env OMP_WAIT_POLICY") == "PASSIVE"
    for peer in launcher.peers.values():
        peer.send("exit 0")
    _, _, err = launcher.finish()
    assert "TRIREME_THREADS =" in err
    assert "OMP_NUM_THREADS" not in err


def test_launch_hands_its_options_to_the_processes(launcher: Launcher) -> None:
    make_shared_folder(launcher.folder / "some/keys")
    (launcher.folder / "some/root").mkdir()
    options = ("--keys", "some/keys", "--timeout_s", "12.5", "--root", "some/root")
    options += ("--log_dir", "out/l", "--limits", "tables_max=3", "--store_hosts", "minio:9000")
    stale = {"TRIREME_LISTEN": "1.2.3.4:5", "TRIREME_INDEX": "9"}
    launcher.start("--server_num=1", "--worker_num=1", *options, num=2, **stale)
    for name in ("server 0", "worker 0"):
        peer = launcher.peers[name]
        assert peer.ask("env TRIREME_INSECURE") == ""
        assert peer.ask("env TRIREME_KEYS") == "some/keys"
        assert peer.ask("env TRIREME_ROOT") == "some/root"
        assert peer.ask("env TRIREME_LIMITS") == "tables_max=3"
        assert peer.ask("env TRIREME_STORE_HOSTS") == "minio:9000"
        assert peer.ask("env TRIREME_TIMEOUT_S") == "12.5"
    assert launcher.peers["worker 0"].ask("env TRIREME_LISTEN") == ""
    for peer in launcher.peers.values():
        peer.send("exit 0")
    assert launcher.finish()[0] == 0
    actual = sorted(path.name for path in (launcher.folder / "out" / "l").iterdir())
    assert actual == ["serverlog.0", "workerlog.0"]


@pytest.mark.parametrize("option", [True, False])
def test_launch_gives_every_process_a_port_of_its_own_for_metrics(
    launcher: Launcher, option: bool
) -> None:
    options = ["--metrics", "0.0.0.0:9100"] if option else []
    env = {"TRIREME_METRICS": "1" if option else "9100"}
    launcher.start("--server_num=1", "--worker_num=2", *options, num=3, **env)
    host = "0.0.0.0" if option else "127.0.0.1"
    for n, name in enumerate(("server 0", "worker 0", "worker 1")):
        peer = launcher.peers[name]
        assert peer.ask("env TRIREME_METRICS") == f"{host}:{9100 + n}"
        peer.send("exit 0")
    assert launcher.finish()[0] == 0


def test_launch_hands_on_that_the_network_is_trusted(launcher: Launcher) -> None:
    launcher.start("--server_num=1", "--worker_num=1", "--insecure", num=2)
    for peer in launcher.peers.values():
        assert peer.ask("env TRIREME_INSECURE") == "1"
        peer.send("exit 0")
    assert launcher.finish()[0] == 0


def test_launch_starts_only_what_belongs_on_this_machine(launcher: Launcher) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    workers = f"{ELSEWHERE},127.0.0.1:0,127.0.0.1:1"
    launcher.start("--servers", f"{ELSEWHERE},{address}", "--trainers", workers, num=3)
    assert sorted(launcher.peers) == ["server 1", "worker 1", "worker 2"]
    assert launcher.peers["server 1"].ask("env TRIREME_LISTEN") == address
    assert launcher.peers["worker 2"].ask("env TRIREME_SERVERS") == f"{ELSEWHERE},{address}"
    assert launcher.peers["worker 2"].ask("env TRIREME_NUM_WORKERS") == "3"
    for peer in launcher.peers.values():
        peer.send("exit 0")
    assert launcher.finish()[0] == 0


def test_launch_refuses_wrong_commands_before_it_starts_anything(tmp_path: Path) -> None:
    two = ("--server_num", "1", "--worker_num", "1")
    assert "did you mean --server_num?" in refused(tmp_path, "--server_nun", "1", CONTROLLED_SCRIPT)
    assert "found no file 'train.py'" in refused(tmp_path, *two, "train.py")
    tool = refused(tmp_path, *two, "tools/static_ps_trainer.py", "-m", "config.yaml")
    assert "tools/*.py are left out: trireme launch OPTIONS -m FILE" in tool
    assert "--worker_num or --workers before the script, found neither" in refused(
        tmp_path, "--server_num", "1", CONTROLLED_SCRIPT
    )
    assert "found 0; to train in one process run the script with python" in refused(
        tmp_path, "--server_num", "1", "--worker_num", "0", CONTROLLED_SCRIPT
    )
    for counts, expected in (
        (("1", "99999"), "at most 4096 workers, found 99999: the coordinator keeps"),
        (("0", "99999"), "at most 4096 workers, found 99999: the coordinator keeps"),
        (("99999", "1"), "at most 4096 servers, found 99999: each has at least one of the buckets"),
        (("1", "1", "--streams", "99999"), "--streams of 1 to 4096, found 99999: servers and"),
        (("1", "1", "--heter_worker_num", "99999"), "at most 4096 compute workers, found 99999"),
    ):
        named = ("--server_num", counts[0], "--worker_num", *counts[1:])
        assert expected in refused(tmp_path, *named, CONTROLLED_SCRIPT)
    assert "barriers and reductions go through the servers" in refused(
        tmp_path, *two, "--gloo_port", "1", CONTROLLED_SCRIPT
    )
    assert "--server_num to be the length of --servers = 2" in refused(
        tmp_path, *two, "--servers", "127.0.0.1:1,127.0.0.1:2", CONTROLLED_SCRIPT
    )
    assert "different addresses" in refused(
        tmp_path, "--worker_num", "1", "--servers", "a:1,a:1", CONTROLLED_SCRIPT
    )
    assert "found '2'; a number of processes: --server_num, --worker_num" in refused(
        tmp_path, "--worker_num", "1", "--servers", "2", CONTROLLED_SCRIPT
    )
    assert "ports of 1 to 65535, found '127.0.0.1:0'" in refused(
        tmp_path, "--worker_num", "1", "--servers", "127.0.0.1:0", CONTROLLED_SCRIPT
    )
    assert "expected --keys or --insecure, found both" in refused(
        tmp_path, *two, "--keys", ".", "--insecure", CONTROLLED_SCRIPT
    )
    assert "expected --root to be a folder, found none at none" in refused(
        tmp_path, *two, "--root", "none", CONTROLLED_SCRIPT
    )
    assert (
        f"--log_dir to be a folder to write to, found {CONTROLLED_SCRIPT}: File exists"
        in refused(tmp_path, *two, "--log_dir", CONTROLLED_SCRIPT, CONTROLLED_SCRIPT)
    )
    assert "list all workers" in refused(
        tmp_path, "--worker_num", "1", "--servers", ELSEWHERE, CONTROLLED_SCRIPT
    )
    assert "address of this machine" in refused(
        tmp_path, "--workers", ELSEWHERE, "--servers", ELSEWHERE, CONTROLLED_SCRIPT
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        text = refused(tmp_path, "--worker_num", "1", "--servers", address, CONTROLLED_SCRIPT)
        assert f"to listen on {address}, found: Address already in use; process" in text
        assert f"`kill {os.getpid()}` ends it; or choose another port" in text
    assert list(tmp_path.iterdir()) == []


def test_launch_restarts_a_dead_server_at_its_address(launcher: Launcher) -> None:
    options = ["--server_num", "2", "--worker_num", "1", "--max_restart", "2"]
    process = launcher.start(*options, num=3)
    server = launcher.peers["server 1"]
    place = [server.ask(f"env {name}") for name in ("TRIREME_LISTEN", "TRIREME_STATE_DIR")]
    for ending in ("raise out of memory", "pid"):
        server = launcher.peers["server 1"]
        server.ask(f"print before {ending}\\n")
        if ending == "pid":
            os.kill(int(server.ask("pid")), signal.SIGKILL)
        else:
            server.send(ending)
        server.wait_gone()
        launcher.accept(1)
        again = launcher.peers["server 1"]
        assert again is not server
        actual = [again.ask(f"env {name}") for name in ("TRIREME_LISTEN", "TRIREME_STATE_DIR")]
        assert actual == place
        launcher.peers["worker 0"].ask(f"greet {place[0]}")
        assert again.ask("accept") == "worker 0"
        server.close()
    assert launcher.peers["server 0"].ask("env TRIREME_DURABILITY") == "process"
    launcher.peers["server 1"].send("exit 1")
    assert process.wait(timeout=WAIT_S) == 1
    _, _, err = launcher.finish()
    assert "server 1 failed with exit code 1; starting it again (1 of at most 2 times)" in err
    assert "server 1 was killed by SIGKILL" in err
    assert "starting it again (2 of at most 2 times)" in err
    log = launcher.log("serverlog.1")
    assert log.index("before raise") < log.index("out of memory") < log.index("before pid")


def test_launch_does_not_start_a_server_again_that_was_refused(launcher: Launcher) -> None:
    launcher.start("--server_num", "1", "--worker_num", "1", "--max_restart", "9", num=2)
    launcher.peers["server 0"].send("exit 2")
    code, _, err = launcher.finish()
    assert code == 2
    assert "starting it again" not in err


def test_launch_refuses_restarts_of_servers_that_keep_nothing(tmp_path: Path) -> None:
    options = ["--server_num=1", "--worker_num=1", "--max_restart=1", "--durability=none"]
    error = refused(tmp_path, *options, CONTROLLED_SCRIPT)
    assert "expected --durability process or machine with --max_restart 1, found none" in error
    error = refused(tmp_path, *options[:2], "--max_restart=-1", CONTROLLED_SCRIPT)
    assert "expected --max_restart as an integer >= 0, found -1" in error


def test_each_server_gets_a_folder_of_its_own_for_what_it_keeps(launcher: Launcher) -> None:
    options = ["--server_num", "2", "--worker_num", "1", "--log_bytes", "77"]
    launcher.start(*options, "--durability", "process", num=3)
    for index in (0, 1):
        peer = launcher.peers[f"server {index}"]
        assert peer.ask("env TRIREME_DURABILITY") == "process"
        assert peer.ask("env TRIREME_STATE_DIR") == f"log/state/server-{index}"
        assert peer.ask("env TRIREME_LOG_BYTES") == "77"
    assert launcher.peers["worker 0"].ask("env TRIREME_STATE_DIR") == ""


def test_the_launchers_variables_set_durability(launcher: Launcher) -> None:
    launcher.start(
        *("--server_num", "1", "--worker_num", "1"),
        num=2,
        TRIREME_DURABILITY="machine",
        TRIREME_STATE_DIR="kept",
    )
    assert launcher.peers["server 0"].ask("env TRIREME_DURABILITY") == "machine"
    assert launcher.peers["server 0"].ask("env TRIREME_STATE_DIR") == "kept/server-0"


def test_joining_workers_get_the_servers_and_no_index(
    launcher: Launcher,
) -> None:
    launcher.start("--join", "127.0.0.1:1,127.0.0.1:2", num=1, STANDIN_NAME="late")
    settings = {
        name: launcher.peers["late"].ask(f"env TRIREME_{name}") for name in ("SERVERS", "JOIN")
    }
    assert settings == {"SERVERS": "127.0.0.1:1,127.0.0.1:2", "JOIN": "1"}
    for name in ("INDEX", "NUM_WORKERS", "STREAMS"):
        assert launcher.peers["late"].ask(f"env TRIREME_{name}") == ""
    launcher.peers["late"].send("exit 0")
    code, _, err = launcher.finish()
    assert code == 0
    assert "1 worker to join; logs in log/" in err
    assert launcher.process is not None
    assert (launcher.folder / f"log/lateworkerlog.{launcher.process.pid}.0").is_file()


def test_the_number_of_streams_is_set_for_all_and_not_by_joining_workers(
    launcher: Launcher,
) -> None:
    launcher.start("--server_num", "1", "--worker_num", "1", "--streams", "8", num=2)
    assert launcher.peers["worker 0"].ask("env TRIREME_STREAMS") == "8"
    for peer in launcher.peers.values():
        peer.send("exit 0")
    assert launcher.finish()[0] == 0
    for options, message in (
        (["--join", "a:1", "--streams", "8"], "because the job has the rest, found --streams"),
        (["--join", "a:1", "--root", "."], "because the job has the rest, found --root"),
        (["--server_num", "1", "--worker_num", "1", "--streams", "0"], "--streams of 1 to 4096"),
    ):
        run = subprocess.run(
            [*COMMAND, *options, CONTROLLED_SCRIPT], capture_output=True, text=True, timeout=WAIT_S
        )
        assert run.returncode == 2
        assert message in run.stderr
