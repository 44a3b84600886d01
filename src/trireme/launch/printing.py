"""What the launcher prints, by threads of their own: a paused terminal, or a pipe that nobody reads
or that is closed, keeps it neither from signals nor from starting again what has died.
"""

import io
import os
import select
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any

WAITING_BYTES_MAX = 16 << 20


class Printer(io.RawIOBase):
    """A descriptor to which a thread writes. It is full from WAITING_BYTES_MAX that wait on, and
    says how many bytes of what is written then are missing. What is for a reader that has gone is
    dropped.

    Threads: any.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._changed = threading.Condition()
        self._waiting: deque[bytes] = deque()  # the first one is being written
        self._num_bytes = self._num_missing = 0
        threading.Thread(target=self._run, name="printer", daemon=True).start()

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def writable(self) -> bool:
        return True

    @property
    def is_full(self) -> bool:
        return self._num_bytes >= WAITING_BYTES_MAX

    def write(self, data: Any) -> int:
        with self._changed:
            if self.is_full:
                self._num_missing += len(data)
            else:
                self._put(self._missing() + bytes(data))
        return len(data)

    def finish(self, timeout_s: float) -> None:
        """Wait until all is written, at most so long."""
        with self._changed:
            self._put(self._missing())
            self._changed.wait_for(lambda: not self._waiting, timeout_s)

    def _missing(self) -> bytes:
        missing, self._num_missing = self._num_missing, 0
        text = f"\ntrireme launch: {missing} bytes are not shown here: nobody read in time\n"
        return text.encode() if missing else b""

    def _put(self, data: bytes) -> None:
        self._waiting.append(data)
        self._num_bytes += len(data)
        self._changed.notify_all()

    def _run(self) -> None:
        has_reader = True
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting))
                data = self._waiting[0]
            try:
                while data and has_reader:
                    select.select([], [self._fd], [])  # another process may have set O_NONBLOCK
                    with suppress(BlockingIOError):
                        data = data[os.write(self._fd, data) :]
            except OSError:  # the terminal has been closed; `| head` has read enough
                has_reader = False
            with self._changed:
                self._num_bytes -= len(self._waiting.popleft())
                self._changed.notify_all()


@contextmanager
def printing(wait_s: float) -> Iterator[tuple[Printer, Printer]]:
    """Printers for sys.stdout and sys.stderr, to which what is written there goes, too. Its end
    waits for the readers, at most so long.
    """
    out, err = sys.stdout.fileno(), sys.stderr.fileno()
    first = Printer(out)
    printers = (first, first if os.path.sameopenfile(out, err) else Printer(err))
    files: list[Any] = list(printers)  # of which only write() is called
    new = [io.TextIOWrapper(f, errors="backslashreplace", write_through=True) for f in files]
    with redirect_stdout(new[0]), redirect_stderr(new[1]):
        try:
            yield printers
        finally:
            for printer in printers:
                printer.finish(wait_s)
