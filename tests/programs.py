"""Programs under test: real processes whose output is read line by line and which end with the
test.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType

import trireme

WAIT_S = 60.0
"""A program that neither prints the line nor ends in this time hangs."""

TEMPLATE = Path(__file__).with_name("template.py")
QUICK_PYTHON = Path(__file__).with_name("quick_python.py")


class Template:
    """Starts programs by forking a process that has imported torch already.

    python: a command to be used as sys.executable, whose scripts are forked from it too.
    """

    def __init__(self, control: socket.socket, python: str) -> None:
        self._control, self.python = control, python

    def start(
        self,
        name: str,
        arguments: Sequence[str],
        env: Mapping[str, str],
        *,
        listener: socket.socket | None = None,
        namespace: str = "",
        folder: Path | None = None,
        is_quick: bool = False,
    ) -> Program:
        """Run `python ARGUMENTS`.

        folder: where it runs; without, where the tests run.
        listener: handed over as TRIREME_LISTEN_FD.
        namespace: of `ip netns`, where it runs.
        is_quick: the Python programs that it starts are forked from the template too.
        """
        child_stdin, stdin = os.pipe()
        output, child_output = os.pipe()
        lent = [child_stdin, child_output, child_output]
        order = {"arguments": list(arguments), "env": {**clean_environment(), **env}}
        order |= {"network": f"/run/netns/{namespace}" if namespace else ""}
        order |= {"folder": "" if folder is None else str(folder)}
        order["executable"] = self.python if is_quick else sys.executable
        fds = lent if listener is None else [*lent, listener.fileno()]
        socket.send_fds(self._control, [json.dumps(order).encode()], fds)
        _, [pidfd, status], _, _ = socket.recv_fds(self._control, 16, 2)
        for fd in set(lent):
            os.close(fd)
        return Program(name, pidfd, status, stdin, output)

    def run(
        self,
        folder: Path,
        arguments: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        code: int = 0,
        wait_s: float = WAIT_S,
    ) -> str:
        """What `python ARGUMENTS` prints, both streams, until it ends with this code."""
        with self.start(
            arguments[0], arguments, env or {}, folder=folder, is_quick=True
        ) as program:
            assert program.finish(wait_s) == code
            return program.output


@contextmanager
def template(env: Mapping[str, str] | None = None) -> Iterator[Template]:
    """A template process; all its programs end with it.

    env: what it has in its environment beside ours, and its programs do not inherit.
    """
    ours, given_away = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        for one in (ours, given_away):
            stack.enter_context(one)
        address, python = os.path.join(folder, "door"), os.path.join(folder, "python")
        door = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        door.bind(address)
        door.listen(64)
        with open(python, "w", opener=_executable) as script:
            bare = shlex.join([sys.executable, "-I", "-S", str(QUICK_PYTHON)])
            script.write(f'#!/bin/sh\nexec {bare} {sys.executable} {address} "$@"\n')
        fds = [given_away.fileno(), door.fileno()]
        process = subprocess.Popen(
            [sys.executable, str(TEMPLATE), *map(str, fds), python],
            env={**clean_environment(), **(env or {})},
            stdin=subprocess.DEVNULL,
            pass_fds=fds,
        )
        given_away.close()
        door.close()
        ours.settimeout(WAIT_S)
        yield Template(ours, python)
        ours.close()
        process.wait(WAIT_S)


def _executable(path: str, flags: int) -> int:
    return os.open(path, flags, 0o700)


class Program:
    """A Python program, with stdout and stderr together.

    with template.start("worker 0", ["train.py"], {"TRIREME_ROLE": "worker"}) as worker:
        worker.wait_line(r"step (\\d+)")
        assert worker.finish() == 0
    """

    def __init__(self, name: str, pidfd: int, status: int, stdin: int, output: int) -> None:
        self.name = name
        self._pidfd = pidfd
        self._status = os.fdopen(status)
        self._stdin = os.fdopen(stdin, "w")
        self._output = os.fdopen(output, errors="replace")
        self._lines: list[str] = []
        self._seen = 0
        self._is_at_end = False
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, name=f"read {name}")
        self._reader.start()

    def _read(self) -> None:
        for line in self._output:
            with self._changed:
                self._lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._is_at_end = True
            self._changed.notify_all()

    @property
    def output(self) -> str:
        """Everything printed so far."""
        with self._changed:
            return "\n".join(self._lines)

    def wait_line(self, pattern: str) -> re.Match[str]:
        """The next line that matches `pattern`, after the line that the last call returned."""
        with self._changed:
            while True:
                while self._seen < len(self._lines):
                    match = re.search(pattern, self._lines[self._seen])
                    self._seen += 1
                    if match:
                        return match
                if self._is_at_end or not self._changed.wait(WAIT_S):
                    raise AssertionError(f"{self.name}: no line with {pattern!r}")

    def send(self, line: str) -> None:
        """Give it a line on its standard input."""
        self._stdin.write(line + "\n")
        self._stdin.flush()

    def signal(self, number: signal.Signals) -> None:
        signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """As `kill -9`; returns when it is gone."""
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        self._wait_gone()

    @property
    def pid(self) -> int:
        """-1 if it has ended."""
        described = Path(f"/proc/self/fdinfo/{self._pidfd}").read_text()
        match = re.search(r"^Pid:\s*(-?\d+)$", described, re.MULTILINE)
        assert match, described
        return int(match[1])

    @property
    def has_ended(self) -> bool:
        return bool(select.select([self._pidfd], [], [], 0)[0])

    def finish(self, wait_s: float = WAIT_S) -> int:
        """The exit code (-n: ended by signal n), once it has ended by itself and its output is
        read.
        """
        self._wait_gone(wait_s)
        self._reader.join()
        return int(self._status.read())

    def _wait_gone(self, wait_s: float = WAIT_S) -> None:
        ended, _, _ = select.select([self._pidfd], [], [], wait_s)
        if not ended:
            raise AssertionError(f"{self.name}: still running after {wait_s:g} s")

    def __enter__(self) -> Program:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()
        self._reader.join()
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        for stream in (self._status, self._output):
            stream.close()
        os.close(self._pidfd)
        if kind is not None:
            print(f"---- {self.name} printed:\n{self.output}")  # pytest shows it


def clean_environment() -> dict[str, str]:
    """The test's own environment without anything that says a role; finds this trireme anywhere."""
    ours = ("TRIREME_", "PADDLE_", "TRAINING_ROLE", "OMP_NUM_THREADS")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    root = Path(trireme.__file__).parents[1]
    return {**kept, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
