"""Jobs inside one test process: servers and workers are threads, the sockets between them are
real.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from trireme import _core
from trireme.coordinator.coordinator import Coordinator
from trireme.job.cluster import Cluster
from trireme.job.connecting import connect
from trireme.job.embedded import embedded
from trireme.job.handlers import handlers_of
from trireme.rpc import Server
from trireme.server.attendance import Attendance
from trireme.server.monitoring import RequestMetrics, watch_state, watch_workers
from trireme.server.server_limits import ServerLimits, parse_limits
from trireme.server.state import ServerState
from trireme.server.store_hosts import StoreHosts
from trireme.telemetry.registry import new_registry

T = TypeVar("T")
TIMEOUT_S = 80.0  # a process of the tests may wait for its turn for long


class InProcessServer:
    """The parts of a server process, accessible to the test."""

    def __init__(
        self,
        root: Path = Path("/"),
        listen: str = "127.0.0.1:0",
        limits: ServerLimits | None = None,
        store_hosts: StoreHosts = None,
    ) -> None:
        limits = limits or ServerLimits()
        self.state = ServerState(_core.Pool(2), limits.capacity, store_hosts)
        self.coordinator = Coordinator(held=self.state.held)
        self.attendance = Attendance()
        registry = new_registry("server", "server")
        watch_state(registry, self.state)
        watch_workers(registry, self.attendance)
        handlers = handlers_of(self.state, self.coordinator, self.attendance.handlers(), root)
        self.rpc = Server(
            listen,
            handlers | RequestMetrics(registry).handlers(),
            name="server",
            limits=limits.messages,
        )

    @property
    def endpoint(self) -> str:
        return self.rpc.endpoint


class Job:
    """A running set of servers.

    with Job(2) as job:
        results = job.run(3, train)     # train(cluster) in three worker threads
    """

    def __init__(self, num_servers: int, limits: str = "") -> None:
        kept = parse_limits(limits)
        self.servers = [InProcessServer(limits=kept) for _ in range(num_servers)]
        self._exit = ExitStack()

    @property
    def endpoints(self) -> list[str]:
        return [server.endpoint for server in self.servers]

    def __enter__(self) -> Job:
        for server in self.servers:
            self._exit.enter_context(server.rpc)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._exit.__exit__(kind, value, trace)

    def join(self, worker: int, num_workers: int, timeout_s: float = TIMEOUT_S) -> Cluster:
        return connect(
            self.endpoints, worker=worker, num_workers=num_workers, threads=1, timeout_s=timeout_s
        )

    def run(
        self, num_workers: int, work: Callable[[Cluster], T], timeout_s: float = TIMEOUT_S
    ) -> list[T]:
        """work(cluster) in one thread per worker; results in the order of the workers."""

        def one(worker: int) -> T:
            with self.join(worker, num_workers, timeout_s) as cluster:
                return work(cluster)

        return in_threads([lambda worker=worker: one(worker) for worker in range(num_workers)])


def work_alone(num_servers: int, work: Callable[[Cluster], object]) -> None:
    """work(cluster) as the only worker of a job, or embedded where there are no servers."""
    if num_servers == 0:
        with embedded(threads=2) as cluster:
            work(cluster)
    else:
        with Job(num_servers) as job:
            job.run(1, work)


def in_threads(calls: list[Callable[[], T]]) -> list[T]:
    """Run the calls at the same time; the first error is raised here."""
    results: queue.Queue[tuple[int, T | BaseException]] = queue.Queue()

    def run(index: int, call: Callable[[], T]) -> None:
        try:
            results.put((index, call()))
        except BaseException as error:  # noqa: BLE001 raised below
            results.put((index, error))

    threads = [
        threading.Thread(target=run, args=(index, call), daemon=True)
        for index, call in enumerate(calls)
    ]
    for thread in threads:
        thread.start()
    values: dict[int, T] = {}
    for _ in threads:
        index, value = results.get(timeout=100)
        if isinstance(value, BaseException):
            raise value
        values[index] = value
    for thread in threads:
        thread.join(timeout=10)
    return [values[index] for index in range(len(calls))]
