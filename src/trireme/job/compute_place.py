"""The part of a compute worker in a job: it makes tables and models, and calls no servers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trireme import rpc
from trireme.errors import BadRequest
from trireme.job.cluster import Cluster
from trireme.threads import start_pool
from trireme.worker.monitoring import WorkerMetrics


@dataclass(frozen=True, kw_only=True)
class ComputePlace:
    """Where a compute worker listens, and the job that it serves.

    label: of its kind, such as "gpu". index: of it among the compute workers of the job.
    listen: "host:port"; port 0 chooses a free one. listen_fd: a socket that listens there already.
    coordinator: address of server 0, which says when the job is over.
    server_keys, client_keys: of CURVE, for workers and for the coordinator. insecure: it may listen
        beyond loopback without. stopped_code: its exit code if SIGTERM ends it before the job.
    """

    label: str
    index: int
    listen: str
    coordinator: str
    listen_fd: int | None = None
    server_keys: rpc.ServerKeys | None = None
    client_keys: rpc.ClientKeys | None = None
    insecure: bool = False
    timeout_s: float = 60.0
    stopped_code: int = 0

    @property
    def name(self) -> str:
        """As workers' messages call it."""
        return f"compute worker {self.index} ({self.label})"


class _NoServers:
    """In the place of a worker's client."""

    def __init__(self, place: ComputePlace, num_workers: int, streams: int) -> None:
        self.worker = num_workers + place.index
        self.num_workers, self.num_streams = num_workers, streams
        self.timeout_s, self._name = place.timeout_s, place.name

    def close(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise BadRequest(
            f"{self._name}: expected a script that makes a Trainer, which serves here until the"
            f" workers have left, found a call to servers before ({name}): only workers call them"
        )


def compute_cluster(
    place: ComputePlace,
    *,
    num_workers: int,
    streams: int = 0,
    threads: int = 0,
    metrics: str | None = None,
    devices: Mapping[str, str] | None = None,
) -> Cluster:
    """The cluster of a compute worker, on which a Trainer serves.

    Its `worker` is beyond those of the workers: no script takes this process for one of them.

    Args:
        threads: for the core's work on a batch; 0: one per CPU.
        metrics: "[host:]port" that answers /metrics and /healthz.
        devices: see Cluster.
    """
    client: Any = _NoServers(place, num_workers, streams)
    own_metrics = WorkerMetrics("heter", metrics, place.name, trains=False)
    return Cluster(client, start_pool(threads), metrics=own_metrics, devices=devices, place=place)
