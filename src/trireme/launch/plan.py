"""Which processes of a job run on this machine, and the ports of its servers.

The launcher binds the servers' addresses itself, so that a port in use is an error before anything
has started, and no program gets one from the kernel while its server is down. It never listens
there: who connects to a server that is down is refused. A server gets another socket, which listens
(TRIREME_LISTEN_FD).
"""

from __future__ import annotations

import contextlib
import errno
import socket
from dataclasses import dataclass, field
from pathlib import Path

from trireme.errors import BadRequest
from trireme.protocol.server_limits import parse_limits

_BACKLOG = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    """What to launch. Numbers are of processes on this machine; lists name those of all machines.

    A list entry belongs here if its host is an address of this machine. Give each role a number or
    a list. `command` is what python runs: a script or -m and a module, then their arguments.
    `grace_s`: between SIGTERM and SIGKILL. `state_dir`: each server has a folder of its own in it,
    for what `durability` keeps; default `log_dir`/state. `max_restart`: how often each process is
    started again when it has died, which needs a durability. `streams`: that workers share out;
    default one of each worker's own. `join`: the servers of a job that shares out streams and runs,
    which the workers join; the job's own command has started these servers.
    """

    command: tuple[str, ...]
    server_num: int | None = None
    worker_num: int | None = None
    servers: tuple[str, ...] = ()
    workers: tuple[str, ...] = ()
    log_dir: Path = field(default_factory=lambda: Path("log"))
    grace_s: float = 30.0
    timeout_s: float | None = None
    insecure: bool = False
    keys: str | None = None
    root: str | None = None
    metrics: str | None = None
    durability: str | None = None
    state_dir: Path | None = None
    log_bytes: int | None = None
    max_restart: int = 0
    streams: int | None = None
    join: tuple[str, ...] = ()
    limits: str | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """The whole job's servers, and what of it runs here. num_workers: that the job begins with; 0:
    it runs already, and those here join it.
    """

    servers: tuple[str, ...]
    num_workers: int
    sockets: dict[int, socket.socket]  # server index -> bound to its address, for those here
    workers: tuple[int, ...]  # indices of the workers here

    def listen(self, server: int) -> socket.socket:
        """A socket that listens at the address of a server, which is down. The caller closes it.

        Raises:
            BadRequest: something else listens there.
        """
        held = self.sockets[server]
        listening = _open(held.family)
        try:
            listening.bind(held.getsockname())
            listening.listen(_BACKLOG)
        except OSError as error:
            listening.close()
            raise _refused(self.servers[server], error) from error
        return listening

    def close(self) -> None:
        """Give the ports back."""
        for held in self.sockets.values():
            held.close()


def make_plan(config: LaunchConfig) -> Plan:
    """Decide what runs here and take its ports. The caller closes the plan.

    Raises:
        BadRequest: the configuration contradicts itself, or a port is in use.
    """
    if config.command[0] != "-m" and not Path(config.command[0]).is_file():
        raise BadRequest(
            f"launch: expected a Python script to run, found no file {config.command[0]!r}"
        )
    _check_folders(config)
    parse_limits(config.limits or "")
    if config.join:
        return _plan_to_join(config)
    if config.streams is not None and config.streams < 1:
        raise BadRequest(f"launch: expected --streams of at least 1, found {config.streams}")
    server_num = _number("server", config.server_num, config.servers)
    worker_num = _number("worker", config.worker_num, config.workers)
    listed = config.workers
    workers = tuple(i for i in range(worker_num) if not listed or _is_here(listed[i]))
    with contextlib.ExitStack() as stack:
        if config.servers:
            servers, sockets = config.servers, _bind_here(config.servers, stack)
        else:
            sockets = {i: stack.enter_context(_bind_anywhere()) for i in range(server_num)}
            servers = tuple(f"127.0.0.1:{held.getsockname()[1]}" for held in sockets.values())
        if len(sockets) < len(servers) and not listed:
            raise BadRequest(
                f"launch: expected --workers to list all workers, since not all of --servers "
                f"{','.join(servers)} are on this machine, found --worker_num {worker_num}"
            )
        if not sockets and not workers:
            raise BadRequest(
                f"launch: expected an address of this machine among --servers "
                f"{','.join(servers)} and --workers {','.join(listed)}, found none"
            )
        stack.pop_all()
    return Plan(servers, worker_num, sockets, workers)


def _plan_to_join(config: LaunchConfig) -> Plan:
    """Workers here that join a job whose servers run."""
    others = {
        "--server_num": config.server_num,
        "--servers": config.servers,
        "--workers": config.workers,
        "--streams": config.streams,
    }
    if given := [option for option, value in others.items() if value not in (None, ())]:
        raise BadRequest(
            "launch: expected --join with --worker_num, because the job says the rest, found"
            f" {', '.join(given)}"
        )
    worker_num = 1 if config.worker_num is None else config.worker_num
    return Plan(config.join, 0, {}, tuple(range(_number("worker", worker_num, ()))))


def _number(role: str, num: int | None, addresses: tuple[str, ...]) -> int:
    if num is None and not addresses:
        raise BadRequest(
            f"launch: expected --{role}_num or --{role}s before the script, found neither"
        )
    if addresses and num not in (None, len(addresses)):
        raise BadRequest(
            f"launch: expected --{role}_num to be the length of --{role}s = {len(addresses)} "
            f"({','.join(addresses)}), found {num}"
        )
    found = len(addresses) if num is None else num
    if found < 1:
        raise BadRequest(
            f"launch: expected --{role}_num of at least 1, found {found}; "
            "to train without servers run the script with python"
        )
    return found


def _check_folders(config: LaunchConfig) -> None:
    if config.keys is not None and config.insecure:
        raise BadRequest(
            f"launch: expected --keys or --insecure, found both (--keys {config.keys})"
        )
    for option, folder in (("keys", config.keys), ("root", config.root)):
        if folder is not None and not Path(folder).is_dir():
            raise BadRequest(f"launch: expected --{option} to be a folder, found none at {folder}")


def _open(family: int) -> socket.socket:
    """A TCP socket that may have the address of one that does not listen, or has just ended."""
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return made


def _bind_anywhere() -> socket.socket:
    held = _open(socket.AF_INET)
    held.bind(("127.0.0.1", 0))
    return held


def _bind_here(addresses: tuple[str, ...], stack: contextlib.ExitStack) -> dict[int, socket.socket]:
    """Sockets bound to those addresses that are of this machine, by their position."""
    if len(set(addresses)) != len(addresses):
        raise BadRequest(
            f"launch: expected different addresses in --servers, found {','.join(addresses)}"
        )
    sockets = {}
    for index, address in enumerate(addresses):
        held = _bind(address)
        if held is not None:
            sockets[index] = stack.enter_context(held)
    return sockets


def _is_here(address: str) -> bool:
    """Whether the host of `host:port` is this machine; a worker listens nowhere, so any port."""
    held = _bind(address.rpartition(":")[0] + ":0", low=0)
    if held is None:
        return False
    held.close()
    return True


def _bind(address: str, *, low: int = 1) -> socket.socket | None:
    """Binding is the test: the kernel refuses an address that is not of this machine. A port below
    `low` is refused: 0 would choose one, of which other machines could not know.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not low <= int(port) < 65536:
        raise BadRequest(
            f"launch: expected host:port,host:port,... with ports of 1 to 65535, found {address!r}"
        )
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        raise BadRequest(f"launch: expected a host that has an address, found {host!r}") from error
    family, _, _, _, where = found[0]
    held = _open(family)
    try:
        held.bind(where)
    except OSError as error:
        held.close()
        if error.errno == errno.EADDRNOTAVAIL:
            return None
        raise _refused(address, error) from error
    return held


def _refused(address: str, error: OSError) -> BadRequest:
    return BadRequest(
        f"launch: expected to listen on {address}, found: {error.strerror}; choose another port"
    )
