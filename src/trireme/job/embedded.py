"""A job of one process: worker, tables and coordinator together."""

from collections.abc import Mapping

from trireme.job.cluster import Cluster
from trireme.job.host import Host
from trireme.server.monitoring import watch_state
from trireme.server.row_tier import RowTier
from trireme.threads import start_pool
from trireme.worker.client import WorkerClient
from trireme.worker.monitoring import WorkerMetrics
from trireme.worker.transport import LOCAL, LocalTransport


def embedded(
    *,
    streams: int = 0,
    threads: int = 0,
    timeout_s: float = 60.0,
    metrics: str | None = None,
    tier: RowTier | None = None,
    devices: Mapping[str, str] | None = None,
) -> Cluster:
    """Make a cluster whose servers are in this process.

    Args:
        streams: number of streams that it trains on one after the other in each pass; 0: one.
        metrics: "[host:]port" that answers /metrics and /healthz.
        tier: where the rows of tables lie; default in memory.
        devices: see Cluster.
    """
    own_metrics = WorkerMetrics("embedded", metrics)
    pool = start_pool(threads)
    host = Host(pool, tier=tier)
    watch_state(own_metrics.registry, host.state)
    transport = LocalTransport(host.handlers, own_metrics.calls.observe)
    client = WorkerClient(
        [LOCAL],
        lambda _: transport,
        worker=0,
        num_workers=1,
        streams=streams,
        pool=pool,
        timeout_s=timeout_s,
    )
    return Cluster(client, pool, metrics=own_metrics, host=host, devices=devices)
