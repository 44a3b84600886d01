"""Joining a job as one of its workers."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from trireme import rpc
from trireme.errors import DeadlineExceeded, TriremeError
from trireme.job.cluster import Cluster
from trireme.job.heartbeat import SILENCES
from trireme.rpc.notices import FIRST_S, Notices
from trireme.telemetry.health import STARTING
from trireme.threads import start_pool
from trireme.worker.client import WorkerClient
from trireme.worker.monitoring import WorkerMetrics

if TYPE_CHECKING:
    from trireme.job.host import Host

log = logging.getLogger("trireme")

_MEETINGS = ("coord.gather", "coord.meet_in_pass")  # answered when all workers have called
_DESCRIPTORS = 5 * 5  # five connections to a server: a socket, a queue, three of a monitor


def connect(
    servers: Sequence[str],
    *,
    worker: int = 0,
    num_workers: int = 0,
    streams: int = 0,
    late: bool = False,
    threads: int = 0,
    timeout_s: float = 60.0,
    keys: rpc.ClientKeys | None = None,
    insecure: bool = False,
    metrics: str | None = None,
    devices: Mapping[str, str] | None = None,
    interface: str | None = None,
    ends_at_sigterm: bool = False,
    heter: Sequence[tuple[str, str]] = (),
    host: Host | None = None,
) -> Cluster:
    """Join a job as one of its workers; waits for servers that are not up yet.

    Args:
        worker, num_workers: its index, of how many; not given for a late worker.
        streams: number of streams that the workers share; 0: each worker has its own.
        late: join a running job whose workers share streams, from its next streams on.
        insecure: this worker, too, may listen beyond loopback without keys (global_shuffle).
        metrics: "[host:]port" that answers /metrics and /healthz.
        devices, interface, ends_at_sigterm: see Cluster.
        heter: compute workers of the job, by label and address; a late worker is told them.
        host: the server among them that this process hosts.

    Raises:
        DeadlineExceeded: some servers did not come up within `timeout_s`; the message lists them.
        NotAdmitted: a server does not list this worker's key. BadRequest: the system allows too few
            open files for so many servers. ResourceExhausted: the system refuses a thread.
    """
    name = "late worker" if late else f"worker {worker}"
    rpc.allow_descriptors(_DESCRIPTORS * len(servers), f"{name} with {len(servers)} servers")
    own_metrics = WorkerMetrics("worker", metrics, name)
    states: dict[str, str] = {}
    base = rpc.RpcClient(
        name=name,
        keys=keys,
        on_wait=_log_wait,
        watch=own_metrics.waits,
        observe=own_metrics.calls.observe,
        states=states,
        unreached_s=timeout_s,
    )
    client: WorkerClient | None = None
    try:
        own_metrics.health.hinder(STARTING, f"waiting for servers {', '.join(servers)}")
        wait_for_servers(servers, base, timeout_s)
        pool = start_pool(threads) if host is None else host.state.pool
        client = WorkerClient(
            servers,
            lambda purpose: base.clone(f"{name} ({purpose})"),
            worker=worker,
            num_workers=num_workers,
            streams=streams,
            late=late,
            heter=heter,
            silence_s=timeout_s / SILENCES,
            pool=pool,
            timeout_s=timeout_s,
            states=states,
        )
        return Cluster(
            client,
            pool,
            host=host,
            heartbeat=base,
            keys=keys,
            insecure=insecure,
            metrics=own_metrics,
            devices=devices,
            interface=interface,
            ends_at_sigterm=ends_at_sigterm,
            heter=client.heter,
            connect_compute=lambda: base.clone(f"{name} (compute)"),
        )
    except BaseException:
        if client is not None:
            client.close()
        base.close()
        own_metrics.close()
        raise


def _log_wait(waiting: rpc.Waiting) -> None:
    """Log which server does not answer; it may wait for other workers."""
    others = "; it answers when all workers have come" if waiting.method in _MEETINGS else ""
    log.warning("%s%s", waiting, others)


def wait_for_servers(servers: Sequence[str], client: rpc.RpcClient, timeout_s: float) -> None:
    """Return as soon as every server answers; log ever more seldom which are missing."""
    start = time.monotonic()
    deadline, notices = start + timeout_s, Notices(start)
    missing, reasons = list(servers), list[str]()
    while (left_s := deadline - time.monotonic()) > 0:
        replies = client.call_all(
            [rpc.Call(server, "server.ready") for server in missing],
            timeout_s=min(FIRST_S, left_s),
            return_errors=True,
        )
        answers = zip(missing, replies, strict=True)
        errors = {server: error for server, error in answers if isinstance(error, TriremeError)}
        for error in errors.values():
            if not error.retry:
                raise error
        missing, reasons = list(errors), [str(error) for error in errors.values()]
        if not missing:
            return
        now = time.monotonic()
        if now < deadline and notices.take_due(now):
            log.warning("server not ready, still waiting; not ready endpoints: %s", missing)
    raise DeadlineExceeded(
        f"init: after {timeout_s:g} s not ready endpoints: {missing}: {'; '.join(reasons)}"
    )
