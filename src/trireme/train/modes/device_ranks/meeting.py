"""Where the workers of a pass find each other."""

from __future__ import annotations

from typing import Any

import torch

from trireme import rpc
from trireme.job.cluster import Cluster
from trireme.train.modes.device_ranks.exchange import Exchange
from trireme.train.modes.worker_group import FindWorkers, WorkerGroup
from trireme.worker import passes

MODE = "pass on devices"


def meet(cluster: Cluster, device: torch.device, num_steps: int) -> tuple[Exchange, int]:
    """Wait for all workers, and connect to them; returns also the most steps that one of them has
    made. num_steps: made by this worker. Raises as `WorkerGroup` and `passes.meet_in_pass`.
    """
    steps = [num_steps]

    def at_coordinator(place: list[Any]) -> list[Any]:
        bodies = passes.meet_in_pass(cluster.client, {"place": place, "num_steps": num_steps})
        steps.extend(int(body["num_steps"]) for body in bodies)
        address: list[Any] = bodies[0]["place"]
        return address

    silent, lost = ways_to_find(cluster)
    group = WorkerGroup(
        cluster, device, MODE, find_silent=silent, find_lost=lost, meet=at_coordinator
    )
    return Exchange(group, cluster.worker, cluster.num_workers), max(steps)


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
