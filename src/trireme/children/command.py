"""Commands as child processes; keeper_program.py starts and ends them. And this process as the
parent of what its descendants leave behind.
"""

import atexit
import contextlib
import ctypes
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from trireme.children import keeper_program
from trireme.children.keeper_program import PR_SET_CHILD_SUBREAPER, prctl
from trireme.errors import Internal, ResourceExhausted

PROGRAM = str(Path(keeper_program.__file__))
_PR_GET_CHILD_SUBREAPER = 37
_END_S = 30.0  # for the kernel to end a killed process


class ChildCommand:
    """A command and everything it starts. They are killed when this object is closed or dropped,
    and when this process ends, for whatever reason.

    Args:
        command: an absolute path and its arguments.
        env: the whole environment of the command.
        stdin, stdout, stderr: descriptors; the caller closes its copies.
        offer: one more descriptor, which the environment names: see keeper_program.py.

    Threads: one at a time; kill() from any. `fileno` is readable once the command has ended.
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
        self._handle, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._status: int | None = None
        settings = [f"{name}={value}" for name, value in env.items()]
        words = [os.getcwd(), str(len(command)), *command, *settings]
        fds = [stdin, stdout, stderr, remote.fileno(), *([] if offer is None else [offer])]
        with remote:
            _keeper().order(b"\0".join(map(os.fsencode, words)), fds)

    def fileno(self) -> int:
        return self._handle.fileno()

    def wait(self, timeout_s: float) -> int | None:
        """The exit code, or minus the signal that killed the command; None while it runs. Raises
        ResourceExhausted: the system could not start the command.
        """
        if self._status is None and self._is_readable(timeout_s):
            report = self._handle.recv(256)
            if not report:
                raise Internal(
                    f"ChildCommand: expected the end of {self.name}, found its keeper killed"
                )
            try:
                self._status = int(report)
            except ValueError:
                raise ResourceExhausted(f"ChildCommand: {self.name}: {report.decode()}") from None
        return self._status

    def _is_readable(self, timeout_s: float) -> bool:
        poll = select.poll()
        poll.register(self._handle, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def kill(self) -> None:
        """Kill the command and everything it started, without waiting for their end."""
        with contextlib.suppress(OSError):  # closed already, or ended together with its keeper
            self._handle.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Kill the command and everything it started; returns when it is reaped."""
        self.kill()
        with self._handle as handle:
            if handle.fileno() < 0:
                return
            handle.settimeout(_END_S)
            try:
                while handle.recv(256):
                    pass
            except TimeoutError as error:
                message = f"expected {self.name} to end within {_END_S:.0f} s of SIGKILL"
                raise Internal(f"ChildCommand: {message}") from error


class _KeeperProcess:
    """The keeper of this process, which all threads share."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._lock = threading.Lock()
        self._orders, remote = socket.socketpair()
        with remote:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", PROGRAM, "keep", str(remote.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[remote.fileno()],
                start_new_session=True,  # it survives the kill of our group, and ends its commands
            )

    def is_usable(self) -> bool:
        """Whether it runs and was not inherited by a fork."""
        return self.owner == os.getpid() and self._process.poll() is None

    def order(self, text: bytes, fds: Sequence[int]) -> None:
        header = len(text).to_bytes(keeper_program.HEADER_BYTES, "little")
        try:
            with self._lock:
                socket.send_fds(self._orders, [keeper_program.START], fds)
                self._orders.sendall(header + text)
        except OSError as error:
            raise Internal(
                f"ChildCommand: cannot reach the keeper of processes: {error}"
            ) from error

    def close(self) -> None:
        self._orders.close()
        self._process.wait(_END_S)


_lock = threading.Lock()
_current: _KeeperProcess | None = None


def _keeper() -> _KeeperProcess:
    global _current
    with _lock:
        if _current is None or not _current.is_usable():
            _current = _KeeperProcess()
        return _current


@atexit.register
def close() -> None:
    """End the keeper and its commands. The next ChildCommand starts another keeper."""
    if _current is not None and _current.is_usable():
        _current.close()


@contextlib.contextmanager
def adopting() -> Iterator[None]:
    """While the block runs, descendants whose parents end become children of this process. Raises
    OSError: the kernel refuses.
    """
    before = _adopts()
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, before)


def _adopts() -> int:
    adopts = ctypes.c_int()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(adopts), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({_PR_GET_CHILD_SUBREAPER})")
    return adopts.value
