"""Files read through a command: `pipe_command`.

The command gets each file by itself on stdin, and its stdout is read in place of the file. A
command that fails is an error, whatever it has written before. Of a shell's pipeline the shell
reports the exit code of the last part alone.

A command built on our data generators may serve one file after the other: its environment says
that it can ask for more (TRIREME_PIPE_FD). So its interpreter starts once for each file that is
read at the same time, not once for each file.
"""

from __future__ import annotations

import fcntl
import os
import struct
import termios
import threading
from io import FileIO

import numpy as np
from numpy.typing import NDArray

from trireme.data.byte_streams import BLOCK_BYTES, ByteStream, open_bytes, open_raw
from trireme.data.pipe_process import PipeProcess, checked_command, exit_text, ready_fds
from trireme.data.sources import DataFile
from trireme.errors import DataError, Internal, start_thread

PATIENCE_S = 600.0
# A command may write small parts, and each would wake this process. What it writes in this time is
# read at once; the pipe is so large that even a fast command, at 500 MB/s, hardly waits.
_COLLECT_S = 0.002
_COLLECT_SLOW_S = 0.008
_PIPE_BYTES = 1 << 20
_SLOW_BYTES = _PIPE_BYTES // 8


_JOIN_S = 30.0


class FileInput:
    """A local file, which the command reads itself."""

    def __init__(self, file: DataFile, raw: FileIO) -> None:
        self._file = file
        self._raw = raw
        self.fd = raw.fileno()
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes read so far: the offset is shared with the command."""
        if not self._raw.closed:
            self._num_bytes = self._raw.tell()
        return self._num_bytes

    def lent(self) -> None:
        """Do nothing: the command has its own descriptor."""

    def check(self) -> None:
        self._file.check_unchanged()

    def stop(self) -> None:
        """Do nothing: the command is killed."""

    def close(self) -> None:
        self._num_bytes = self.num_bytes
        self._raw.close()


class FedInput:
    """Bytes that a thread writes to the command, as fast as it reads them."""

    def __init__(self, source: ByteStream) -> None:
        self._source = source
        self._error: BaseException | None = None
        self.fd, self._feed = os.pipe()
        self._thread = threading.Thread(target=self._run, name="trireme-pipe-feed", daemon=True)
        start_thread(self._thread)

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
            return  # the command reads no more: its exit code says whether it has failed
        except BaseException as error:  # noqa: BLE001 - raised again in check()
            self._error = error
        finally:
            self._source.close()

    def check(self) -> None:
        """Raise the thread's error. It ends with the command, which is done, at the latest."""
        self._join()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        self._source.stop()

    def close(self) -> None:
        """Stop the thread, which cannot wait for the command, as that has ended."""
        self._source.stop()
        self._join()

    def _join(self) -> None:
        self._thread.join(_JOIN_S)
        if self._thread.is_alive():
            raise Internal(f"PipeStream: its feeder did not stop within {_JOIN_S:.0f} s")


def open_input(file: DataFile) -> FileInput | FedInput:
    if file.is_local and file.codec is None:
        return FileInput(file, open_raw(file))
    return FedInput(open_bytes(file))


class Pipe:
    """A shell command that reads files, and its processes that wait for more files.

    Args:
        command: as for a shell. A plain command is started without one.
        patience_s: it is killed if it neither reads, writes nor ends for so long.

    Raises:
        BadRequest: an empty command.

    Threads: any.
    """

    def __init__(self, command: str, *, patience_s: float = PATIENCE_S) -> None:
        self.command = checked_command(command)
        self.patience_s = patience_s
        self._lock = threading.Lock()
        self._waiting: list[PipeProcess] = []
        self._is_closed = False

    def open(self, file: DataFile) -> PipeStream:
        """The command's output for a file. Raises DataError: the file cannot be read."""
        return PipeStream(self, file)

    def run(self, stdin: int, stdout: int) -> PipeProcess:
        """A process that uses these descriptors; the caller closes its own."""
        while True:
            with self._lock:
                process = self._waiting.pop() if self._waiting else None
            if process is None:
                return PipeProcess(self.command, stdin, stdout)
            if process.take(stdin, stdout):
                return process
            process.close()

    def keep(self, process: PipeProcess) -> None:
        """Let a process wait for another file."""
        with self._lock:
            if not self._is_closed:
                self._waiting.append(process)
                return
        process.end()

    def close(self) -> None:
        """End the processes that wait for files; others end with their file."""
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

    readinto() raises DataError if the command fails, however much it has written, with its exit
    code or signal and the last lines of its stderr; or if it neither reads, writes nor ends.
    """

    def __init__(self, pipe: Pipe, file: DataFile) -> None:
        self._pipe = pipe
        self._file = file
        self._is_at_end = self._is_stopped = False
        self._num_bytes = 0  # of the latest read
        self._num_left: int | None = None  # to read, once the command is done
        self._input = open_input(file)
        output, stdout = os.pipe()
        try:
            fcntl.fcntl(output, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
            self._is_large = True
        except OSError:  # the user's limit for pipes is reached: a small pipe must not fill
            self._is_large = False
        self._output = FileIO(output)
        self._process: PipeProcess | None = None
        try:
            self._process = pipe.run(self._input.fd, stdout)
        finally:
            os.close(stdout)
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
        # All its output is in the pipe; another process that holds the other end may write forever.
        if self._num_left is None:
            self._num_left = _bytes_in(self._output)
        if self._num_left:
            num_bytes = self._output.readinto(buffer[: self._num_left].data)
            self._num_left -= num_bytes
            return num_bytes
        self._finish(process)
        return 0

    def _collect(self, process: PipeProcess) -> bool:
        """Let the command write for a moment; returns whether it is done."""
        moment_s = _COLLECT_SLOW_S if self._num_bytes < _SLOW_BYTES else _COLLECT_S
        process.attend(ready_fds(process.sources(), moment_s))
        return process.is_done

    def _wait(self, process: PipeProcess, output: list[FileIO]) -> bool:
        """Wait until something happens; returns whether there is output, or its end."""
        while True:
            before = self.num_bytes_in
            ready = ready_fds([*output, *process.sources()], self._pipe.patience_s)
            process.attend(ready)
            if ready:
                return any(source.fileno() in ready for source in output)
            if self.num_bytes_in == before:
                raise self._error(
                    f"expected it to read, write or end within {self._pipe.patience_s:g} s, "
                    "found nothing of it, killed it",
                    process,
                )

    def _finish(self, process: PipeProcess) -> None:
        process.attend(ready_fds(process.sources(), 0))
        if self._is_stopped:
            raise Internal(f"PipeStream.readinto: {self._file.path}: stopped")
        self._input.check()
        if process.status:
            raise self._error(f"expected exit code 0, found {exit_text(process.status)}", process)
        self._process, self._is_at_end = None, True
        if process.status is None:
            self._pipe.keep(process)
        else:
            process.close()
        self.close()

    def _error(self, what: str, process: PipeProcess) -> DataError:
        lines = process.last_lines()
        stderr = f"its last lines on stderr:\n{lines}" if lines else "nothing on stderr"
        if "No module named 'paddle'" in lines:
            stderr += "\n(write `import trireme.fleet as fleet` in the reader: docs/paddlerec.md)"
        where = f"pipe_command {self._pipe.command!r} on {self._file.path}"
        return DataError(f"{where}: {what}; {stderr}")

    def stop(self) -> None:
        """See ByteStream.stop."""
        self._is_stopped = True
        self._input.stop()
        process = self._process
        if process is not None and not self._is_at_end:
            process.kill()

    def close(self) -> None:
        """Kill the command if it still runs; it has ended when this returns."""
        if self._process is not None:
            self._process.close()
            self._process = None
        self._output.close()
        self._input.close()

    def __enter__(self) -> PipeStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _bytes_in(pipe: FileIO) -> int:
    (num_bytes,) = struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))
    return int(num_bytes)
