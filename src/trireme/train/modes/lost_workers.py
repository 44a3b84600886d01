"""How a worker finds out which others are silent or have gone."""

from __future__ import annotations

from trireme import rpc
from trireme.job.cluster import Cluster
from trireme.train.modes.worker_group import FindWorkers


def ways_to_find(cluster: Cluster) -> tuple[FindWorkers | None, FindWorkers | None]:
    """How to find the silent and the lost workers, where they host the servers; else None: the
    coordinator knows.
    """
    host = cluster.host
    if host is None:
        return None, None

    def find_lost() -> list[int]:
        with rpc.RpcClient(name=f"worker {cluster.worker} (probe)", keys=cluster.keys) as client:
            return host.losses.find(cluster.client.servers.endpoints, client)

    return host.silent_workers, find_lost
