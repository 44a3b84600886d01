"""Which processes of a job run on this machine, and the ports of those that listen."""

import contextlib
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from trireme.errors import BadRequest
from trireme.launch.addresses import bind_free, bind_local, is_local, listen_at
from trireme.launch.compute_placement import ComputePlacement, place_compute_workers
from trireme.protocol.job_limits import SERVERS_MAX, STREAMS_MAX, WORKERS_MAX
from trireme.telemetry.address import split_address

NO_PADDLE = (
    "PaddleRec's tools/*.py are left out: trireme launch OPTIONS -m FILE; docs/paddlerec.md says"
    " what scripts import for paddle"
)
STATE_OPTIONS = ("durability", "state_dir", "log_bytes", "skip_records")
"""What servers keep of their state."""
SERVER_OPTIONS = ("root", "limits", "memory", "ssd_dir", "store_hosts")
"""Others of servers, which all processes of a job get, as TRIREME_ROOT and so on."""


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
        heter_worker_num, heter_devices, heter_workers: number, label and addresses of the compute
            workers of each kind.
        console: where the web console of the job listens, on the machine of server 0.
        start_method: "forkserver": processes are forked from one that has loaded torch; "spawn":
            each loads it; default: as `fork_server.is_forked` says.
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
    console: str | None = None
    durability: str | None = None
    state_dir: Path | None = None
    log_bytes: int | None = None
    skip_records: str | None = None
    max_restart: int = 0
    start_method: str | None = None
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
    heter_worker_num: tuple[int, ...] = ()
    heter_devices: tuple[str, ...] = ()
    heter_workers: tuple[tuple[str, ...], ...] = ()

    def given(self, *names: str) -> list[str]:
        """Those of these options that have a value, as on the command line."""
        return [f"--{name}" for name in names if getattr(self, name) not in (None, ())]

    @property
    def has_compute_workers(self) -> bool:
        return bool(self.heter_worker_num or self.heter_devices or self.heter_workers)


@dataclass(frozen=True, slots=True)
class Placement:
    """The servers of the job, and the processes that run here.

    num_workers: at the start of the job; 0: the workers here join a running job.
    workers_host: the workers host the servers, each the one of its index.
    heter: the compute workers of the job.
    gpus: of each worker here, or of each compute worker of a label such as gpu or gpu_2 if the job
        has some, by its index; empty: none is chosen.
    """

    servers: tuple[str, ...]
    num_workers: int
    sockets: dict[int, socket.socket]  # of each server here, bound to its address
    workers: tuple[int, ...]  # indices of the workers here
    workers_host: bool = False
    heter: ComputePlacement = field(default_factory=ComputePlacement)
    gpus: Mapping[int, str] = field(default_factory=dict)

    @property
    def gpus_go_to(self) -> str:
        """The role of the processes that have GPUs."""
        return "heter" if self.heter.on_gpus else "worker"

    def address(self, role: str, index: int) -> str:
        """Where a server, a worker that hosts one, or a compute worker listens."""
        return self.heter.workers[index][1] if role == "heter" else self.servers[index]

    def listen(self, role: str, index: int) -> socket.socket:
        """A socket that listens at that address, of a process that is down. The caller closes it.
        Raises BadRequest: another program listens there.
        """
        sockets = self.heter.sockets if role == "heter" else self.sockets
        return listen_at(self.address(role, index), sockets[index])

    def close(self) -> None:
        """Release the ports."""
        for held in (*self.sockets.values(), *self.heter.sockets.values()):
            held.close()


def choose_placement(config: LaunchConfig) -> Placement:
    """Choose the processes of this machine and bind their ports. The caller closes the result.
    Raises BadRequest: the configuration contradicts itself, or a port is in use.
    """
    placement = _choose(config)
    try:
        return replace(placement, gpus=_gpus(config, placement))
    except BaseException:
        placement.close()
        raise


def _gpus(config: LaunchConfig, placement: Placement) -> dict[int, str]:
    """The GPU of each process here that is to have one, by its index."""
    noun, indices = "workers", list(placement.workers)
    if placement.gpus_go_to == "heter":
        noun = "compute workers of labels such as gpu and gpu_2"
        indices = placement.heter.on_gpus_here
    if config.gpus and len(config.gpus) != len(indices):
        raise BadRequest(
            f"launch: expected a GPU for each of the {len(indices)} {noun} of this machine, found"
            f" {','.join(config.gpus)}"
        )
    return dict(zip(indices, config.gpus, strict=False))


def _choose(config: LaunchConfig) -> Placement:
    if config.command[0] != "-m" and not Path(config.command[0]).is_file():
        raise BadRequest(
            f"launch: expected a Python script to run, found no file {config.command[0]!r}"
            + (f"; {NO_PADDLE}" if "-m" in config.command else "")
        )
    _check_folders(config)
    if config.console is not None:
        split_address(config.console, "launch: --console")
    if config.limits is not None:
        from trireme.server.server_limits import parse_limits  # loads NumPy

        parse_limits(config.limits)
    if config.store_hosts is not None:
        from trireme.server.store_hosts import parse_hosts

        parse_hosts(config.store_hosts)
    if config.join:
        return _plan_to_join(config)
    if config.streams is not None and not 1 <= config.streams <= STREAMS_MAX:
        raise BadRequest(
            f"launch: expected --streams of 1 to {STREAMS_MAX}, found {config.streams}: servers and"
            " checkpoints keep a position for each"
        )
    if config.server_num == 0 and not config.servers:
        return _plan_without_servers(config)
    server_num = _number("server", config.server_num, config.servers)
    worker_num = _number("worker", config.worker_num, config.workers)
    listed = config.workers
    workers = tuple(i for i in range(worker_num) if not listed or is_local(listed[i], config.host))
    with contextlib.ExitStack() as stack:
        if config.servers:
            servers = config.servers
            sockets = bind_local("--servers", servers, config.host, stack)
        else:
            servers, sockets = bind_free(server_num, config.interface, stack)
        heter = _place_compute_workers(config, stack)
        _check_machines(config, heter, len(sockets) == len(servers), len(workers) == worker_num)
        if len(sockets) < len(servers) and not listed:
            raise BadRequest(
                f"launch: expected --workers to list all workers, since not all of --servers "
                f"{','.join(servers)} are on this machine, found --worker_num {worker_num}"
            )
        if not sockets and not workers and not heter.sockets:
            raise BadRequest(
                f"launch: expected an address of this machine among --servers "
                f"{','.join(servers)} and --workers {','.join(listed)}, found none"
            )
        stack.pop_all()
    return Placement(servers, worker_num, sockets, workers, heter=heter)


def _place_compute_workers(config: LaunchConfig, stack: contextlib.ExitStack) -> ComputePlacement:
    if not config.has_compute_workers:
        return ComputePlacement()
    return place_compute_workers(
        config.heter_worker_num,
        config.heter_devices,
        config.heter_workers,
        host=config.host,
        interface=config.interface,
        stack=stack,
    )


def _check_machines(
    config: LaunchConfig, heter: ComputePlacement, has_servers: bool, has_workers: bool
) -> None:
    """Check that processes on other machines can reach those whose ports are chosen free. Raises
    BadRequest.
    """
    if heter.sockets.keys() < set(range(len(heter.workers))) and not (
        config.servers and config.workers
    ):
        raise BadRequest(
            "launch: expected --servers and --workers to list all others, since not all of"
            f" --heter_workers {heter} are on this machine, found a number"
        )
    if config.heter_worker_num and not config.heter_workers and not (has_servers and has_workers):
        raise BadRequest(
            "launch: expected --heter_workers to list all compute workers, since not all of"
            " --servers and --workers are on this machine, found --heter_worker_num"
        )


def _plan_without_servers(config: LaunchConfig) -> Placement:
    """Workers that host the rows, at the addresses of --workers, or on free ports here."""
    if config.has_compute_workers:
        raise BadRequest(
            "launch: expected servers with --heter_worker_num, --heter_devices and --heter_workers,"
            " found none: workers that hold the rows compute on devices of their own"
        )
    if refused := config.given("streams", *STATE_OPTIONS):
        raise BadRequest(
            "launch: expected servers with "
            + ", ".join(refused)
            + ", found none: workers that hold the rows neither come and go nor continue alone;"
            " take checkpoints, from the newest of which --max_restart continues"
        )
    num = _number("worker", config.worker_num, config.workers)
    with contextlib.ExitStack() as stack:
        if config.workers:
            addresses = config.workers
            sockets = bind_local("--workers", addresses, config.host, stack)
        else:
            addresses, sockets = bind_free(num, config.interface, stack)
        if not sockets:
            raise BadRequest(
                "launch: expected an address of this machine among --workers"
                f" {','.join(addresses)}, found none"
            )
        stack.pop_all()
    return Placement(addresses, num, sockets, tuple(sockets), workers_host=True)


def _plan_to_join(config: LaunchConfig) -> Placement:
    """Workers here that join a running job."""
    of_the_job = ("server_num", "servers", "workers", "streams", "console")
    kinds = ("heter_worker_num", "heter_devices", "heter_workers")
    if options := config.given(*of_the_job, *kinds, *STATE_OPTIONS, *SERVER_OPTIONS):
        raise BadRequest(
            "launch: expected only --worker_num with --join, because the job has the rest, found"
            f" {', '.join(options)}"
        )
    worker_num = 1 if config.worker_num is None else config.worker_num
    return Placement(config.join, 0, {}, tuple(range(_number("worker", worker_num, ()))))


_MOST = {
    "server": (SERVERS_MAX, "each has at least one of the buckets of a table"),
    "worker": (WORKERS_MAX, "the coordinator keeps a lease and the steps of each"),
}


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
    most, why = _MOST[role]
    if count > most:
        raise BadRequest(f"launch: expected at most {most} {role}s, found {count}: {why}")
    return count


def _check_folders(config: LaunchConfig) -> None:
    if config.keys is not None and config.insecure:
        raise BadRequest(
            f"launch: expected --keys or --insecure, found both (--keys {config.keys})"
        )
    for option, folder in (("keys", config.keys), ("root", config.root)):
        if folder is not None and not Path(folder).is_dir():
            raise BadRequest(f"launch: expected --{option} to be a folder, found none at {folder}")
