"""Which processes of a job run on this machine, and the ports of its servers.

The launcher binds the servers' addresses itself. So a port in use is an error before anything has
started, and the kernel gives the port to no other program while its server is down. The launcher
never listens on this socket: connections to a server that is down are refused. A server gets
another socket, which listens (TRIREME_LISTEN_FD).
"""

import contextlib
import errno
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from trireme.errors import BadRequest

_BACKLOG = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    """What to launch. Each role has a number of processes on this machine, or a list of the
    processes on all machines. A list entry belongs here if its host is an address of this machine.

    Attributes:
        command: arguments of python: a script, or -m and a module, then their arguments.
        grace_s: between SIGTERM and SIGKILL.
        state_dir: holds a folder for the state of each server; default `log_dir`/state.
        max_restart: how often each process is restarted when it dies; needs a durability. Without
            servers all processes of this machine are restarted together.
        streams: number of streams that the workers share; default: each has its own.
        join: servers of a running job with shared streams, which the workers join. The job's own
            command has started these servers.
        gpus, nproc_per_node, ips, start_port: see `machines.spread`, which puts workers in their
            place.
        host: of this machine in the lists, where several of their hosts are its own.
        interface: network device whose address is this machine's; default: the way to the others.
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
    skip_records: str | None = None
    max_restart: int = 0
    streams: int | None = None
    join: tuple[str, ...] = ()
    limits: str | None = None
    memory: str | None = None
    ssd_dir: str | None = None
    store_hosts: str | None = None
    gpus: tuple[str, ...] = ()
    nproc_per_node: int | None = None
    ips: tuple[str, ...] = ()
    host: str | None = None
    start_port: int | None = None
    interface: str | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """The servers of the job, and the processes that run here.

    num_workers: at the start of the job; 0: the workers here join a running job.
    workers_host: the workers host the servers, each the one of its index.
    gpus: of each worker here, by its index; empty: none is chosen.
    """

    servers: tuple[str, ...]
    num_workers: int
    sockets: dict[int, socket.socket]  # of each server here, bound to its address
    workers: tuple[int, ...]  # indices of the workers here
    workers_host: bool = False
    gpus: Mapping[int, str] = field(default_factory=dict)

    def listen(self, server: int) -> socket.socket:
        """A socket that listens at the address of a server that is down. The caller closes it.
        Raises BadRequest: another program listens there.
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
        """Release the ports."""
        for held in self.sockets.values():
            held.close()


def choose_placement(config: LaunchConfig) -> Placement:
    """Choose the processes of this machine and bind their ports. The caller closes the result.
    Raises BadRequest: the configuration contradicts itself, or a port is in use.
    """
    placement = _choose(config)
    num = len(placement.workers)
    if config.gpus and len(config.gpus) != num:
        placement.close()
        raise BadRequest(
            f"launch: expected a GPU for each of the {num} workers of this machine, found"
            f" {','.join(config.gpus)}"
        )
    return replace(placement, gpus=dict(zip(placement.workers, config.gpus, strict=False)))


def _choose(config: LaunchConfig) -> Placement:
    if config.command[0] != "-m" and not Path(config.command[0]).is_file():
        raise BadRequest(
            f"launch: expected a Python script to run, found no file {config.command[0]!r}"
        )
    _check_folders(config)
    if config.limits is not None:
        from trireme.server.server_limits import parse_limits  # loads NumPy

        parse_limits(config.limits)
    if config.store_hosts is not None:
        from trireme.server.store_hosts import parse_hosts

        parse_hosts(config.store_hosts)
    if config.join:
        return _plan_to_join(config)
    if config.streams is not None and config.streams < 1:
        raise BadRequest(f"launch: expected --streams of at least 1, found {config.streams}")
    if config.server_num == 0 and not config.servers:
        return _plan_without_servers(config)
    server_num = _number("server", config.server_num, config.servers)
    worker_num = _number("worker", config.worker_num, config.workers)
    listed = config.workers
    workers = tuple(i for i in range(worker_num) if not listed or is_local(listed[i], config.host))
    with contextlib.ExitStack() as stack:
        if config.servers:
            servers, sockets = config.servers, _bind_local("--servers", config, stack)
        else:
            servers, sockets = _bind_free(server_num, config, stack)
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
    return Placement(servers, worker_num, sockets, workers)


def _plan_without_servers(config: LaunchConfig) -> Placement:
    """Workers that host the rows, at the addresses of --workers, or on free ports here."""
    options = {
        "--streams": config.streams,
        "--durability": config.durability,
        "--state_dir": config.state_dir,
        "--log_bytes": config.log_bytes,
        "--skip_records": config.skip_records,
    }
    if refused := [option for option, value in options.items() if value is not None]:
        raise BadRequest(
            "launch: expected servers with "
            + ", ".join(refused)
            + ", found none: workers that hold the rows neither come and go nor continue alone;"
            " take checkpoints, from the newest of which --max_restart continues"
        )
    num = _number("worker", config.worker_num, config.workers)
    with contextlib.ExitStack() as stack:
        if config.workers:
            addresses, sockets = config.workers, _bind_local("--workers", config, stack)
        else:
            addresses, sockets = _bind_free(num, config, stack)
        if not sockets:
            raise BadRequest(
                "launch: expected an address of this machine among --workers"
                f" {','.join(addresses)}, found none"
            )
        stack.pop_all()
    return Placement(addresses, num, sockets, tuple(sockets), workers_host=True)


def _plan_to_join(config: LaunchConfig) -> Placement:
    """Workers here that join a running job."""
    others = {
        "--server_num": config.server_num,
        "--servers": config.servers,
        "--workers": config.workers,
        "--streams": config.streams,
    }
    if options := [option for option, value in others.items() if value not in (None, ())]:
        raise BadRequest(
            "launch: expected only --worker_num with --join, because the job has the rest, found"
            f" {', '.join(options)}"
        )
    worker_num = 1 if config.worker_num is None else config.worker_num
    return Placement(config.join, 0, {}, tuple(range(_number("worker", worker_num, ()))))


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
    count = len(addresses) if num is None else num
    if count < 1:
        raise BadRequest(
            f"launch: expected --{role}_num of at least 1, found {count}; "
            "to train in one process run the script with python, without servers launch it with"
            " --server_num 0"
        )
    return count


def _check_folders(config: LaunchConfig) -> None:
    if config.keys is not None and config.insecure:
        raise BadRequest(
            f"launch: expected --keys or --insecure, found both (--keys {config.keys})"
        )
    for option, folder in (("keys", config.keys), ("root", config.root)):
        if folder is not None and not Path(folder).is_dir():
            raise BadRequest(f"launch: expected --{option} to be a folder, found none at {folder}")


def _open(family: int) -> socket.socket:
    """A TCP socket that may share its address with one that does not listen or has just closed."""
    opened = socket.socket(family, socket.SOCK_STREAM)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return opened


def _bind_free(
    num: int, config: LaunchConfig, stack: contextlib.ExitStack
) -> tuple[tuple[str, ...], dict[int, socket.socket]]:
    """Free ports of this machine: their addresses, and sockets bound to them."""
    host = "127.0.0.1"
    if config.interface is not None:
        from trireme.rpc import interface_address  # loads ZeroMQ

        host = interface_address(config.interface)
    sockets = {i: stack.enter_context(_open(socket.AF_INET)) for i in range(num)}
    for held in sockets.values():
        held.bind((host, 0))
    return tuple(f"{host}:{held.getsockname()[1]}" for held in sockets.values()), sockets


def _bind_local(
    option: str, config: LaunchConfig, stack: contextlib.ExitStack
) -> dict[int, socket.socket]:
    """Sockets bound to the addresses of the option that belong to this machine, by position."""
    addresses = config.servers if option == "--servers" else config.workers
    if len(set(addresses)) != len(addresses):
        raise BadRequest(
            f"launch: expected different addresses in {option}, found {','.join(addresses)}"
        )
    sockets = {}
    for index, address in enumerate(addresses):
        held = _bind(address) if _may_be_local(address, config.host) else None
        if held is not None:
            sockets[index] = stack.enter_context(held)
    return sockets


def is_local(address: str, host: str | None = None) -> bool:
    """Whether the host of `host:port` is this machine; any port will do. host: of this machine
    alone, if it has several.
    """
    held = _bind(address.rpartition(":")[0] + ":0", low=0) if _may_be_local(address, host) else None
    if held is None:
        return False
    held.close()
    return True


def _may_be_local(address: str, host: str | None) -> bool:
    return host is None or address.rpartition(":")[0] == host


def _bind(address: str, *, low: int = 1) -> socket.socket | None:
    """A socket bound to the address; None: the kernel refuses it, as of another machine.

    low: the lowest port. With 0 the kernel would choose one that other machines do not know.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not low <= int(port) < 65536:
        raise BadRequest(
            f"launch: expected host:port,host:port,... with ports of 1 to 65535, found {address!r}"
        )
    try:
        infos = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        raise BadRequest(f"launch: expected a host that has an address, found {host!r}") from error
    family, _, _, _, sockaddr = infos[0]
    held = _open(family)
    try:
        held.bind(sockaddr)
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
