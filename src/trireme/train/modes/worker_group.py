"""The workers of a job as a process group of torch.distributed, without its global state."""

from __future__ import annotations

import datetime
import logging
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from trireme import accelerator, rpc
from trireme.errors import BadRequest, DeadlineExceeded, TriremeError, Unavailable
from trireme.job.cluster import Cluster
from trireme.worker.coordinator_calls import PATIENCE
from trireme.worker.dense_parameters import DenseParameters

log = logging.getLogger("trireme.train")

CHECK_S = 3.0
"""After which a worker in an exchange asks whether others wait for it at a meeting."""
FindWorkers: TypeAlias = Callable[[], Sequence[int]]
Meet: TypeAlias = Callable[[list[Any]], list[Any]]
_STUCK: list[Any] = []
"""Backends that would wait for a missing worker if they were dropped: the process keeps them. The
collector of garbage may run in any thread, so they are kept from the first moment on."""


class WorkerGroup:
    """Sums over all workers and exchanges between them: by gloo for tensors of the CPU, by NCCL for
    those of a GPU. Every worker makes one; they find each other through a meeting. Tensors are not
    encrypted, and workers do not check each other's keys.

    device: of the tensors that travel. mode: begins the messages of errors. find_silent: finds the
    workers that do not live; default by the coordinator. find_lost: finds those that have gone when
    a connection was lost; default the silent ones. meet: takes the address of this worker's store,
    empty but at worker 0, and returns that of worker 0; default by a meeting.

    Raises BadRequest: this worker would listen beyond loopback, and the cluster is not `insecure`;
    or neither backend takes tensors of the device. DeadlineExceeded, Unavailable: the workers did
    not find each other.
    """

    def __init__(
        self,
        cluster: Cluster,
        device: torch.device,
        mode: str,
        *,
        find_silent: FindWorkers | None = None,
        find_lost: FindWorkers | None = None,
        meet: Meet | None = None,
    ) -> None:
        self._cluster, self.device, self._mode = cluster, device, mode
        self._meet = meet or self._meet_at_coordinator
        self.is_broken = False  # another worker was missing or has gone
        self._find_silent = find_silent or self._ask_coordinator
        self._find_lost = find_lost or self._find_silent
        self._timeout = datetime.timedelta(seconds=cluster.client.timeout_s)
        self._exchanges, self._num_exchanges = cluster.client.coordinator.exchanges, 0
        host = cluster.address.strip("[]")
        _check(host, device, cluster, mode)
        self._backend: Any = self._join(host)

    def _join(self, host: str) -> Any:
        rank, size = self._cluster.worker, self._cluster.num_workers
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family) if rank == 0 else None
        place = [host, listener.getsockname()[1]] if listener is not None else []
        master, port = self._meet(place)
        self._name = f"{master}:{port}"  # the same at all workers, also at one that was restarted
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
            # A worker may have died since the meeting; the backend would wait for it very long.
            store.set(f"here {rank}", "")
            store.wait([f"here {other}" for other in range(size)], self._timeout)
            return _backend(store, rank, size, host, self.device, PATIENCE * self._timeout)
        except RuntimeError as error:
            raise self._error("the workers' process group", error) from error

    def _meet_at_coordinator(self, place: list[Any]) -> list[Any]:
        bodies = self._cluster.client.coordinator.gather(
            {"place": place}, [], purpose="all-reduce", patient=True
        )
        address: list[Any] = bodies[0][0]["place"]
        return address

    def note_thread(self, *, is_scripts: bool) -> None:
        """Whether the thread that runs the script makes the exchanges, and so makes none while it
        waits at a meeting. At first nothing is known.
        """
        if is_scripts:
            self._exchanges[self._name] = self._num_exchanges
        else:
            self._exchanges.pop(self._name, None)

    def close(self) -> None:
        """Drop the connections, so that the others do not wait for this worker."""
        backend, self._backend = self._backend, None
        self._exchanges.pop(self._name, None)
        if backend is not None and accelerator.reduces_by_nccl(self.device):
            backend.abort()

    def sum(self, values: Tensor) -> None:
        """Replace the values by the sum over all workers, with the same bits everywhere. Every
        worker calls it with the same shape. Raises DeadlineExceeded: a worker is missing.
        Unavailable: one has gone.
        """
        self._run("all-reduce", "allreduce", [values], dist.AllreduceOptions())

    def all_to_all(
        self, send: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]
    ) -> Tensor:
        """Send each worker its part of `send`, in their order; returns what they sent. Every worker
        calls it, with sizes that agree; parts may be empty.

        Args:
            send: (sum of send_sizes,), on any device.
            receive_sizes: elements that come from each worker.

        Returns:
            (sum of receive_sizes,) of the same dtype, on the device of the group.

        Raises as `sum`.
        """
        send = send.to(self.device)
        received = torch.empty(sum(receive_sizes), dtype=send.dtype, device=self.device)
        sizes = list(receive_sizes), list(send_sizes)
        self._run("all-to-all", "alltoall_base", received, send, *sizes)
        return received

    def _run(self, what: str, name: str, *arguments: Any) -> None:
        """Wait for a collective while the others live: one may compute or save for long. name: of
        the backend's method. Raises Unavailable: the group is closed.
        """
        if self._backend is None:
            raise Unavailable(f"{self._mode}: {what}: this worker has left the others")
        work = getattr(self._backend, name)(*arguments)
        start, timeout_s, num_looks = time.monotonic(), self._timeout.total_seconds(), 0
        part_s = timeout_s  # NCCL ends an exchange for which a wait is too short
        if not accelerator.reduces_by_nccl(self.device):
            part_s = min(CHECK_S, timeout_s)
        while True:
            try:
                work.wait(datetime.timedelta(seconds=part_s))
                break
            except RuntimeError as error:
                seconds, is_over = time.monotonic() - start, work.is_completed()
                if not is_over and seconds >= (num_looks + 1) * timeout_s:
                    num_looks += 1
                    is_over = num_looks == PATIENCE or bool(self._find_silent())
                if is_over:
                    if not work.is_completed():
                        _STUCK.append(self._backend)
                    raise self._error(what, error) from error
                self._check_meetings(part_s)
        self._num_exchanges += 1
        if self._name in self._exchanges:
            self._exchanges[self._name] = self._num_exchanges
        accelerator.await_device(self.device)

    def _check_meetings(self, timeout_s: float) -> None:
        """Raises BadRequest: others wait for this worker at a meeting, and do not come."""
        if self._name not in self._exchanges:
            return
        try:
            self._cluster.client.coordinator.check_exchange(self._name, timeout_s=timeout_s)
        except BadRequest:
            self.is_broken = True
            _STUCK.append(self._backend)
            raise
        except TriremeError as error:  # who is silent is found later
            log.debug("an exchange waits, and the coordinator does not answer: %s", error)

    def _ask_coordinator(self) -> list[int]:
        """Workers that are silent; all, if the coordinator cannot be asked."""
        try:
            return self._cluster.client.coordinator.silent_workers()
        except TriremeError:
            return list(range(self._cluster.num_workers))

    def _error(self, what: str, error: RuntimeError) -> DeadlineExceeded | Unavailable:
        self.is_broken = True
        subject = f"{self._mode}: {what} of {self._cluster.num_workers} workers"
        if "imed out" in str(error) or "imeout" in str(error):
            silent = self._find_silent()
            state = f"silent: workers {silent}" if silent else "no worker is silent"
            seconds = self._timeout.total_seconds()
            return DeadlineExceeded(
                f"{subject}: not complete within {seconds:g} s; {state}: {error}"
            )
        lost = sorted(self._find_lost())
        state = f"workers {lost} have gone" if lost else "a worker has gone, none is silent"
        return Unavailable(f"{subject}: {state}: {error}")


def device_of(dense: DenseParameters, what: str) -> torch.device:
    """Where all parameters are; the CPU where there are none. Raises BadRequest, which begins with
    `what`: they are on several devices.
    """
    devices = {p.device for p in dense.parameters.values()} or {torch.device("cpu")}
    if len(devices) > 1:
        raise BadRequest(f"{what} on one device, found {devices}")
    return devices.pop()


def _check(host: str, device: torch.device, cluster: Cluster, mode: str) -> None:
    accelerator.reduces_by_nccl(device)
    is_loopback = host.startswith("127.") or host == "::1"
    if not is_loopback and not cluster.insecure:
        raise BadRequest(
            f"{mode}: expected insecure=True to all-reduce over {host}, because torch.distributed"
            " neither encrypts nor asks for keys; use it in a network of your own, or another mode"
        )


def _backend(
    store: Any, rank: int, size: int, host: str, device: torch.device, timeout: datetime.timedelta
) -> Any:
    if accelerator.reduces_by_nccl(device):
        if not dist.is_nccl_available():
            raise BadRequest(f"expected a torch with NCCL for parameters on {device}, found none")
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)
    gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    gloo._timeout, gloo._threads = timeout, 1
    return dist.ProcessGroupGloo(store, rank, size, gloo)


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
