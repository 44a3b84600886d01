"""The side that wants commands; child.py is the side that starts them."""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from trireme.children import child
from trireme.errors import Internal, ResourceExhausted

SHIM = str(Path(child.__file__))
_END_S = 30.0  # for the kernel to end a killed process


class Child:
    """A command with everything it starts: killed when this is closed or dropped, or when this
    process ends in whatever way.

    Args:
        command: an absolute path and its arguments.
        env: its whole environment.
        stdin, stdout, stderr: descriptors; the caller closes its own.
        offer: one more descriptor, named to the command: see child.py.

    Threads: one at a time, kill() from any. `fileno` may be polled: readable once it has ended.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        stdin: int,
        stdout: int,
        stderr: int,
        offer: int | None = None,
    ) -> None:
        self.name = command[0]
        self._handle, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._status: int | None = None
        settings = [f"{name}={value}" for name, value in env.items()]
        words = [os.getcwd(), str(len(command)), *command, *settings]
        fds = [stdin, stdout, stderr, theirs.fileno(), *([] if offer is None else [offer])]
        with theirs:
            _keeper().order(b"\0".join(map(os.fsencode, words)), fds)

    def fileno(self) -> int:
        return self._handle.fileno()

    def wait(self, timeout_s: float) -> int | None:
        """Its exit code, minus the signal that killed it; None while it runs.

        Raises:
            ResourceExhausted: the system has not let it start.
        """
        if self._status is None and self._is_readable(timeout_s):
            said = self._handle.recv(256)
            if not said:
                raise Internal(f"Child: expected the end of {self.name}, its keeper was killed")
            try:
                self._status = int(said)
            except ValueError:
                raise ResourceExhausted(f"Child: {self.name}: {said.decode()}") from None
        return self._status

    def _is_readable(self, timeout_s: float) -> bool:
        poll = select.poll()
        poll.register(self._handle, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def kill(self) -> None:
        """Kill what is left of it; wait() says when."""
        with contextlib.suppress(OSError):  # closed already, or its keeper is gone, and it too
            self._handle.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Kill what is left of it; returns when it is reaped."""
        self.kill()
        with self._handle as handle:
            if handle.fileno() < 0:
                return
            handle.settimeout(_END_S)
            try:
                while handle.recv(256):
                    pass
            except TimeoutError as error:
                raise Internal(
                    f"Child: expected {self.name} to end within {_END_S:.0f} s of SIGKILL"
                ) from error


class _Keeper:
    """The keeper of this process; orders from all threads."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._lock = threading.Lock()
        self._orders, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", SHIM, "keep", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # it outlives a group that is killed, and ends the rest
            )

    def is_there(self) -> bool:
        """False in a forked copy of the process: the keeper is not its own."""
        return self.owner == os.getpid() and self._process.poll() is None

    def order(self, text: bytes, fds: Sequence[int]) -> None:
        header = len(text).to_bytes(child.HEADER_BYTES, "little")
        try:
            with self._lock:
                socket.send_fds(self._orders, [child.START], fds)
                self._orders.sendall(header + text)
        except OSError as error:
            raise Internal(f"Child: cannot reach the keeper of processes: {error}") from error

    def close(self) -> None:
        self._orders.close()
        self._process.wait(_END_S)


_lock = threading.Lock()
_kept: _Keeper | None = None


def _keeper() -> _Keeper:
    global _kept
    with _lock:
        if _kept is None or not _kept.is_there():
            _kept = _Keeper()
        return _kept


@atexit.register
def close() -> None:
    """End the keeper, and with it what it still keeps; another Child starts another one."""
    if _kept is not None and _kept.is_there():
        _kept.close()
