"""A program that starts commands and ends them when its parent process ends.

It runs in a bare interpreter (`python -I -S`), because Python code between fork and exec may
deadlock once a process has threads:

keeper_program.py run PARENT COMMAND...   the kernel kills this process with PARENT; exec COMMAND
keeper_program.py keep FD                 start and end commands on orders from the socket FD

The kernel's signal is sent when the thread ends that started a child. Threads come and go, so one
keeper process serves all threads. It also kills the processes that the commands have started: their
groups, and those that have left them (setsid), which become the keeper's children when their
parents have ended. TRIREME_COMMAND in their environment says to which command they belong; those
without it are killed when no command is left.
"""

import contextlib
import ctypes
import os
import select
import signal
import socket
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h; kept across exec
PR_SET_CHILD_SUBREAPER = 36

# An order is this byte, sent with the descriptors stdin, stdout, stderr, handle and optionally
# offer; then HEADER_BYTES with the length of the text; then the text.
START = b"."
HEADER_BYTES = 4
FDS_MAX = 5
_CANNOT_EXECUTE = 126  # the exit code of shells


def main() -> None:
    if sys.argv[1] == "run":
        die_with(int(sys.argv[2]))
        os.execv(sys.argv[3], sys.argv[3:])
    Keeper(socket.socket(fileno=int(sys.argv[2]))).serve()


def die_with(parent: int) -> None:
    """Let the kernel kill this process when the parent ends."""
    if sys.platform == "linux":
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call above
        os.kill(os.getpid(), signal.SIGKILL)


def prctl(option: int, value: int) -> None:
    """Raises OSError: the kernel refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


class StartedCommand:
    """A started command, the leader of a process group of its own.

    It is reaped when it has ended and its handle is closed. Until then the kernel does not reuse
    its process id, which is also the id of the group.
    """

    def __init__(self, pid: int, handle: socket.socket) -> None:
        self.pid, self.pidfd, self.handle = pid, os.pidfd_open(pid), handle
        self.has_ended = self.is_closed = False

    def report_end(self) -> None:
        """Send the exit code to the other side; the process is not reaped yet."""
        result = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        assert result is not None
        is_exit = result.si_code == os.CLD_EXITED
        with contextlib.suppress(ConnectionError):  # the other side has gone
            self.handle.send(b"%d" % (result.si_status if is_exit else -result.si_status))

    def kill(self) -> None:
        os.killpg(self.pid, signal.SIGKILL)


class Keeper:
    """Serves a socket of orders, each of which starts a command.

    When a command has ended, its exit code, or minus the signal that killed it, is sent on its
    handle. When the other side closes the handle, the whole group is killed. The handle is closed
    on this side when the command is reaped. When the socket ends, all commands are killed.
    """

    def __init__(self, orders: socket.socket) -> None:
        orders.set_inheritable(False)
        self._orders = orders
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        self._poll = select.poll()
        self._poll.register(orders, select.POLLIN)
        self._commands: dict[int, StartedCommand] = {}  # by pidfd and by handle, while polled

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
            for fd in (command.pidfd, command.handle.fileno()):
                self._commands.pop(fd, None)
            self._reap(command)

    def _take_order(self) -> bool:
        """Start the command of the next order. False at the end of the socket."""
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
        command = StartedCommand(pid, handle)
        for fd in (command.pidfd, handle.fileno()):
            self._commands[fd] = command
            self._poll.register(fd, select.POLLIN)
        return True

    def _advance(self, fd: int) -> None:
        """Handle the end of a command (its pidfd is ready) or of the interest in it."""
        command = self._commands.pop(fd)
        self._poll.unregister(fd)
        if fd == command.pidfd:
            command.has_ended = True
            command.report_end()
        else:
            command.is_closed = True
            command.kill()
        if command.has_ended and command.is_closed:
            self._reap(command)

    def _reap(self, command: StartedCommand) -> None:
        """Reap an ended command, end what it has left, and tell the other side."""
        os.waitpid(command.pid, 0)
        os.close(command.pidfd)
        self._end_orphans(command.pid)
        command.handle.close()

    def _end_orphans(self, ended: int) -> None:
        """Kill what a command has left behind, and reap it. Killed orphans may have children, which
        are orphans then.
        """
        running = {command.pid for command in self._commands.values()}
        has_killed = True
        while has_killed:
            has_killed = False
            for pid in _children() - running:
                if os.waitpid(pid, os.WNOHANG)[0] or not (not running or _is_of(pid, ended)):
                    continue
                with contextlib.suppress(PermissionError):  # it has become another user's
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    has_killed = True


def _children() -> set[int]:
    """The children of this process, which has one thread."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as children:
            return set(map(int, children.read().split()))
    except FileNotFoundError:
        os.write(
            2,
            b"keeper: this kernel does not list children (CONFIG_PROC_CHILDREN): what a"
            b" command has put into a session of its own may outlive it\n",
        )
        return set()


def _is_of(pid: int, command: int) -> bool:
    """Whether a process descends from a command, by its environment."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as environ:
            return b"TRIREME_COMMAND=%d" % command in environ.read().split(b"\0")
    except (PermissionError, ProcessLookupError):  # another user's; or it has just ended
        return False


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
    # Parent and child both try, so that the group exists when either continues.
    with contextlib.suppress(PermissionError, ProcessLookupError):
        os.setpgid(pid, pid)
    return pid


def _become(text: bytes, fds: list[int], keeper: int) -> None:
    """Execute the command of an order.

    text: working directory, number of arguments, arguments and environment, separated by NUL.

    An offer is a socket through which the command may request more files. The variable
    TRIREME_PIPE_FD=FD:PID names it. A process with another id has only inherited the variable.
    """
    folder, num, *rest = text.split(b"\0")
    command, settings = rest[: int(num)], rest[int(num) :]
    env = dict(setting.split(b"=", 1) for setting in settings)
    env[b"TRIREME_COMMAND"] = b"%d" % os.getpid()
    os.setpgid(0, 0)
    die_with(keeper)
    for target, fd in enumerate(fds[:3]):
        os.dup2(fd, target)
    if len(fds) > 3:
        os.set_inheritable(fds[3], True)
        env[b"TRIREME_PIPE_FD"] = b"%d:%d" % (fds[3], os.getpid())
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these
        signal.signal(number, signal.SIG_DFL)
    os.chdir(folder)
    os.execve(command[0], command, env)


if __name__ == "__main__":
    main()
