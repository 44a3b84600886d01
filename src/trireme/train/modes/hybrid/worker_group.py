"""The workers of a job as a process group of torch.distributed, without its global state."""

import datetime
import socket
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trireme import accelerator
from trireme.data.global_shuffle import own_host
from trireme.errors import BadRequest, DeadlineExceeded, Unavailable
from trireme.job.cluster import Cluster


class WorkerGroup:
    """Sums over all workers: by gloo for tensors of the CPU, by NCCL for those of a GPU. Every
    worker makes one; they find each other through a meeting. Tensors are not encrypted, and workers
    do not check each other's keys.

    Raises BadRequest: this worker would listen beyond loopback, and the cluster is not `insecure`;
    or neither backend takes tensors of the device. DeadlineExceeded, Unavailable: the workers did
    not find each other.
    """

    def __init__(self, cluster: Cluster, device: torch.device) -> None:
        self._cluster = cluster
        self._timeout = datetime.timedelta(seconds=cluster.client.timeout_s)
        host = own_host(cluster.client.servers.map.servers[0]).strip("[]")
        _check(host, device, cluster)
        self._backend: Any = self._join(host, device)

    def _join(self, host: str, device: torch.device) -> Any:
        rank, size = self._cluster.worker, self._cluster.num_workers
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family) if rank == 0 else None
        place = [host, listener.getsockname()[1]] if listener is not None else []
        bodies = self._cluster.client.coordinator.gather(
            {"place": place}, [], purpose="all-reduce", patient=True
        )
        master, port = bodies[0][0]["place"]
        try:
            store = dist.TCPStore(  # type: ignore[attr-defined]
                str(master),
                int(port),
                size,
                is_master=rank == 0,
                timeout=self._timeout,
                wait_for_workers=False,
                master_listen_fd=None if listener is None else listener.detach(),
            )
            return _backend(store, rank, size, host, device, self._timeout)
        except RuntimeError as error:
            raise self._error("the workers' process group", error) from error

    def sum(self, values: Tensor) -> None:
        """Replace the values by the sum over all workers, with the same bits everywhere. Every
        worker calls it with the same shape. Raises DeadlineExceeded: a worker is missing.
        Unavailable: one has gone.
        """
        try:
            self._backend.allreduce([values], dist.AllreduceOptions()).wait()
        except RuntimeError as error:
            raise self._error("all-reduce", error) from error
        accelerator.await_device(values.device)

    def _error(self, what: str, error: RuntimeError) -> DeadlineExceeded | Unavailable:
        silent = self._cluster.client.coordinator.silent_workers()
        subject = f"hybrid: {what} of {self._cluster.num_workers} workers"
        state = f"silent: workers {silent}" if silent else "no worker is silent"
        if "imed out" in str(error) or "imeout" in str(error):
            seconds = self._timeout.total_seconds()
            return DeadlineExceeded(
                f"{subject}: not complete within {seconds:g} s; {state}: {error}"
            )
        return Unavailable(f"{subject}: a worker has gone; {state}: {error}")


def _check(host: str, device: torch.device, cluster: Cluster) -> None:
    accelerator.reduces_by_nccl(device)
    is_loopback = host.startswith("127.") or host == "::1"
    if not is_loopback and not cluster.insecure:
        raise BadRequest(
            f"hybrid: expected insecure=True to all-reduce over {host}, because torch.distributed"
            " neither encrypts nor asks for keys; use it in a network of your own, or another mode"
        )


def _backend(
    store: Any, rank: int, size: int, host: str, device: torch.device, timeout: datetime.timedelta
) -> Any:
    if accelerator.reduces_by_nccl(device):
        if not dist.is_nccl_available():
            raise BadRequest(f"hybrid: expected a torch with NCCL for parameters on {device}")
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)
    gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    gloo._timeout, gloo._threads = timeout, 1
    return dist.ProcessGroupGloo(store, rank, size, gloo)
