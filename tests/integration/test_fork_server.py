"""Processes that `trireme launch` forks: what they see, and what happens when any of them ends."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import trireme
from tests.integration.launcher import COMMAND, WAIT_S, Launcher, Peer
from tests.integration.processes import clean_environment
from trireme.errors import BadRequest
from trireme.launch import environment
from trireme.launch.fork_server import is_forked
from trireme.launch.fork_server_program import hides_loaded
from trireme.launch.init import init

HERE = Path(__file__).parent
OBSERVE = str(HERE / "observing_script.py")
ONE_EACH = ("--server_num", "1", "--worker_num", "1")


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path, str(HERE / "forked_script.py"))
    yield launcher
    launcher.close()


def fork_servers(launcher: Launcher) -> list[int]:
    """Children of the launcher that wait for orders to fork."""
    assert launcher.process is not None
    pid = launcher.process.pid
    texts = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # ended since
            texts[int(child)] = Path(f"/proc/{child}/cmdline").read_text()
    return [child for child, text in texts.items() if "to fork processes" in text]


def kill(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Returns when the process has ended."""
    ended = os.pidfd_open(pid)
    os.kill(pid, number)
    assert select.select([ended], [], [], WAIT_S)[0]
    os.close(ended)


def wait_ended(pid: int) -> None:
    """Wait until a process, which may be gone already, has ended by itself."""
    with contextlib.suppress(ProcessLookupError):
        ended = os.pidfd_open(pid)
        assert select.select([ended], [], [], WAIT_S)[0]
        os.close(ended)


def observed(folder: Path, start_method: str) -> dict[str, dict[str, Any]]:
    """What a server and a worker print, by their logs' names."""
    folder.mkdir()
    options = [*ONE_EACH, "--start_method", start_method, "--log_dir", str(folder)]
    done = subprocess.run(
        [*COMMAND, *options, os.path.relpath(OBSERVE), "an argument", "--of=it"],
        env={**clean_environment(), "PYTHONFAULTHANDLER": "1"},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert done.returncode == 0, done.stderr
    return {path.name: json.loads(path.read_text()) for path in sorted(folder.glob("*log.0"))}


def test_a_forked_process_sees_what_a_started_one_sees(tmp_path: Path) -> None:
    forked, started = (observed(tmp_path / method, method) for method in ("forkserver", "spawn"))
    assert list(forked) == ["serverlog.0", "workerlog.0"]
    for name, process in forked.items():
        seen, expected = process["seen"], started[name]["seen"]
        for variable in (
            "TRIREME_SERVERS",
            "TRIREME_LISTEN",
            "TRIREME_LISTEN_FD",
            "TRIREME_JOINING",
        ):
            is_there = [one["variables"].pop(variable, None) is None for one in (seen, expected)]
            assert is_there[0] == is_there[1], variable
        assert seen == expected
        assert process["batches"] == [[0, 1], [2, 3]]
        assert started[name]["batches"] == []
    server, worker = (forked[name]["drawn"] for name in ("serverlog.0", "workerlog.0"))
    assert [one == other for one, other in zip(server, worker, strict=True)] == [False, False]


def test_a_job_survives_its_fork_server_and_ends_all_with_its_own_end(launcher: Launcher) -> None:
    launcher.start(*ONE_EACH, "--max_restart", "9", num=2)
    [fork_server] = fork_servers(launcher)

    def restarted(name: str) -> Peer:
        launcher.peers[name].wait_gone()
        launcher.peers[name].close()
        launcher.accept(1)
        return launcher.peers[name]

    for name in ("server 0", "worker 0"):
        kill(int(launcher.peers[name].ask("pid")))
        assert restarted(name).ask("loaded torch") == "True"
    server = launcher.peers["server 0"]
    address = server.ask("env TRIREME_LISTEN")
    launcher.peers["worker 0"].ask(f"greet {address}")
    assert server.ask("accept") == "worker 0"
    launcher.peers["worker 0"].send("raise the disk is full")
    kill(int(restarted("worker 0").ask("pid")), signal.SIGINT)
    assert restarted("worker 0").ask("stubborn") == "done"
    kill(fork_server)
    assert launcher.peers["worker 0"].ask("loaded torch") == "True"
    kill(int(launcher.peers["server 0"].ask("pid")))
    assert restarted("server 0").ask("loaded torch") == "False"
    assert launcher.process is not None
    launcher.process.kill()
    code, _, err = launcher.finish()  # when both have gone
    assert code == -signal.SIGKILL
    assert "worker 0 failed with exit code 1; starting it again" in err
    assert "worker 0 was killed by SIGINT; starting it again" in err
    assert "processes load torch themselves, instead of being forked: it has ended" in err
    log = launcher.log("workerlog.0")
    assert "RuntimeError: the disk is full" in log
    assert "KeyboardInterrupt" in log
    raised = log[: log.index("RuntimeError")]
    assert "controlled_script.py" in raised
    assert "fork_server_program.py" not in raised


def test_a_fork_server_ends_with_the_launcher_and_when_nothing_can_be_restarted(
    launcher: Launcher,
) -> None:
    process = launcher.start(*ONE_EACH, num=2)
    assert launcher.peers["worker 0"].ask("loaded torch") == "True"
    assert launcher.peers["worker 0"].ask("polite") == "done"
    for fork_server in fork_servers(launcher):  # it ends once all have started
        wait_ended(fork_server)
    process.send_signal(signal.SIGTERM)
    code, _, err = launcher.finish()
    assert code == 143, err
    assert "told to stop" in launcher.log("workerlog.0")


@pytest.fixture
def slow_torch(tmp_path: Path) -> Iterator[socket.socket]:
    """A listening socket that a module `torch`, first on PYTHONPATH, connects to and waits for."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(WAIT_S)
        port = listener.getsockname()[1]
        (tmp_path / "torch.py").write_text(
            f"import socket\nsocket.create_connection(('127.0.0.1', {port})).recv(1)\n"
        )
        yield listener


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_a_launcher_that_is_stopped_while_torch_is_loaded(
    launcher: Launcher, slow_torch: socket.socket, number: signal.Signals
) -> None:
    path = f"{launcher.folder}:{clean_environment()['PYTHONPATH']}"
    process = launcher.start(*ONE_EACH, num=0, PYTHONPATH=path)
    with slow_torch.accept()[0] as loading:
        process.send_signal(number)
        assert loading.recv(1) == b""  # it has ended
    code, _, err = launcher.finish()
    assert code == (143 if number == signal.SIGTERM else -number), err


def test_processes_start_by_themselves_if_torch_cannot_be_loaded_for_them(
    launcher: Launcher,
) -> None:
    (launcher.folder / "torch.py").write_text("raise ImportError('of torch')")
    path = f"{launcher.folder}:{clean_environment()['PYTHONPATH']}"
    launcher.start(*ONE_EACH, num=2, PYTHONPATH=path)
    for peer in launcher.peers.values():
        assert peer.ask("loaded torch") == "False"
        peer.send("exit 0")
    code, _, err = launcher.finish()
    assert code == 0
    assert "ImportError: of torch" in err
    assert "processes load torch themselves, instead of being forked: it has ended" in err


def test_what_loads_torch_in_another_environment_is_not_forked(launcher: Launcher) -> None:
    """Two workers share the cores that a server has alone, so their numbers of threads differ."""
    launcher.start("--server_num", "1", "--worker_num", "2", num=3)
    loaded = {name: peer.ask("loaded torch") for name, peer in launcher.peers.items()}
    is_alike = str(len(os.sched_getaffinity(0)) == 1)
    assert loaded == {"server 0": is_alike, "worker 0": "True", "worker 1": "True"}
    for peer in launcher.peers.values():
        peer.send("exit 0")
    assert launcher.finish()[0] == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import torch", True),
        ("import os\nos.environ['OMP_NUM_THREADS'] = '1'\nimport torch", False),
        ("import os\nos.putenv('OMP_NUM_THREADS', '1')", False),
    ],
)
def test_a_script_that_may_set_variables_is_forked_only_if_asked_for(
    tmp_path: Path, text: str, expected: bool
) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    assert is_forked([str(script)], None) == expected
    assert is_forked([str(script)], "forkserver")
    assert not is_forked([str(script)], "spawn")
    assert is_forked(["-m", "trireme", "run"], None)
    assert not is_forked([str(script.rename(tmp_path / "train"))], None)


def test_a_variable_set_after_torch_was_loaded_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(environment, "_at_load", None)
    environment.note_load()
    monkeypatch.setenv("OMP_NUM_THREADS", "17")
    monkeypatch.setenv("TRIREME_ROLE", "nothing")
    with caplog.at_level("WARNING", "trireme"), pytest.raises(BadRequest):
        init()
    assert "OMP_NUM_THREADS: set when torch was loaded already" in caplog.text


THREAD = """
import threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
"""
FILE = "import os; opened = os.open(os.devnull, os.O_RDONLY)"


@pytest.mark.parametrize(
    ("loads", "obstacle"),
    [("", ""), (THREAD, "has started threads as it was loaded"), (FILE, "loaded: /dev/null")],
)
def test_a_process_with_threads_or_open_files_is_not_forked(loads: str, obstacle: str) -> None:
    code = f"""{loads}
from trireme.launch.fork_server_program import find_obstacle
print(find_obstacle({{0, 1, 2}}), end="")
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=True,
    )
    assert obstacle in done.stdout
    assert bool(obstacle) == bool(done.stdout)


def test_modules_beside_a_script_win_over_loaded_ones_of_their_names(tmp_path: Path) -> None:
    (tmp_path / "html.py").write_text("name = 'of the user'")
    (tmp_path / "json").mkdir()  # not a package
    script = tmp_path / "script.py"
    script.write_text("import html, sys; print(html.name, sys.argv[1:], 'fcntl' in sys.modules)")
    code = "import html, sys; from trireme.launch.fork_server_program import run; run(sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", code, str(script), "an argument"],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=True,
    )
    assert done.stdout == "of the user ['an argument'] False\n"
    (tmp_path / "html.py").unlink()
    assert not hides_loaded(str(tmp_path))
    assert not hides_loaded(str(Path(trireme.__file__).parents[1]))


def test_a_fork_server_has_closed_what_it_passes_on_when_it_answers() -> None:
    """A process that is killed at once may have to be started again at the same address."""
    program = """
import os
from trireme.launch.fork_server_program import fork

passed = os.open(os.devnull, os.O_RDONLY)

class Orders:
    def sendall(self, answer):
        try:
            os.fstat(passed)
        except OSError:
            print("closed", answer.isdigit(), flush=True)

if not fork(Orders(), [passed]):
    os._exit(0)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout == "closed True\n"
