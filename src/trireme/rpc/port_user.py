"""Which process listens on a port of this machine, as far as the kernel tells this user."""

import os
from collections.abc import Iterator
from pathlib import Path

_LISTENING = "0A"
_COMMAND_CHARACTERS = 80


def advice_on_port(port: int) -> str:
    """What to do about a port that is in use; for the end of an error's message."""
    for pid in _listeners(port):
        return (
            f"process {pid} listens there ({_command(pid)}): if it is left over from an earlier"
            f" job, `kill {pid}` ends it; or choose another port"
        )
    return (
        "a process of an earlier job may be left over, perhaps of another user:"
        f" `ss -ltnp 'sport = :{port}'` names it; end it, or choose another port"
    )


def _listeners(port: int) -> Iterator[int]:
    """Processes that listen there, of those whose files this user may see."""
    wanted = {f"socket:[{inode}]" for inode in _inodes(port)}
    for folder in Path("/proc").glob("[0-9]*/fd") if wanted else ():
        if any(_target(file) in wanted for file in _files(folder)):
            yield int(folder.parent.name)


def _files(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:  # of another user, or it has just ended
        return []


def _target(file: Path) -> str:
    try:
        return os.readlink(file)
    except OSError:  # it has just been closed
        return ""


def _inodes(port: int) -> Iterator[str]:
    """Of the sockets that listen on the port."""
    for name in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/net/{name}").read_text().splitlines()[1:]
        except OSError:  # no IPv6
            continue
        for fields in map(str.split, lines):
            if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                yield fields[9]


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:  # it has just ended
        return "its command is unknown"
    text = b" ".join(words).decode(errors="replace").strip()
    return text if len(text) <= _COMMAND_CHARACTERS else f"{text[:_COMMAND_CHARACTERS]}..."
