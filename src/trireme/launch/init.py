"""`trireme.init()`: become what the environment says, a worker, a server, or everything in one
process.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from trireme import torch_compiler
from trireme.errors import BadRequest, Corruption
from trireme.job import connecting
from trireme.job.cluster import Cluster
from trireme.job.default import set_default
from trireme.launch.key_folder import client_keys, server_keys
from trireme.launch.roles import REFUSED, Role, read_role

log = logging.getLogger("trireme")


def init(
    *,
    servers: str | Sequence[str] | None = None,
    role: str | None = None,
    index: int | None = None,
    num: int | None = None,
    streams: int | None = None,
    join: bool | None = None,
    keys: str | None = None,
    timeout_s: float | None = None,
    metrics: str | int | None = None,
) -> Cluster:
    """Start or join the job, and make its cluster the default. In a server process: serve, then
    exit with 0; with 2 if its place or its state is wrong.

    Without arguments the environment says what this process is (docs: `trireme launch`, Fleet's
    variables, torchrun); if it says nothing, the tables are embedded in this process, and one line
    says so.

    Args:
        servers: "host:port,host:port" or a sequence; the first hosts the coordinator.
        role: "worker", "server" or "embedded".
        index: of this process among those of its role.
        num: number of workers.
        streams: cut the data of each pass into so many streams, which the workers share out among
            themselves, in mode async: others may join later, and go on with the streams of one that
            has died. Default: each worker has a stream of its own.
        join: be a worker that joins such a job while it runs. It says the rest: no index and number
            are needed.
        keys: folder with key files, to encrypt and authenticate: a worker needs client.key
            and server.pub, a server server.key and clients.pub (the admitted public keys).
        timeout_s: deadline of every call, the wait for other processes included.
        metrics: [HOST:]PORT where this process answers /metrics and /healthz; port 0: any free one,
            which a line says. Default nowhere.

    Raises:
        BadRequest: half-set or contradicting variables.
        DeadlineExceeded: servers that do not come up. NotAdmitted: servers that do not list this
            worker's key.
    """
    log_to_stderr()
    place = read_role(
        role=role,
        servers=servers,
        index=index,
        num=num,
        streams=streams,
        join=join,
        keys=keys,
        timeout_s=timeout_s,
        metrics=metrics,
    )
    log.info("%s", place.describe())
    if place.role == "server":
        sys.exit(serve_role(place))
    made = connect(place)
    set_default(made)
    return made


def connect(place: Role) -> Cluster:
    """Join the job as the worker that `place` says, or embed everything."""
    torch_compiler.keep_unloaded()
    if place.role == "embedded":
        from trireme.job.embedded import embedded

        return embedded(
            streams=place.streams,
            threads=place.threads or 0,
            timeout_s=place.timeout_s,
            metrics=place.metrics,
        )
    return connecting.connect(
        place.servers,
        worker=place.index,
        num_workers=place.num_workers,
        streams=place.streams,
        late=place.is_late,
        threads=place.threads or 0,
        timeout_s=place.timeout_s,
        keys=None if place.keys is None else client_keys(Path(place.keys)),
        insecure=place.insecure,
        metrics=place.metrics,
    )


def log_to_stderr() -> None:
    """Show Trireme's own messages, unless the application has set logging up."""
    root = logging.getLogger("trireme")
    if not root.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        root.addHandler(handler)
        root.setLevel(logging.INFO)


def serve_role(place: Role) -> int:
    """Serve as the role says, until the job is over; returns the exit code: 0, or REFUSED where the
    place or the state is wrong, so that it would be refused again.
    """
    try:
        _serve(place)
    except (BadRequest, Corruption) as error:
        print(f"trireme server: error: {error}", file=sys.stderr)
        return REFUSED
    return 0


def _serve(place: Role) -> None:
    from trireme.job.durability import Durability
    from trireme.job.serving import serve
    from trireme.protocol.server_limits import parse_limits  # a worker never needs these

    assert place.listen is not None
    torch_compiler.keep_unloaded()
    serve(
        place.listen,
        listen_fd=place.listen_fd,
        threads=place.threads or 0,
        keys=None if place.keys is None else server_keys(Path(place.keys)),
        insecure=place.insecure,
        root=None if place.root is None else Path(place.root),
        durability=Durability(
            mode=place.durability,
            folder=None if place.state_dir is None else Path(place.state_dir),
            log_bytes=place.log_bytes,
        ),
        timeout_s=place.timeout_s,
        name=f"server {place.index}" if place.servers else "server",
        metrics=place.metrics,
        limits=parse_limits(place.limits or ""),
    )
