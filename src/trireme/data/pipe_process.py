"""A process of a `pipe_command`: how it is started, what it reports, how it ends."""

import logging
import os
import re
import select
import shlex
import shutil
import signal
import socket
from collections.abc import Iterable
from io import FileIO

from trireme.children import ChildCommand
from trireme.errors import BadRequest

_STDERR_BYTES = 1 << 16  # as much as a pipe holds: one read empties it
_TAIL_BYTES = 1 << 13
_LAST_LINES = 10
_GOODBYE_S = 5.0
# What a shell interprets, outside single quotes.
_SHELL_CHARACTERS = re.compile(r"[|&;<>()$`\"\\*?#~\[\]\n]")

log = logging.getLogger("trireme.data.pipe")


class PipeProcess:
    """A started command: its end, its stderr, and its requests for more files.

    Attributes:
        is_done: it has ended, or written all output for its file.
        status: its exit code, or minus the signal that killed it; None before its end.

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
        sources: list[FileIO | socket.socket | ChildCommand] = []
        if self._has_errors:
            sources.append(self._errors)
        if self._has_offer:
            sources.append(self._offer)
        if self.status is None:
            sources.append(self._child)
        return sources

    def attend(self, ready: set[int]) -> None:
        """Read the sources that are ready."""
        if self._has_errors and self._errors.fileno() in ready:
            self._read_errors()
        if self._has_offer and self._offer.fileno() in ready:
            try:
                self._has_offer = bool(self._offer.recv(1))  # empty: it asks for no more files
            except ConnectionResetError:  # it has ended before it took the file
                self._has_offer = False
            self.is_done |= self._has_offer
        if self.status is None and self._child.fileno() in ready:
            self.status = self._child.wait(0)
            self.is_done |= self.status is not None

    def take(self, stdin: int, stdout: int) -> bool:
        """Give a waiting process another file; False if it has ended."""
        self.attend(ready_fds(self.sources(), 0))
        if self.status is not None or not self._has_offer:
            return False
        self.is_done = False
        try:
            socket.send_fds(self._offer, [b"."], [stdin, stdout])
        except OSError:  # it has just ended
            return False
        return True

    def last_lines(self) -> str:
        text = self._tail.decode(errors="replace")
        return "\n".join(text.splitlines()[-_LAST_LINES:])

    def kill(self) -> None:
        self._child.kill()

    def end(self) -> None:
        """End a waiting process: there are no more files."""
        self._offer.close()
        self._has_offer = False
        status = self._child.wait(_GOODBYE_S)
        self.attend(ready_fds([self._errors], 0) if self._has_errors else set())
        if status:
            log.warning(
                "pipe_command %r, after its last file: %s\n%s",
                self._command,
                exit_text(status),
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


class MadeCommand(str):
    """A command that was made of what a user has written, which messages show."""

    def __new__(cls, command: str, written: str) -> "MadeCommand":
        made = super().__new__(cls, command)
        made.written = written
        return made

    written: str

    def __repr__(self) -> str:
        return repr(self.written)


def checked_command(command: str) -> str:
    """The command. Raises BadRequest if it is empty or not a string."""
    if not isinstance(command, str) or not command.strip():
        raise BadRequest(f"pipe_command: expected a command, found {command!r}")
    return command


def needs_shell(command: str) -> bool:
    """Whether the command is more than a program and its arguments."""
    return _SHELL_CHARACTERS.search(re.sub("'[^']*'", "", command)) is not None


def plain_words(command: str) -> list[str] | None:
    """The program, with its path, and arguments of a plain command; None: it needs a shell."""
    if needs_shell(command):
        return None
    try:
        words = shlex.split(command)
    except ValueError:  # the shell reports what is wrong with it
        return None
    program = shutil.which(words[0]) if words else None
    return [os.path.abspath(program), *words[1:]] if program else None


def ready_fds(
    sources: Iterable[FileIO | socket.socket | ChildCommand], timeout_s: float
) -> set[int]:
    """Descriptors that can be read, or are at their end."""
    poll = select.poll()
    for source in sources:
        poll.register(source.fileno(), select.POLLIN)
    return {fd for fd, _ in poll.poll(timeout_s * 1000)}


def exit_text(status: int) -> str:
    if status >= 0:
        return str(status)
    return f"signal {-status} ({signal.strsignal(-status)})"
