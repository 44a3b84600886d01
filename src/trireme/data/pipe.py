"""Files read through a command: `pipe_command`.

Each file goes through the command by itself: its text on stdin, what comes out on stdout is read in
its place. A command that fails is an error, whatever it has written before. Of a shell's pipeline
the shell tells the exit code of the last part alone.

A command built on our data generators can take one file after the other: it is told in its
environment that it may ask for more (TRIREME_PIPE_FD), and so its interpreter starts once for each
file that is read at the same time, not once for each file.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import select
import shlex
import shutil
import signal
import socket
import struct
import termios
import threading
from collections.abc import Iterable
from io import FileIO

import numpy as np
from numpy.typing import NDArray

from trireme.children import ChildCommand
from trireme.data.byte_streams import BLOCK_BYTES, ByteStream, open_bytes
from trireme.data.sources import File
from trireme.errors import BadRequest, DataError, Internal

PATIENCE_S = 600.0
_STDERR_BYTES = 1 << 16  # as much as a pipe holds: one read empties it
_TAIL_BYTES = 1 << 13
_LAST_LINES = 10
# A command may write in small pieces, and each would wake us. What it writes in this time is taken
# at once; the pipe is large enough that even a fast command, at 500 MB/s, hardly waits for us.
_COLLECT_S = 0.002
_COLLECT_SLOW_S = 0.008
_PIPE_BYTES = 1 << 20
_SLOW_BYTES = _PIPE_BYTES // 8
_GOODBYE_S = 5.0
_JOIN_S = 30.0
# What a shell does not take for itself, outside single quotes.
_FOR_THE_SHELL = re.compile(r"[|&;<>()$`\"\\*?#~\[\]\n]")

log = logging.getLogger(__name__)


class Pipe:
    """A shell command that files are read through, and its processes that wait for more files.

    Args:
        command: as for a shell. One plain command is started without one.
        patience_s: how long it may neither read, write nor end before it is killed.

    Raises:
        BadRequest: an empty command.

    Threads: share it freely.
    """

    def __init__(self, command: str, *, patience_s: float = PATIENCE_S) -> None:
        self.command = checked_command(command)
        self.patience_s = patience_s
        self._lock = threading.Lock()
        self._waiting: list[_Process] = []
        self._is_closed = False

    def open(self, file: File) -> PipeStream:
        """What the command makes of a file.

        Raises:
            DataError: the file cannot be read.
        """
        return PipeStream(self, file)

    def run(self, stdin: int, stdout: int) -> _Process:
        """A process that works on these descriptors; the caller closes its own."""
        while True:
            with self._lock:
                process = self._waiting.pop() if self._waiting else None
            if process is None:
                return _Process(self.command, stdin, stdout)
            if process.take(stdin, stdout):
                return process
            process.close()

    def keep(self, process: _Process) -> None:
        """Have a process wait for another file."""
        with self._lock:
            if not self._is_closed:
                self._waiting.append(process)
                return
        process.end()

    def close(self) -> None:
        """End the processes that wait for files; those of open streams end with their file."""
        with self._lock:
            self._is_closed = True
            waiting, self._waiting = self._waiting, []
        for process in waiting:
            process.end()

    def __enter__(self) -> Pipe:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class PipeStream:
    """The output of a command for one file; see ByteStream. Made by Pipe.open.

    readinto() raises DataError if the command fails, however much it has written: with its exit
    code or signal and the last lines of its stderr; or if it neither reads, writes nor ends.
    """

    def __init__(self, pipe: Pipe, file: File) -> None:
        self._pipe = pipe
        self._file = file
        self._is_at_end = self._is_stopped = False
        self._num_bytes = 0  # of the latest read
        self._num_left: int | None = None  # to read, once the command is done
        self._input = _open_input(file)
        output, theirs = os.pipe()
        try:
            fcntl.fcntl(output, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
            self._is_large = True
        except OSError:  # the user's limit for pipes is reached: it stays small, and must not fill
            self._is_large = False
        self._output = FileIO(output)
        self._process: _Process | None = None
        try:
            self._process = pipe.run(self._input.fd, theirs)
        finally:
            os.close(theirs)
            self._input.lent()
            if self._process is None:
                self.close()

    @property
    def num_bytes_in(self) -> int:
        return self._input.num_bytes

    def readinto(self, buffer: NDArray[np.uint8]) -> int:
        process = self._process
        if process is None:
            if self._is_at_end:
                return 0
            raise Internal(f"PipeStream.readinto: expected an open stream of {self._file.path}")
        while not process.is_done:
            if self._is_large and self._num_bytes < len(buffer) and self._collect(process):
                break
            if self._wait(process, [self._output]):
                self._num_bytes = self._output.readinto(buffer.data)
                if self._num_bytes:
                    return self._num_bytes
                while not process.is_done:
                    self._wait(process, [])
        # All that it has written is in the pipe; what else holds the other end may write for ever.
        if self._num_left is None:
            self._num_left = _bytes_in(self._output)
        if self._num_left:
            num_bytes = self._output.readinto(buffer[: self._num_left].data)
            self._num_left -= num_bytes
            return num_bytes
        self._finish(process)
        return 0

    def _collect(self, process: _Process) -> bool:
        """Let it write for a moment; True: it is done."""
        moment_s = _COLLECT_SLOW_S if self._num_bytes < _SLOW_BYTES else _COLLECT_S
        process.attend(_ready(process.sources(), moment_s))
        return process.is_done

    def _wait(self, process: _Process, output: list[FileIO]) -> bool:
        """Until something happens; True: there is output, or its end."""
        while True:
            before = self.num_bytes_in
            ready = _ready([*output, *process.sources()], self._pipe.patience_s)
            process.attend(ready)
            if ready:
                return any(source.fileno() in ready for source in output)
            if self.num_bytes_in == before:
                raise self._error(
                    f"expected it to read, write or end within {self._pipe.patience_s:g} s, "
                    "found nothing of it, killed it",
                    process,
                )

    def _finish(self, process: _Process) -> None:
        process.attend(_ready(process.sources(), 0))
        if self._is_stopped:
            raise Internal(f"PipeStream.readinto: {self._file.path}: stopped")
        self._input.check()
        if process.status:
            raise self._error(f"expected exit code 0, found {_end(process.status)}", process)
        self._process, self._is_at_end = None, True
        if process.status is None:
            self._pipe.keep(process)
        else:
            process.close()
        self.close()

    def _error(self, what: str, process: _Process) -> DataError:
        lines = process.last_lines()
        said = f"its last lines on stderr:\n{lines}" if lines else "nothing on stderr"
        where = f"pipe_command {self._pipe.command!r} on {self._file.path}"
        return DataError(f"QueueDataset: {where}: {what}; {said}")

    def stop(self) -> None:
        """Nobody wants more; from any thread."""
        self._is_stopped = True
        self._input.stop()
        process = self._process
        if process is not None and not self._is_at_end:
            process.kill()

    def close(self) -> None:
        """Kill the command if it still runs; nothing of it is left when this returns."""
        if self._process is not None:
            self._process.close()
            self._process = None
        self._output.close()
        self._input.close()

    def __enter__(self) -> PipeStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Process:
    """A started command: its end, its stderr, and its wish for more files.

    is_done: it has ended, or written all that it makes of its file.
    status: its exit code, minus the signal that killed it; None before its end.

    Threads: one at a time; kill() from any.
    """

    def __init__(self, command: str, stdin: int, stdout: int) -> None:
        self.is_done = False
        self.status: int | None = None
        self._command = command
        self._line = self._tail = b""  # of stderr: an unfinished line, the last bytes
        self._offer, offer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        errors, stderr = os.pipe()
        self._errors = FileIO(errors)
        self._has_errors = self._has_offer = True
        words = plain_words(command) or ["/bin/sh", "-c", command]
        try:
            with offer:
                self._child = ChildCommand(
                    words,
                    env=os.environ,
                    stdin=stdin,
                    stdout=stdout,
                    stderr=stderr,
                    offer=offer.fileno(),
                )
        except BaseException:
            self._errors.close()
            self._offer.close()
            raise
        finally:
            os.close(stderr)

    def sources(self) -> list[FileIO | socket.socket | ChildCommand]:
        """What to wait for."""
        found: list[FileIO | socket.socket | ChildCommand] = []
        if self._has_errors:
            found.append(self._errors)
        if self._has_offer:
            found.append(self._offer)
        if self.status is None:
            found.append(self._child)
        return found

    def attend(self, ready: set[int]) -> None:
        """Take in what has become ready of its sources."""
        if self._has_errors and self._errors.fileno() in ready:
            self._read_errors()
        if self._has_offer and self._offer.fileno() in ready:
            self._has_offer = bool(self._offer.recv(1))  # empty: it takes no more files
            self.is_done |= self._has_offer
        if self.status is None and self._child.fileno() in ready:
            self.status = self._child.wait(0)
            self.is_done |= self.status is not None

    def take(self, stdin: int, stdout: int) -> bool:
        """Have a waiting process work on another file; False if it is gone."""
        self.attend(_ready(self.sources(), 0))
        if self.status is not None or not self._has_offer:
            return False
        self.is_done = False
        try:
            socket.send_fds(self._offer, [b"."], [stdin, stdout])
        except OSError:  # it has ended this very moment
            return False
        return True

    def last_lines(self) -> str:
        text = self._tail.decode(errors="replace")
        return "\n".join(text.splitlines()[-_LAST_LINES:])

    def kill(self) -> None:
        self._child.kill()

    def end(self) -> None:
        """Tell a waiting process that there are no more files, and see it off."""
        self._offer.close()
        self._has_offer = False
        status = self._child.wait(_GOODBYE_S)
        self.attend(_ready([self._errors], 0) if self._has_errors else set())
        if status:
            log.warning(
                "pipe_command %r, behind its last file: %s\n%s",
                self._command,
                _end(status),
                self.last_lines(),
            )
        self.close()

    def close(self) -> None:
        try:
            self._child.close()
        finally:
            self._errors.close()
            self._offer.close()

    def _read_errors(self) -> None:
        text = os.read(self._errors.fileno(), _STDERR_BYTES)
        self._has_errors = bool(text)
        *lines, self._line = (self._line + text)[-_STDERR_BYTES:].split(b"\n")
        for line in lines:
            log.info("pipe_command: %s", line.decode(errors="replace"))
        self._tail = (self._tail + text)[-_TAIL_BYTES:]


class _FileInput:
    """A file that the command reads itself."""

    def __init__(self, file: File, raw: FileIO) -> None:
        self._file = file
        self._raw = raw
        self.fd = raw.fileno()
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """How far it has been read: the offset is shared with the command."""
        if not self._raw.closed:
            self._num_bytes = self._raw.tell()
        return self._num_bytes

    def lent(self) -> None:
        """The command has its own descriptor by now."""

    def check(self) -> None:
        if self.num_bytes > self._file.num_bytes:
            raise DataError(
                f"QueueDataset: expected {self._file.num_bytes} bytes in {self._file.path}, "
                f"found {self.num_bytes}: it has grown while it was read"
            )

    def stop(self) -> None:
        """The command is killed."""

    def close(self) -> None:
        self._num_bytes = self.num_bytes
        self._raw.close()


class _FedInput:
    """Bytes that a thread writes to the command, as fast as it takes them."""

    def __init__(self, source: ByteStream) -> None:
        self._source = source
        self._error: BaseException | None = None
        self.fd, self._feed = os.pipe()
        self._thread = threading.Thread(target=self._run, name="trireme-pipe-feed", daemon=True)
        self._thread.start()

    @property
    def num_bytes(self) -> int:
        return self._source.num_bytes_in

    def lent(self) -> None:
        os.close(self.fd)

    def _run(self) -> None:
        buffer: NDArray[np.uint8] = np.empty(BLOCK_BYTES, np.uint8)
        try:
            with FileIO(self._feed, "w") as feed:
                while num_bytes := self._source.readinto(buffer):
                    rest = buffer.data[:num_bytes]
                    while rest:
                        rest = rest[feed.write(rest) or 0 :]
        except BrokenPipeError:
            return  # the command does not want more: its exit code says whether that is well
        except BaseException as error:  # noqa: BLE001 - raised again in check()
            self._error = error
        finally:
            self._source.close()

    def check(self) -> None:
        """The command is done: so is the thread, or it learns now that nobody reads."""
        self._join()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        self._source.stop()

    def close(self) -> None:
        """The command is gone: the thread cannot wait for it."""
        self._source.stop()
        self._join()

    def _join(self) -> None:
        self._thread.join(_JOIN_S)
        if self._thread.is_alive():
            raise Internal(f"PipeStream: its feeder did not stop within {_JOIN_S:.0f} s")


def _open_input(file: File) -> _FileInput | _FedInput:
    if file.is_local and file.codec is None:
        try:
            raw = FileIO(file.path)
        except OSError as error:
            raise DataError(f"QueueDataset: cannot read {file.path}: {error.strerror}") from error
        if os.fstat(raw.fileno()).st_size == file.num_bytes:
            return _FileInput(file, raw)
        raw.close()  # it has changed; the other way knows what that means
    return _FedInput(open_bytes(file))


def checked_command(command: str) -> str:
    """The command. Raises BadRequest if it is none."""
    if not isinstance(command, str) or not command.strip():
        raise BadRequest(f"pipe_command: expected a command, found {command!r}")
    return command


def needs_shell(command: str) -> bool:
    """Whether there is more in it than a program and its arguments."""
    return _FOR_THE_SHELL.search(re.sub("'[^']*'", "", command)) is not None


def plain_words(command: str) -> list[str] | None:
    """The program, with its path, and arguments of one plain command; None: it takes a shell."""
    if needs_shell(command):
        return None
    try:
        words = shlex.split(command)
    except ValueError:  # the shell says what is wrong with it
        return None
    program = shutil.which(words[0]) if words else None
    return [os.path.abspath(program), *words[1:]] if program else None


def _ready(sources: Iterable[FileIO | socket.socket | ChildCommand], timeout_s: float) -> set[int]:
    """Descriptors with something to read, or at their end."""
    poll = select.poll()
    for source in sources:
        poll.register(source.fileno(), select.POLLIN)
    return {fd for fd, _ in poll.poll(timeout_s * 1000)}


def _bytes_in(pipe: FileIO) -> int:
    (num_bytes,) = struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))
    return int(num_bytes)


def _end(status: int) -> str:
    if status >= 0:
        return str(status)
    return f"signal {-status} ({signal.strsignal(-status)})"
