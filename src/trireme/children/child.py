"""Commands that end when the process that wants them ends, however it ends.

Run by path and not imported, in a bare interpreter (`python -I -S`), because Python code between
fork and exec may deadlock once threads exist:

child.py run PARENT COMMAND...   ask the kernel to kill this process with PARENT; become the command
child.py keep FD                 start and end commands as the socket FD orders; see `Keeper`

One keeper serves all threads of a process: the kernel's signal goes by the thread that has started
a child, and threads come and go. A keeper also ends what the commands have started themselves.
"""

import contextlib
import ctypes
import os
import select
import signal
import socket
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h; kept across exec

# An order: this byte, which the descriptors stdin, stdout, stderr, handle and perhaps offer come
# with, the length of its text in so many bytes, its text.
START = b"."
HEADER_BYTES = 4
FDS_MAX = 5
_CANNOT_EXECUTE = 126  # as a shell says it


def main() -> None:
    if sys.argv[1] == "run":
        die_with(int(sys.argv[2]))
        os.execv(sys.argv[3], sys.argv[3:])
    Keeper(socket.socket(fileno=int(sys.argv[2]))).serve()


def die_with(parent: int) -> None:
    """Be killed by the kernel when the parent is gone."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it ended before the kernel was asked
        os.kill(os.getpid(), signal.SIGKILL)


class Command:
    """A started command; its process leads a group of its own.

    It is reaped once it has ended and its handle is closed: until then its process id, and so its
    group's, cannot become anyone else's.
    """

    def __init__(self, pid: int, handle: socket.socket) -> None:
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.handle = handle
        self.has_ended = False
        self.is_closed = False

    def say_end(self) -> None:
        """Tell the other side how it ended; not reaped yet."""
        result = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        assert result is not None
        is_exit = result.si_code == os.CLD_EXITED
        with contextlib.suppress(ConnectionError):  # nobody asks any more
            self.handle.send(b"%d" % (result.si_status if is_exit else -result.si_status))

    def kill(self) -> None:
        os.killpg(self.pid, signal.SIGKILL)

    def reap(self) -> None:
        os.waitpid(self.pid, 0)
        os.close(self.pidfd)
        self.handle.close()


class Keeper:
    """Serves a socket of orders, each of them a command to start.

    The handle of a command says its exit code, or minus the signal that killed it, once it has
    ended. When the other side shuts the handle, the whole group is killed; when the command is
    reaped the handle is closed here too. At the end of the orders everything is killed.
    """

    def __init__(self, orders: socket.socket) -> None:
        orders.set_inheritable(False)
        self._orders = orders
        self._poll = select.poll()
        self._poll.register(orders, select.POLLIN)
        self._commands: dict[int, Command] = {}  # by pidfd and by handle, while awaited

    def serve(self) -> None:
        is_open = True
        while is_open:
            for fd, _ in self._poll.poll():
                if fd == self._orders.fileno():
                    is_open = self._take_order()
                else:
                    self._advance(fd)
        for command in set(self._commands.values()):
            command.kill()
            command.reap()

    def _take_order(self) -> bool:
        """Start what the next order names; False at the end of the orders."""
        start, fds, _, _ = socket.recv_fds(self._orders, len(START), FDS_MAX)
        for fd in fds:
            os.set_inheritable(fd, False)
        header = self._orders.recv(HEADER_BYTES, socket.MSG_WAITALL) if start else b""
        size = int.from_bytes(header, "little")
        text = self._orders.recv(size, socket.MSG_WAITALL) if header else b""
        if len(header) < HEADER_BYTES or len(text) < size:
            return False
        handle = socket.socket(fileno=fds.pop(3))
        try:
            pid = _start(text, fds)
        except OSError as error:
            handle.send(f"cannot start a process: {error.strerror}".encode())
            handle.close()
            return True
        finally:
            for fd in fds:
                os.close(fd)
        command = Command(pid, handle)
        for fd in (command.pidfd, handle.fileno()):
            self._commands[fd] = command
            self._poll.register(fd, select.POLLIN)
        return True

    def _advance(self, fd: int) -> None:
        """A command has ended (its pidfd is ready), or the other side has done with it."""
        command = self._commands.pop(fd)
        self._poll.unregister(fd)
        if fd == command.pidfd:
            command.has_ended = True
            command.say_end()
        else:
            command.is_closed = True
            command.kill()
        if command.has_ended and command.is_closed:
            command.reap()


def _start(text: bytes, fds: list[int]) -> int:
    """Fork a process that becomes the command; returns its id."""
    keeper = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            _become(text, fds, keeper)
        except BaseException as error:  # noqa: BLE001 - this copy of the keeper must end here
            os.write(2, f"{error}\n".encode())
        finally:
            os._exit(_CANNOT_EXECUTE)
    # By whoever comes first, so that the group is there from now on.
    with contextlib.suppress(PermissionError, ProcessLookupError):
        os.setpgid(pid, pid)
    return pid


def _become(text: bytes, fds: list[int], keeper: int) -> None:
    """The text: working directory, number of arguments, arguments, environment; NUL between them.

    An offer, a socket through which the command may ask for more files, is named in its
    environment as TRIREME_PIPE_FD=FD:PID. Whoever finds a process id there that is not its own has
    inherited it by accident.
    """
    folder, num, *rest = text.split(b"\0")
    command, settings = rest[: int(num)], rest[int(num) :]
    env = dict(setting.split(b"=", 1) for setting in settings)
    os.setpgid(0, 0)
    die_with(keeper)
    for to, fd in enumerate(fds[:3]):
        os.dup2(fd, to)
    if len(fds) > 3:
        os.set_inheritable(fds[3], True)
        env[b"TRIREME_PIPE_FD"] = b"%d:%d" % (fds[3], os.getpid())
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # that Python ignores
        signal.signal(number, signal.SIG_DFL)
    os.chdir(folder)
    os.execve(command[0], command, env)


if __name__ == "__main__":
    main()
