"""A Python process that has imported everything, and forks a program under test when told to.

Run by tests/programs.py as `template.py FD`. A forked child leaves the loop and becomes the program
as `python PROGRAM` would: output, exit code, atexit handlers and all; only the seconds of importing
torch are saved. When the test process goes away, however it does, every program is killed.
"""

from __future__ import annotations

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

import trireme

ORDER_BYTES_MAX = 1 << 17


def main() -> None:
    for name in trireme.__all__:
        getattr(trireme, name)
    # Else each child, at its collections and at its end, walks through all that was imported, and
    # so copies it.
    gc.freeze()
    control = socket.socket(fileno=int(sys.argv[1]))
    running: dict[int, tuple[int, int]] = {}  # pidfd -> pid, pipe for the exit status
    poll = select.poll()
    poll.register(control, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd in running:
                poll.unregister(fd)
                report(fd, *running.pop(fd))
                continue
            order, fds, _, _ = socket.recv_fds(control, ORDER_BYTES_MAX, 8)
            if not order:
                end(running)
            status_read, status_write = os.pipe()
            pid = os.fork()
            if pid == 0:
                control.close()
                # A status that others could still write would never end for its reader.
                statuses = [status for _, status in running.values()]
                for fd in (status_read, status_write, *running, *statuses):
                    os.close(fd)
                become(json.loads(order), fds)
                return
            pidfd = os.pidfd_open(pid)
            running[pidfd] = (pid, status_write)
            poll.register(pidfd, select.POLLIN)
            socket.send_fds(control, [b"started"], [pidfd, status_read])
            for done in (*fds, status_read):
                os.close(done)


def report(pidfd: int, pid: int, status_write: int) -> None:
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(BrokenPipeError):  # the test has ended and asks no more
        os.write(status_write, str(code).encode())
    os.close(status_write)
    os.close(pidfd)


def end(running: dict[int, tuple[int, int]]) -> None:
    for pid, _ in running.values():
        os.kill(pid, signal.SIGKILL)
    os._exit(0)


def become(order: dict, fds: list[int]) -> None:
    """Take the program's standard input, output and environment, and the socket it listens on; its
    folder and its network.
    """
    for fd, own in zip(fds[:2], ((0,), (1, 2)), strict=True):
        for number in own:
            os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(order["env"])
    if len(fds) > 2:
        os.environ["TRIREME_LISTEN_FD"] = str(fds[2])
    if order["folder"]:
        os.chdir(order["folder"])
    if order["namespace"]:
        enter(f"/run/netns/{order['namespace']}")
    sys.argv = order["arguments"]


def enter(namespace: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with open(namespace) as file:
        if libc.setns(file.fileno(), 0):
            raise OSError(ctypes.get_errno(), f"setns: {namespace}")


main()
# Only children come here.
if sys.argv[0] == "-m":
    del sys.argv[0]
    sys.path.insert(0, os.getcwd())
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
else:
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    runpy.run_path(sys.argv[0], run_name="__main__")
