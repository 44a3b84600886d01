"""A Python process that has imported everything, and forks a program under test for each order.

Run by tests/programs.py as `template.py CONTROL DOOR PYTHON`. A forked child leaves the loop and
becomes the program as `python PROGRAM` would: output, exit code, atexit handlers and all; only the
seconds of importing torch and of taking it apart are saved. Orders come from the test, through the
socket CONTROL, and from processes that run PYTHON (tests/quick_python.py), which connect to the
listening socket DOOR. When the test process ends, every program is killed.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch._dynamo  # torch itself imports it with the first optimizer

import trireme
import trireme.commands.cli
import trireme.job.embedded
import trireme.job.serving
import trireme.server.log.durable_journal
from trireme.threads import frozen_objects

ORDER_BYTES_MAX = 1 << 17
# The other end of a socket may be killed at any time, which must not end the template.
GONE = contextlib.suppress(BrokenPipeError, ConnectionResetError)


@dataclass
class Child:
    """A forked program that runs.

    status: where its exit code is written. is_group: whether it leads a process group of its own.
    """

    pid: int
    status: int
    is_group: bool

    def kill(self) -> None:
        for kill in (os.killpg, os.kill) if self.is_group else (os.kill,):  # no group yet, perhaps
            with contextlib.suppress(ProcessLookupError):
                kill(self.pid, signal.SIGKILL)


class Loop:
    """Forks, watches and reaps."""

    def __init__(self, control: socket.socket, door: socket.socket, python: str) -> None:
        self.control, self.door, self.python = control, door, python
        self.running: dict[int, Child] = {}  # by pidfd
        self.poll = select.poll()
        for listened in (control, door):
            self.poll.register(listened, select.POLLIN)

    def run(self) -> tuple[dict, list[int]]:
        """Serve orders. Returns in each forked child, with its order."""
        while True:
            for fd, _ in self.poll.poll():
                if fd in self.running:
                    self.report(fd)
                elif fd == self.control.fileno():
                    order, fds, _, _ = socket.recv_fds(self.control, ORDER_BYTES_MAX, 8)
                    if not order:
                        self.end()
                    status_read, status = os.pipe()
                    if (pidfd := self.fork(status, is_group=False)) is None:
                        os.close(status_read)
                        return json.loads(order), fds
                    socket.send_fds(self.control, [b"started"], [pidfd, status_read])
                    for done in (*fds, status_read):
                        os.close(done)
                elif fd == self.door.fileno():
                    connection, _ = self.door.accept()
                    order, fds = b"", []
                    with GONE:
                        order, fds, _, _ = socket.recv_fds(connection, ORDER_BYTES_MAX, 8)
                    if not order:  # killed before it could ask
                        connection.close()
                        continue
                    if (pidfd := self.fork(connection.fileno(), is_group=True)) is None:
                        connection.detach()
                        os.setsid()
                        return {**json.loads(order), "executable": self.python}, fds
                    with GONE:
                        socket.send_fds(connection, [b"started"], [pidfd])
                    self.poll.register(connection.detach(), 0)  # its end is always reported
                    for done in fds:
                        os.close(done)
                else:  # the process that runs PYTHON was killed; its child may have just ended
                    for child in self.running.values():
                        if child.status == fd:
                            self.poll.unregister(fd)
                            child.kill()

    def fork(self, status: int, *, is_group: bool) -> int | None:
        """The pidfd of a new child; None in the child."""
        pid = os.fork()
        if pid == 0:
            # A status that others could still write would never end for its reader.
            statuses = [child.status for child in self.running.values()]
            for fd in (status, *self.running, *statuses):
                os.close(fd)
            self.control.close()
            self.door.close()
            return None
        pidfd = os.pidfd_open(pid)
        self.running[pidfd] = Child(pid, status, is_group)
        self.poll.register(pidfd, select.POLLIN)
        return pidfd

    def report(self, pidfd: int) -> None:
        self.poll.unregister(pidfd)
        child = self.running.pop(pidfd)
        code = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
        with GONE:
            os.write(child.status, str(code).encode())
        with contextlib.suppress(KeyError):
            self.poll.unregister(child.status)
        os.close(child.status)
        os.close(pidfd)

    def end(self) -> None:
        for child in self.running.values():
            child.kill()
        os._exit(0)


def become(order: dict, fds: list[int]) -> None:
    """Take the program's standard streams and environment, and the socket it listens on; its
    folder and its network.
    """
    for number, fd in enumerate(fds[:3]):
        os.dup2(fd, number)
    for fd in set(fds[:3]):
        os.close(fd)
    os.environ.clear()
    os.environ.update(order["env"])
    wanted = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in wanted if path and path not in sys.path]
    if len(fds) > 3:
        os.environ["TRIREME_LISTEN_FD"] = str(fds[3])
    if order["folder"]:
        os.chdir(order["folder"])
    if order["network"]:
        enter(order["network"])
    sys.argv = order["arguments"]
    sys.executable = order["executable"]


def enter(network: str) -> None:
    """Go over to the network namespace at this path, unless it is that of this process."""
    if os.path.samefile(network, "/proc/self/ns/net"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    with open(network) as file:
        if libc.setns(file.fileno(), 0):
            raise OSError(ctypes.get_errno(), f"setns: {network}")


def serve(control_fd: int, door_fd: int, python: str) -> None:
    for name in trireme.__all__:
        getattr(trireme, name)
    # Nor does a child take torch apart at its end (60 ms), which imports have arranged.
    atexit.unregister(torch._dynamo.utils.dump_compile_times)
    for finalizer in list(weakref.finalize._registry):
        finalizer.atexit = False
    # Else each child, at its collections and at its end, walks through all that was imported, and
    # so copies it.
    gc.freeze()
    # A line is one write: threads and processes print to the same pipe, and tests wait for lines.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, write_through=False)
    with frozen_objects():  # which counts the frozen ones once, here, and not in each child
        pass
    loop = Loop(socket.socket(fileno=control_fd), socket.socket(fileno=door_fd), python)
    become(*loop.run())


def run_program() -> None:
    """Run sys.argv as `python` would."""
    if sys.argv[0] == "-m":
        del sys.argv[0]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
        runpy.run_path(sys.argv[0], run_name="__main__")


def exit_code_of(program: Callable[[], None]) -> int:
    """What the interpreter would end with; -n: by signal n."""
    try:
        program()
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    except BaseException as error:  # noqa: BLE001 as the interpreter does
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


assert torch._dynamo
serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
# Only children come here. They end as an interpreter does, but leave the modules alone: to take
# torch apart costs half a second of CPU, because each page that it touches is copied first.
code = exit_code_of(run_program)
threading._shutdown()
atexit._run_exitfuncs()
for stream in (sys.stdout, sys.stderr):
    stream.flush()
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
