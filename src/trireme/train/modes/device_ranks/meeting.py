"""Where the workers of a pass find each other."""

from __future__ import annotations

from typing import Any

import torch

from trireme.job.cluster import Cluster
from trireme.train.modes.device_ranks.exchange import Exchange
from trireme.train.modes.lost_workers import ways_to_find
from trireme.train.modes.worker_group import WorkerGroup
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
