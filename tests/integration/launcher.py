"""A running `trireme launch` whose processes are stand-ins that execute a test's commands."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
from pathlib import Path

from tests.integration.processes import clean_environment

COMMAND = [sys.executable, "-m", "trireme", "launch"]
CONTROLLED_SCRIPT = str(Path(__file__).with_name("controlled_script.py"))
ELSEWHERE = "192.0.2.1:6000"  # no machine has this address (RFC 5737)
WAIT_S = 60.0


class Peer:
    """A stand-in process, as the test sees it."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(WAIT_S)
        self._connection = connection
        self._stream = connection.makefile("rw", newline="\n")
        self.name = self._stream.readline().strip()

    def send(self, command: str) -> None:
        self._stream.write(command + "\n")
        self._stream.flush()

    def ask(self, command: str) -> str:
        self.send(command)
        return self.answer()

    def answer(self) -> str:
        """To the oldest command that has none; one that is sent meanwhile may be lost."""
        return self._stream.readline().strip()

    def wait_gone(self) -> None:
        """Until the process has ended: only then its end of the connection closes."""
        with contextlib.suppress(ConnectionResetError):
            self._stream.read()

    def end(self) -> None:
        """Let it exit with code 0; returns when it has."""
        pidfd = os.pidfd_open(int(self.ask("pid")))
        self.send("exit 0")
        assert select.select([pidfd], [], [], WAIT_S)[0]
        os.close(pidfd)

    def close(self) -> None:
        self._stream.close()
        self._connection.close()


class Launcher:
    """A running `trireme launch` and the stand-ins it has started."""

    def __init__(self, folder: Path, script: str = CONTROLLED_SCRIPT) -> None:
        self.folder, self.script = folder, script
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(WAIT_S)
        self.peers: dict[str, Peer] = {}
        self.process: subprocess.Popen[str] | None = None

    def start(
        self, *options: str, num: int, stdout: int = subprocess.PIPE, **env: str
    ) -> subprocess.Popen[str]:
        """Launch stand-ins, wait until `num` of them have called."""
        port = self._listener.getsockname()[1]
        self.process = subprocess.Popen(
            [*COMMAND, *options, self.script, str(port)],
            cwd=self.folder,
            env={**clean_environment(), **env},
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.accept(num)
        return self.process

    def accept(self, num: int) -> None:
        """Wait until `num` more stand-ins have called; a launcher that ends before is an error."""
        assert self.process is not None
        ended = os.pidfd_open(self.process.pid)
        try:
            for _ in range(num):
                ready, _, _ = select.select([self._listener, ended], [], [], WAIT_S)
                if self._listener not in ready:
                    raise AssertionError(self.process.communicate(timeout=WAIT_S))
                peer = Peer(self._listener.accept()[0])
                self.peers[peer.name] = peer
        finally:
            os.close(ended)

    def finish(self) -> tuple[int, str, str]:
        """Exit code, stdout and stderr, once all stand-ins are gone as well."""
        assert self.process is not None
        out, err = self.process.communicate(timeout=WAIT_S)
        for peer in self.peers.values():
            peer.wait_gone()
        return self.process.returncode, out, err

    def log(self, name: str) -> str:
        return (self.folder / "log" / name).read_text()

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate(timeout=WAIT_S)
        for peer in self.peers.values():
            peer.close()
        self._listener.close()


def refused(folder: Path, *arguments: str) -> str:
    """The error of a launch that must be refused before anything starts."""
    result = subprocess.run(
        [*COMMAND, *arguments],
        cwd=folder,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert result.returncode == 2
    return result.stderr.splitlines()[-1]
