"""A `trireme launch` whose terminal or pipe is paused, closed, or was never there."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.integration.launcher import COMMAND, WAIT_S, Launcher
from tests.integration.processes import clean_environment
from trireme.launch import printing

LINE = "x" * 60_000


def test_a_pipe_that_nobody_reads_keeps_the_launcher_from_nothing(launcher: Launcher) -> None:
    unread, output = os.pipe()
    options = ("--max_restart", "1", "--grace_s", "3")
    launcher.start("--server_num", "1", "--worker_num", "1", *options, num=2, stdout=output)
    os.close(output)
    worker = launcher.peers["worker 0"]
    for _ in range(8):  # more than the pipe holds
        worker.ask(f"print {LINE}\\n")
    server = launcher.peers["server 0"]
    os.kill(int(server.ask("pid")), signal.SIGKILL)
    server.close()
    launcher.accept(1)
    assert launcher.process is not None
    launcher.process.terminate()
    code, _, err = launcher.finish()
    assert code == 128 + signal.SIGTERM
    assert "server 0 was killed by SIGKILL" in err
    os.close(unread)
    assert launcher.log("workerlog.0") == f"{LINE}\n" * 8


def test_a_job_goes_on_when_its_launcher_was_stopped_for_a_while(launcher: Launcher) -> None:
    process = launcher.start("--server_num", "1", "--worker_num", "1", num=2)
    worker = launcher.peers["worker 0"]
    process.send_signal(signal.SIGTSTP)
    worker.send(f"print {LINE * 4}\\n")  # more than a pipe holds
    assert launcher.peers["server 0"].ask("print batch 1\\n") == "done"
    process.send_signal(signal.SIGCONT)
    assert worker.answer() == "done"
    for _, peer in sorted(launcher.peers.items()):
        peer.send("exit 0")
    assert launcher.finish()[0] == 0
    assert launcher.log("workerlog.0") == f"{LINE * 4}\n"


def test_a_job_whose_terminal_is_closed_is_stopped_as_by_any_signal(launcher: Launcher) -> None:
    process = launcher.start("--server_num", "1", "--worker_num", "2", num=3)
    for peer in launcher.peers.values():
        peer.ask("polite")
    for file in (process.stdout, process.stderr):
        assert file is not None
        file.close()
    launcher.peers["worker 0"].ask("print batch 1\\n")
    process.send_signal(signal.SIGHUP)
    assert process.wait(WAIT_S) == 128 + signal.SIGHUP
    for peer in launcher.peers.values():
        peer.wait_gone()
    for index in range(2):
        assert launcher.log(f"workerlog.{index}").endswith("told to stop\n"), "not killed"
    process.stdout = process.stderr = None  # for close()


def test_a_job_needs_no_stdout_and_no_stderr(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('hello')\n")
    words = [*COMMAND, "--server_num", "0", "--worker_num", "1", str(script)]
    shell = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *words]
    ended = subprocess.run(
        shell, cwd=tmp_path, env=clean_environment(), timeout=WAIT_S, check=False
    )
    assert ended.returncode == 0
    assert (tmp_path / "log/workerlog.0").read_text() == "hello\n"


def test_a_slow_reader_gets_all(tmp_path: Path) -> None:
    num = 2 * printing.WAITING_BYTES_MAX // len(LINE)
    script = tmp_path / "script.py"
    script.write_text(
        f"for number in range({num}):\n"
        f"    print(number, 'x' * {len(LINE)})\n"
        f"    if number == {num // 3}:\n"
        "        open('begun', 'w').close()\n"
    )
    words = [*COMMAND, "--server_num", "0", "--worker_num", "1", str(script)]
    reader = "until [ -e begun ]; do sleep 0.1; done; cat > shown"
    ended = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f'"$@" | ({reader})', "bash", *words],
        cwd=tmp_path,
        env=clean_environment(),
        timeout=WAIT_S,
        check=False,
    )
    assert ended.returncode == 0
    lines = (tmp_path / "shown").read_text().splitlines()
    assert [line.split()[0] for line in lines] == [str(number) for number in range(num)]


def test_what_nobody_read_in_time_is_counted_where_it_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line = LINE * 4 + "\n"  # more than the pipe holds
    monkeypatch.setattr(printing, "WAITING_BYTES_MAX", 3 * len(line))
    read_fd, write_fd = os.pipe()
    printer = printing.Printer(write_fd)
    for number in range(5):
        assert printer.is_full == (number > 2)
        printer.write(line.encode())
    with open(read_fd) as reader:
        assert [reader.readline() for _ in range(3)] == [line] * 3
        printer.finish(WAIT_S)
        printer.write(b"end\n")
        printer.finish(WAIT_S)
        os.close(write_fd)
        note = f"trireme launch: {2 * len(line)} bytes are not shown here: nobody read in time\n"
        assert reader.read() == f"\n{note}end\n"


def test_what_is_for_a_closed_pipe_waits_for_nobody() -> None:
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    printer = printing.Printer(write_fd)
    for _ in range(5):
        printer.write(LINE.encode())
    printer.finish(WAIT_S)
    os.close(write_fd)


def test_a_process_is_started_again_whose_log_was_removed(launcher: Launcher) -> None:
    launcher.start("--server_num", "1", "--worker_num", "2", "--max_restart", "1", num=3)
    logs = launcher.folder / "log"

    def start_again(name: str) -> None:
        worker = launcher.peers[name]
        os.kill(int(worker.ask("pid")), signal.SIGKILL)
        worker.close()
        launcher.accept(1)

    shutil.rmtree(logs)
    start_again("worker 0")
    with (logs / "workerlog.0").open() as made:
        shutil.rmtree(logs)
        logs.touch()  # where no log can be made
        start_again("worker 1")
        for _, peer in sorted(launcher.peers.items()):
            assert peer.ask("print hello\\n") == "done"
            peer.end()
        code, _, err = launcher.finish()
        assert made.read() == "hello\n"
    assert code == 0
    warning = "launch: cannot write log/workerlog.1: File exists; it lacks what follows"
    assert err.count(warning) == 1


def test_a_process_that_the_system_cannot_start_is_named(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import signal\nsignal.pause()\n")
    words = [*COMMAND, "--server_num", "2", "--worker_num", "4", str(script)]
    ended = subprocess.run(
        ["sh", "-c", 'ulimit -n 22; exec "$@"', "sh", *words],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert ended.returncode == 1
    assert re.search(r"error: cannot start \w+ \d: Too many open files\n$", ended.stderr)
