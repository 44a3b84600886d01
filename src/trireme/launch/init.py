"""`trireme.init()`: a script takes its place in a job, or embeds everything in its process."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from trireme import torch_compiler
from trireme.errors import PERMANENT, BadRequest, Corruption, TriremeError
from trireme.launch.environment import (
    name_network_device,
    names_server,
    note_joined,
    set_too_late,
)
from trireme.launch.key_folder import client_keys, server_keys
from trireme.launch.process_role import REFUSED, STOPPED, ProcessRole, read_role
from trireme.launch.serving_options import serving_options

if TYPE_CHECKING:
    from trireme.job.cluster import Cluster

log = logging.getLogger("trireme")

# What a disk or network raises may be over at the next attempt.
_OF_VALUES = (TriremeError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError)


def init(
    *,
    servers: str | Sequence[str] | None = None,
    role: str | None = None,
    index: int | None = None,
    num: int | None = None,
    streams: int | None = None,
    join: bool | None = None,
    heter: str | None = None,
    keys: str | None = None,
    timeout_s: float | None = None,
    metrics: str | int | None = None,
    memory: str | int | None = None,
    ssd_dir: str | None = None,
) -> Cluster:
    """Start or join the job, and make its cluster the default. A server process serves here, then
    exits with 0, or with 2 if its place or its state is wrong.

    Without arguments the environment states the role of this process (docs: `trireme launch`,
    Fleet's variables, torchrun). Workers of torchrun without TRIREME_SERVERS hold the rows
    themselves (docs/collective.md). If it states nothing, the tables are embedded in this process.
    One line reports the role. A second call with the same arguments returns the same cluster.

    Args:
        servers: "host:port,host:port" or a sequence; the first hosts the coordinator.
        role: "worker", "server", "embedded", or "heter", a compute worker: its script ends in its
            first Trainer, which computes batches of the workers until they have left.
        index: of this process among those of its role.
        num: number of workers.
        streams: cut the data of each pass into this number of streams, which the workers share, in
            mode async. Workers may then join later, and continue the streams of one that has died.
            Default: each worker has a stream of its own.
        join: be a worker that joins such a job while it runs. The job assigns index and number.
        heter: compute workers of the job, "LABEL=HOST:PORT,...".
        keys: folder with key files, to encrypt and authenticate: a worker needs client.key
            and server.pub, a server server.key and clients.pub (the admitted public keys), a
            compute worker all four.
        timeout_s: deadline of every call, the wait for other processes included.
        metrics: [HOST:]PORT where this process answers /metrics and /healthz. Port 0 chooses a free
            one and reports it. Default: none.
        memory: bytes that the tables of this process take in memory, such as "2GiB", embedded or on
            a server. Rows beyond that, the least used ones, lie in ssd_dir. Default: all
            rows are in memory.
        ssd_dir: folders on SSD for those rows, "PATH,...".

    Raises:
        BadRequest: half-set or contradicting variables; a server exits with 2, and so does later a
            worker at an uncaught error of its data, outputs or schemas.
        DeadlineExceeded: servers that do not come up. NotAdmitted: servers that do not list this
            worker's key.
    """
    log_to_stderr()
    if names := set_too_late():
        log.warning(
            "%s: set when torch was loaded already, perhaps too late: set it before `trireme"
            " launch`, or give that --start_method spawn",
            ", ".join(names),
        )
    try:
        process = read_role(
            servers=servers,
            role=role,
            index=index,
            num=num,
            streams=streams,
            join=join,
            heter=heter,
            keys=keys,
            timeout_s=timeout_s,
            metrics=metrics,
            memory=memory,
            ssd_dir=ssd_dir,
        )
    except BadRequest as error:
        if not names_server(role):
            raise
        sys.exit(_refuse(error))
    if process.role == "server":
        log.info("%s", process.describe())
        # Python searches all objects for cycles as it ends: with torch a quarter of a second.
        # Objects of the script that are parts of one go with the process, unfinalized.
        atexit.register(gc.freeze)
        sys.exit(serve_role(process))
    from trireme.job.default import default, default_settings, is_default_set

    if is_default_set() and default_settings() is not None:
        from trireme.table import differing_fields

        if process != default_settings():
            fields = differing_fields(asdict(default_settings()), asdict(process))
            raise BadRequest(
                f"init: a process has one place at a time: {fields}; end the first with"
                " `cluster.close()`"
            )
        return default()
    return _start(process)


def _start(process: ProcessRole) -> Cluster:
    from trireme.job.default import set_default

    log.info("%s", process.describe())
    if process.role != "embedded":
        _end_as_refused()
    cluster = connect(process)
    note_joined()
    set_default(cluster, process)
    return cluster


def _end_as_refused() -> None:
    """From now on an uncaught error that a restarted worker would meet again ends this process with
    the code of one that need not be restarted.
    """
    before = sys.excepthook
    if hasattr(before, "ends_as_refused"):
        return

    def show(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        cause = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        is_permanent = isinstance(error, PERMANENT) or getattr(error, "is_of_script", False)
        is_permanent &= isinstance(cause, _OF_VALUES)
        is_permanent &= not str(cause).startswith("Caught ")  # by torch's DataLoader: lacks causes
        is_permanent &= not getattr(cause, "retry", False)
        before(kind, error, traceback)
        if is_permanent:
            sys.exit(REFUSED)

    show.ends_as_refused = True  # type: ignore[attr-defined]
    sys.excepthook = show


def reset() -> Cluster:
    """Empty this process: close the embedded cluster that `trireme.init()` made, with its tables
    and dense parameters, and make an empty one in its place, which it returns. Models made before
    must be made again.

    Raises BadRequest: the rows are on servers, or there was no `init()`.
    """
    from trireme.job.default import default, default_settings, is_default_set

    process = default_settings() if is_default_set() else None
    if not isinstance(process, ProcessRole) or process.role != "embedded":
        raise BadRequest(
            "reset: expected an embedded process after `tr.init()`, found"
            f" {'none' if process is None else 'one whose rows are on servers'};"
            " Trainer(fresh=True) begins anew there"
        )
    default().abandon()
    return _start(process)


def connect(process: ProcessRole) -> Cluster:
    """Join the job as a worker or compute worker, or embed everything."""
    torch_compiler.keep_unloaded()
    options: dict[str, Any] = {
        "streams": process.streams,
        "threads": process.threads or 0,
        "timeout_s": process.timeout_s,
        "metrics": process.metrics,
        "devices": dict(process.devices),
    }
    _choose_gpu(process, options["devices"])
    if process.role == "embedded":
        from trireme.job.embedded import embedded
        from trireme.server.row_tier import make_row_tier

        return embedded(
            **options, tier=make_row_tier(process.memory, process.ssd_dir, process.timeout_s)
        )
    _use_interface(process)
    if process.role == "heter":
        return _connect_compute_worker(process, options)
    options["interface"] = process.interface
    keys = None if process.keys is None else client_keys(Path(process.keys))
    if process.hosts:
        options |= {"keys": keys, "insecure": process.insecure}
        return _connect_rank(process, options)
    from trireme.job import connecting

    return connecting.connect(
        process.servers,
        worker=process.index,
        num_workers=process.num_workers,
        late=process.is_late,
        keys=keys,
        insecure=process.insecure,
        ends_at_sigterm=process.ends_at_sigterm,
        heter=process.heter,
        **options,
    )


def _connect_compute_worker(process: ProcessRole, options: dict[str, Any]) -> Cluster:
    """A cluster whose Trainer serves the workers of the job."""
    from trireme.job.compute_place import ComputePlace, compute_cluster

    assert process.listen is not None
    folder = None if process.keys is None else Path(process.keys)
    place = ComputePlace(
        label=process.label,
        index=process.index,
        listen=process.listen,
        listen_fd=process.listen_fd,
        coordinator=process.servers[0],
        server_keys=None if folder is None else server_keys(folder),
        client_keys=None if folder is None else client_keys(folder),
        insecure=process.insecure,
        timeout_s=process.timeout_s,
        stopped_code=0 if process.listen_fd is None else STOPPED,
    )
    del options["timeout_s"]  # the place has it
    return compute_cluster(place, num_workers=process.num_workers, **options)


def _choose_gpu(process: ProcessRole, places: Mapping[str, str]) -> None:
    """Make the GPU of this process torch's current one."""
    from trireme import accelerator

    if process.gpu is not None:
        accelerator.select_gpu(process.gpu, places)
    elif process.local_index is not None:
        accelerator.share_gpus(process.local_index, process.local_num)


def _use_interface(process: ProcessRole) -> None:
    """Have NCCL, and gloo in groups of the script's own, use the network device. Raises BadRequest:
    this process listens elsewhere.
    """
    if process.interface is None:
        return
    from trireme.rpc import interface_address

    name_network_device(process.interface)
    address = interface_address(process.interface)
    host = (process.listen or "").rpartition(":")[0].strip("[]")
    if host and socket.gethostbyname(host) != address:
        raise BadRequest(
            f"init: expected to listen at {address}, the address of the network device"
            f" {process.interface}, found {process.listen}"
        )


def _connect_rank(process: ProcessRole, options: dict[str, Any]) -> Cluster:
    """Host the server of this worker's part of the rows, and join the job."""
    from trireme.job.host import Host
    from trireme.job.ranks import AddressMeeting, TorchrunMeeting, connect_ranks
    from trireme.rpc import own_host
    from trireme.threads import start_pool

    worker, num_workers, timeout_s = process.index, process.num_workers, process.timeout_s
    listen = process.listen
    meet: AddressMeeting | TorchrunMeeting
    if process.master is None:
        meet = AddressMeeting(process.servers, worker, timeout_s, options["keys"])
    else:
        is_alone = process.local_num == num_workers and process.interface is None
        listen = f"{'127.0.0.1' if is_alone else own_host(process.master, process.interface)}:0"
        meet = TorchrunMeeting(worker, num_workers, timeout_s)
    share = max(1, len(os.sched_getaffinity(0)) // max(1, process.local_num))
    host = Host(start_pool(process.threads or share), listen=listen, **serving_options(process))
    return connect_ranks(host, meet, worker=worker, num_workers=num_workers, **options)


def log_to_stderr() -> None:
    """Print Trireme's log lines, unless the application has configured logging."""
    root = logging.getLogger("trireme")
    if not root.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        root.addHandler(handler)
        root.setLevel(logging.INFO)


def serve_role(process: ProcessRole) -> int:
    """Serve until the job is over. Returns the exit code: 0, or REFUSED if the place or the state
    is wrong, so that a restart would fail again. A launcher gets STOPPED if a signal has ended it
    before: it must not take that for the end of the job.
    """
    try:
        is_over = _serve(process)
    except (BadRequest, Corruption) as error:
        return _refuse(error)
    return 0 if is_over or process.listen_fd is None else STOPPED


def _refuse(error: BadRequest | Corruption) -> int:
    """The exit code of a server whose place or state is wrong, after a line that says why."""
    print(f"trireme server: error: {error}", file=sys.stderr)
    return REFUSED


def _serve(process: ProcessRole) -> bool:
    """Returns whether the job is over."""
    from trireme.job.durability import Durability, parse_records
    from trireme.job.serving import serve
    from trireme.server.attendance import OVER

    assert process.listen is not None
    _use_interface(process)
    torch_compiler.keep_unloaded()
    reason = serve(
        process.listen,
        threads=process.threads or 0,
        durability=Durability(
            mode=process.durability,
            folder=None if process.state_dir is None else Path(process.state_dir),
            log_bytes=process.log_bytes,
            skips=parse_records(process.skip_records or ""),
            index=process.index if process.servers else None,
        ),
        name=f"server {process.index}" if process.servers else "server",
        metrics=process.metrics,
        **serving_options(process),
    )
    return reason == OVER
