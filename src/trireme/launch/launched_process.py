"""One process of a local job: its session, its log file, its exit status.

The process leads a session of its own, so that Ctrl-C reaches it only through the launcher, and so
that its own children (data loaders, pipes) can be ended with it. Its exit status is read without
reaping it, so that until the end of the job the kernel does not reuse its process id.
"""

import contextlib
import fcntl
import logging
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import tty
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, cast

from trireme.children import PROGRAM
from trireme.errors import BadRequest, writing
from trireme.launch.fork_server import ForkedProcess, ForkServer, kill
from trireme.launch.printing import Printer
from trireme.launch.process_role import STOPPED

log = logging.getLogger("trireme.launch")

_READ_BYTES = 1 << 16
_TAIL_BYTES = 1 << 14
_LAST_READS_MAX = 1 << 10
_LINE_BYTES_MAX = 1 << 16
# Control sequences (colours, cursor movement) of ECMA-48, section 5.4.
_CONTROL = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]")


class LaunchedProcess:
    """A started process. `name` is "worker 0" or the like. Threads: one."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        env: Mapping[str, str],
        log_path: Path,
        *,
        pass_fds: Sequence[int] = (),
        console: Printer | None = None,
        appends: bool = False,
        fork_server: ForkServer | None = None,
    ) -> None:
        """Start `command` with its output in `log_path`, and also on `console`.

        appends: keep the present lines of the log.
        fork_server: what forks the process. If it has an obstacle then, the process is started.

        Raises OSError: the system cannot start it.
        """
        self.name = name
        self.log_path = log_path
        self.mirror = Mirror(_open_log(log_path, "ab" if appends else "wb"), console)
        output = self.mirror.input_fd
        self._process: subprocess.Popen[bytes] | ForkedProcess
        try:
            forked = fork_server and fork_server.fork(command, env, output, pass_fds)
            self._process = forked or _start(command, env, output, pass_fds)
        except BaseException:
            self.mirror.close()
            raise
        finally:
            os.close(self.mirror.input_fd)  # the process has inherited it

    def status(self) -> int | None:
        """The exit code, or minus the signal that killed it; None while it runs."""
        if self._process.returncode is not None:
            return self._process.returncode
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        result = os.waitid(os.P_PID, self._process.pid, flags)
        if result is None:
            return None
        return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status

    def ask_to_stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send a signal to the process alone. It may need its children (workers of a DataLoader,
        for example) until it has stopped.
        """
        if self._process.returncode is None:  # not reaped: the id is its own
            os.kill(self._process.pid, number)

    def end(self) -> None:
        """Kill what is left of the process and its children, reap it, close its log."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # reaped
                os.killpg(self._process.pid, signal.SIGKILL)
            kill(self._process, self.name)
        self.mirror.drain()
        self.mirror.close()

    def last_lines(self, num: int) -> list[str]:
        """The last lines of its log."""
        self.mirror.drain()
        self.mirror.flush()
        try:
            with self.log_path.open("rb") as log_file:
                log_file.seek(max(0, os.fstat(log_file.fileno()).st_size - _TAIL_BYTES))
                lines = log_file.read().removesuffix(b"\n").split(b"\n")
        except OSError as error:
            return [f"(cannot read them: {error.strerror})"]
        return [plain(line).decode(errors="replace") for line in lines[-num:]]


def _open_log(path: Path, mode: str) -> BinaryIO:
    """A job goes on without the log of a process that is started again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)  # somebody may have removed it
        return cast(BinaryIO, path.open(mode))
    except OSError as error:
        log.warning("launch: cannot write %s: %s; it lacks what follows", path, error.strerror)
        return open(os.devnull, "wb")


def _start(
    command: Sequence[str], env: Mapping[str, str], output: int, pass_fds: Sequence[int]
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", PROGRAM, "run", str(os.getpid()), *command],
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        pass_fds=pass_fds,
        start_new_session=True,
    )


class Mirror:
    """Copies the output of a process to a log, as plain lines, and to the console, if it has one.

    If the console is a terminal, the process gets a pseudo terminal of the same size and its bytes
    are copied as they come, so that progress bars work. Any other console gets whole lines: several
    processes write to it, and Python without a buffer, as processes of a job have it, writes the
    end of a line by itself. The log keeps the last state of a redrawn line. What a full disk does
    not take is missing there, with a warning; the job continues.
    """

    def __init__(self, log: BinaryIO, console: Printer | None) -> None:
        self._log, self._console = log, console
        self._is_terminal = console is not None and console.isatty()
        self._line = b""
        self._unshown = b""
        self._is_cut = False  # whether the log lacks what came last
        if self._is_terminal:
            self.output_fd, self.input_fd = pty.openpty()
            tty.setraw(self.input_fd)  # the real terminal already turns \n into \r\n
            self.resize()
        else:
            self.output_fd, self.input_fd = os.pipe()

    def resize(self) -> None:
        """Give the pseudo terminal the size of the console."""
        if self._is_terminal and self._console is not None:
            with contextlib.suppress(OSError):  # the terminal has been closed
                size = fcntl.ioctl(self._console, termios.TIOCGWINSZ, b"\0" * 8)
                fcntl.ioctl(self.output_fd, termios.TIOCSWINSZ, size)

    @property
    def is_ahead(self) -> bool:
        """Whether the console has enough to show."""
        return self._console is not None and self._console.is_full

    def pump(self) -> bool:
        """Copy some of the output that is ready; False when there is none (left)."""
        if self.output_fd < 0 or not select.select([self.output_fd], [], [], 0)[0]:
            return False
        try:
            data = os.read(self.output_fd, _READ_BYTES)
        except OSError:  # EIO on Linux: the other side of the pseudo terminal is closed
            data = b""
        self._show(data)
        self._write_log(data)
        return bool(data)

    def drain(self) -> None:
        """Copy all that is ready."""
        for _ in range(_LAST_READS_MAX):  # bounded: a daemon of it may write for ever
            if not self.pump():
                return

    def flush(self) -> None:
        """Write the unfinished line, too."""
        if self._console is not None and self._unshown:
            self._console.write(self._unshown)
        self._put(self._line)
        self._unshown = self._line = b""

    def close(self) -> None:
        if self.output_fd >= 0:
            self.flush()
            self._log.close()
            os.close(self.output_fd)
            self.output_fd = -1

    def _show(self, data: bytes) -> None:
        data = self._unshown + data
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if self._is_terminal or len(data) - end > _LINE_BYTES_MAX:
            end = len(data)
        if self._console is not None and end:
            self._console.write(data[:end])
        self._unshown = data[end:]

    def _write_log(self, data: bytes) -> None:
        *lines, self._line = (self._line + data).split(b"\n")
        self._put(*(line + b"\n" for line in lines))
        if len(self._line) > _LINE_BYTES_MAX:
            self.flush()

    def _put(self, *lines: bytes) -> None:
        data = b"".join(plain(line) + (b"\n" if line.endswith(b"\n") else b"") for line in lines)
        try:
            while data:
                data = data[os.write(self._log.fileno(), data) :]
                self._is_cut = False
        except OSError as error:
            if not self._is_cut:
                log.warning(
                    "launch: cannot write %s: %s; what the process prints is missing there until"
                    " that works",
                    *(self._log.name, error.strerror),
                )
            self._is_cut = True


def plain(line: bytes) -> bytes:
    """The last state of a redrawn line, without control sequences and line end."""
    drawn = [part for part in _CONTROL.sub(b"", line.rstrip(b"\r\n")).split(b"\r") if part]
    return drawn[-1] if drawn else b""


@contextlib.contextmanager
def claimed(paths: Iterable[Path]) -> Iterator[None]:
    """Keep other launchers from these files while the block runs; what they contain stays. A file
    system without locks gets a warning instead.

    Raises BadRequest: another launcher has one of them, or it cannot be written.
    """
    with contextlib.ExitStack() as stack:
        for path in paths:
            with writing(f"launch: cannot write {path}"):
                file = stack.enter_context(path.open("ab"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise BadRequest(
                    f"launch: expected {path} to be this job's alone, found another job that is"
                    " running and writes it; give each job another --log_dir"
                ) from error
            except OSError as error:
                log.warning("another job that writes %s goes unnoticed: %s", path, error.strerror)
        yield


def describe_exit(state: int) -> str:
    """How a process with this `status` has ended, in words."""
    if state == STOPPED:
        return f"failed with exit code {state} (was it stopped by a signal from elsewhere?)"
    if state > 0:
        return f"failed with exit code {state}"
    name = signal.Signals(-state).name
    hint = " (is the machine out of memory?)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"
