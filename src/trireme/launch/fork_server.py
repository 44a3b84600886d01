"""Processes of a job that are forked from one that has loaded torch, which each would load again.

The fork server (fork_server_program.py) is a child of the launcher. What it forks becomes a child
of the launcher, too, and is supervised as any other: nothing depends on the fork server later.
"""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from trireme.children import PROGRAM, adopting
from trireme.errors import Internal
from trireme.launch.fork_server_program import (
    ANSWER_BYTES_MAX,
    FORK_SERVER,
    HEADER_BYTES,
    READY,
    START,
)
from trireme.launch.process_environment import is_read_late

START_METHODS = ("forkserver", "spawn")
_LOAD_S = 120.0  # for a fork server to load torch; after that processes do so themselves
_FORK_S = 30.0
_END_S = 30.0  # for the kernel to end a killed process


def is_forked(command: Sequence[str], start_method: str | None) -> bool:
    """Whether python with these arguments begins with torch loaded. Unless somebody has chosen, a
    script that may set variables before it imports torch, which reads some of them then, does not.
    """
    if start_method is not None or command[0] == "-m":
        return start_method != "spawn"
    script = Path(command[0])
    if script.suffix != ".py" or not script.is_file() or not os.access(script, os.R_OK):
        return False
    text = script.read_bytes()
    return b"environ" not in text and b"putenv" not in text


def start_fork_servers(
    command: Sequence[str], envs: Sequence[Mapping[str, str]]
) -> "list[ForkServer]":
    """One for each kind of environment in which two processes or more will execute the command.
    Raises OSError: one cannot be started; none is left.
    """
    servers: list[ForkServer] = []
    with contextlib.ExitStack() as started:
        for number, env in enumerate(envs):
            has_another = any(_read_at_load(env) == _read_at_load(other) for other in envs[:number])
            if has_another and not any(server.has_loaded_for(env) for server in servers):
                servers.append(ForkServer(command, env))
                started.callback(servers[-1].close)
        started.pop_all()
    return servers


def _read_at_load(env: Mapping[str, str]) -> dict[str, str]:
    """The variables that libraries may read as they are loaded."""
    return {name: value for name, value in env.items() if not is_read_late(name)}


class ForkServer:
    """A process that has loaded torch, or is about to.

    obstacle: why it forks nothing (any more); "" if nothing is known of that.

    Threads: one.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        """Start it for processes that execute `command` in environments of this kind."""
        self.obstacle, self._is_ready = "", False
        self._deadline = time.monotonic() + _LOAD_S
        self._env = _read_at_load(env)
        self._orders, remote = socket.socketpair()
        self._orders.settimeout(_FORK_S)
        launcher, bare = str(os.getpid()), [sys.executable, "-I", "-S"]
        room = "." * sum(len(os.fsencode(word)) + 1 for word in command)  # for what ps shows
        with remote:
            self._process = subprocess.Popen(
                [*bare, PROGRAM, "run", launcher, sys.executable, FORK_SERVER, launcher, room],
                env=self._env,
                stdin=remote.fileno(),
                stdout=sys.stderr.fileno(),
                start_new_session=True,
            )

    def fileno(self) -> int:
        """Readable when it has something to report."""
        return self._orders.fileno()

    @property
    def is_loading(self) -> bool:
        """Whether it may still report that it can fork."""
        return not self._is_ready and not self.obstacle

    def check_deadline(self) -> None:
        """Have an obstacle if it has been loading for too long."""
        if self.is_loading and time.monotonic() > self._deadline:
            self.obstacle = f"torch was not loaded within {_LOAD_S:.0f} s"

    def pump(self) -> bool:
        """Read its report, which is there. False: no other one follows unasked."""
        report = self._receive()
        self._is_ready = report == READY
        self.obstacle = "" if self._is_ready else report
        return False

    def has_loaded_for(self, env: Mapping[str, str]) -> bool:
        """Whether a process with this environment would load the same."""
        return _read_at_load(env) == self._env

    def fork(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        output: int,
        pass_fds: Sequence[int] = (),
    ) -> "ForkedProcess | None":
        """A process that executes the command, `python ARGUMENTS`, as one that is started would,
        as the leader of a session, without input. None if that fails, with an `obstacle`.
        """
        late = {name: value for name, value in env.items() if is_read_late(name)}
        order = {"command": command, "variables": late, "fds": pass_fds}
        text = json.dumps(order).encode()
        # It begins when it gets a byte, which says that this process knows it.
        waits, go = os.pipe()
        try:
            with adopting():
                socket.send_fds(self._orders, [START], [waits, output, *pass_fds])
                self._orders.sendall(len(text).to_bytes(HEADER_BYTES, "little") + text)
                answer = self._receive()
            if not answer.isdigit():
                self.obstacle = answer
                return None
            with contextlib.suppress(BrokenPipeError):  # killed already, as its status says
                os.write(go, START)
            return ForkedProcess(int(answer))
        except OSError as error:
            is_gone = isinstance(error, ConnectionError)
            self.obstacle = "it has ended" if is_gone else f"no answer: {error}"
            return None
        finally:
            os.close(waits)
            os.close(go)

    def _receive(self) -> str:
        """Its next report or answer."""
        with contextlib.suppress(ConnectionError):
            if text := self._orders.recv(ANSWER_BYTES_MAX).decode(errors="replace"):
                return text
        return "it has ended"

    def close(self) -> None:
        """End it. What it has forked goes on. Raises Internal: the kernel does not end it."""
        self._orders.close()
        kill(self._process, "the fork server")


class ForkedProcess:
    """A child of this process: what LaunchedProcess uses of subprocess.Popen."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float) -> int:
        """Reap it. Raises subprocess.TimeoutExpired: it still runs."""
        if self.returncode is None:
            pidfd = os.pidfd_open(self.pid)
            try:
                if not select.select([pidfd], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired(str(self.pid), timeout)
            finally:
                os.close(pidfd)
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


def kill(process: subprocess.Popen[bytes] | ForkedProcess, name: str) -> None:
    """Kill and reap it. Raises Internal: the kernel does not end it."""
    process.kill()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired as error:
        raise Internal(
            f"launch: expected {name} to end within {_END_S:.0f} s of SIGKILL"
        ) from error
