"""The cluster object: everything that one process holds of a running job."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from trireme import _core, accelerator, rpc
from trireme.errors import Stopped, TriremeError
from trireme.job.heartbeat import Heartbeat, StopRequest
from trireme.worker.client import WorkerClient
from trireme.worker.monitoring import WorkerMetrics
from trireme.worker.transport import Transport

if TYPE_CHECKING:
    from trireme.job.compute_place import ComputePlace
    from trireme.job.host import Host
    from trireme.server.state import ServerState

log = logging.getLogger("trireme")

_open: weakref.WeakSet[Cluster] = weakref.WeakSet()  # those that the end of the process closes


class Cluster:
    """One process' part in a job.

    keys, insecure: how workers talk to each other: with these keys, or beyond loopback without.
    host: the server that this process hosts; its state is `server`.
    devices: label -> the device that stands in for it, such as {"gpu": "cpu"}.
    interface: the network device at whose address the other workers reach this one.
    ends_at_sigterm: SIGTERM ends this process alone, for others start it again with all workers.
    heter: (label, address) of each compute worker of the job.
    connect_compute: makes a client of one thread for calls to them.
    place: of this process, if it is a compute worker.
    """

    def __init__(
        self,
        client: WorkerClient,
        pool: _core.Pool,
        *,
        metrics: WorkerMetrics,
        host: Host | None = None,
        heartbeat: Transport | None = None,
        keys: rpc.ClientKeys | None = None,
        insecure: bool = False,
        devices: Mapping[str, str] | None = None,
        interface: str | None = None,
        ends_at_sigterm: bool = False,
        heter: Sequence[tuple[str, str]] = (),
        connect_compute: Callable[[], rpc.RpcClient] | None = None,
        place: ComputePlace | None = None,
    ) -> None:
        self.client, self.pool, self.host = client, pool, host
        self.heter, self.place = tuple(heter), place
        self._connect_compute = connect_compute
        self.metrics, self.keys, self.insecure = metrics, keys, insecure
        self._devices, self._interface = devices or {}, interface
        self.ends_at_sigterm = ends_at_sigterm
        self.worker = client.worker  # index among the workers that the job began with
        self.num_workers = client.num_workers
        self.num_streams = client.num_streams  # that workers share; 0: each has its own
        self._closing: list[Callable[[], None]] = []
        self._running: list[Callable[[], None]] = []
        self.is_closed = False
        self.stop_request = StopRequest()
        self._heartbeat: Heartbeat | None = None
        if heartbeat is not None:
            self._heartbeat = Heartbeat(client, heartbeat, metrics, self.stop_request)
        self.metrics.health.opened()
        _open.add(self)

    def __repr__(self) -> str:
        state = ", closed" if self.is_closed else ""
        if self.is_embedded:
            return f"Cluster(embedded{state})"
        servers = ", ".join(self.client.servers.endpoints)
        return f"Cluster(worker {self.worker} of {self.num_workers}, servers {servers}{state})"

    @property
    def server(self) -> ServerState | None:
        """The state of the server that this process hosts."""
        return None if self.host is None else self.host.state

    @property
    def is_embedded(self) -> bool:
        """Whether worker, tables and coordinator are in this process, and none is elsewhere."""
        return self.host is not None and not self.host.endpoint

    @property
    def is_only_worker(self) -> bool:
        """Whether the job has no other worker, and none can join it."""
        return self.client.is_only_worker

    @property
    def streams_per_pass(self) -> int:
        """The number of streams that the data of a pass is cut into."""
        return self.num_streams or self.num_workers

    def device(self, label: str) -> torch.device:
        """The device of this process that a label stands for: "cpu", or "gpu", which
        TRIREME_DEVICE_GPU may map to another. In a worker whose job has compute workers of the
        label it is the CPU. Raises BadRequest: there is none here.
        """
        if self.place is None and any(label == other for other, _ in self.heter):
            return accelerator.HOST
        return accelerator.device_of_label(label, self._devices)

    def compute_client(self) -> rpc.RpcClient:
        """A client for one thread's calls to compute workers. The caller closes it."""
        assert self._connect_compute is not None, "only a worker of a job with servers has them"
        return self._connect_compute()

    @property
    def address(self) -> str:
        """The host at which the other workers reach this one."""
        return rpc.own_host(self.client.servers.map.servers[0], self._interface)

    def on_close(self, action: Callable[[], None]) -> None:
        """Run `action` when the cluster is closed, the last one first; not if it is abandoned."""
        self._closing.append(action)

    def add_running(self, stop: Callable[[], None]) -> None:
        """Call `stop`, which ends what uses the client, before the client closes for any reason;
        the last one first.
        """
        self._running.append(stop)

    def take_back(self, action: Callable[[], None]) -> None:
        """Do not call what `on_close` or `add_running` got."""
        for actions in (self._closing, self._running):
            if action in actions:
                actions.remove(action)

    def close(self) -> None:
        """Finish what is in flight, say goodbye to the servers, close the connections. A second
        call does nothing. Raises the error of what was in flight: the last pushes may be lost.
        """
        if self.is_closed:
            return
        self.is_closed = True
        try:
            for action in reversed(self._closing):
                action()
        except BaseException:
            self._end()
            raise
        self._end(goodbye=True)

    def abandon(self) -> None:
        """Close without goodbye, as after an error: servers wait for a successor until their
        deadline.
        """
        if not self.is_closed:
            self.is_closed = True
            self._end()

    def _end(self, *, goodbye: bool = False) -> None:
        _open.discard(self)
        for stop in reversed(self._running.copy()):
            stop()
        if self._heartbeat is not None:
            self._heartbeat.stop()
            try:
                if goodbye:
                    self.client.coordinator.say_goodbye(self._heartbeat.body)
            except TriremeError as error:  # all pushes of this worker have been applied
                log.warning("worker %d ends without goodbye: %s", self.worker, error)
        self.client.close()
        if self.host is not None:
            self.host.end(waits=goodbye)
        self.metrics.close()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or issubclass(kind, Stopped):
            self.close()
        else:
            self.abandon()


def is_session() -> bool:
    """Whether this process is an interactive interpreter, such as a kernel of Jupyter."""
    return hasattr(sys, "ps1")


def has_script_failed() -> bool:
    """Whether the interpreter ends because an exception has ended its script."""
    return getattr(sys, "last_value", None) is not None and not is_session()


@atexit.register
def _close_all() -> None:
    """Close the clusters that a script left open, so that the servers end too; abandon them if the
    script failed. An interactive session is not over with its process, and a statement that failed
    has not ended it: its kernel may be restarted, so the servers keep its job. If closing fails the
    process ends with an error: pushes may be lost.
    """
    is_finished = True
    for cluster in list(_open):
        if has_script_failed():
            cluster.abandon()
            continue
        if is_session() and cluster.host is None:
            log.info(
                "the session leaves the job of worker %d at its servers, which wait for it to go on"
                " until their deadline; close() of what tr.init() returned ends the job",
                cluster.worker,
            )
            cluster.abandon()
            continue
        try:
            cluster.close()
        except BaseException:  # noqa: BLE001 the interpreter would print it and exit with 0
            traceback.print_exc()
            is_finished = False
    if not is_finished:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
