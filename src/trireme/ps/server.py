"""A server process: its shard, the coordinator (used on server 0 only), and the end of the job.

A server needs nothing but an address to listen on: the first worker brings the list of servers, the
number of workers and the schemas. It ends by itself when all workers have said goodbye, or with an
error when those that have not are silent for too long.
"""

from __future__ import annotations

import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from trireme.errors import BadRequest, Unavailable
from trireme.ps.coordinator import WORKERS_MAX, Coordinator
from trireme.ps.handlers import handlers_of
from trireme.ps.metrics import RequestMetrics, watch_shard, watch_workers
from trireme.ps.process import settled, start_pool, torch_threads
from trireme.ps.shard import Handler, Shard
from trireme.ps.wire import need
from trireme.rpc import Limits, Reply, Request, Server, ServerKeys
from trireme.telemetry.endpoint import Endpoint
from trireme.telemetry.health import Health
from trireme.telemetry.registry import new_registry

log = logging.getLogger("trireme.ps")

REPORTED = ("retries", "planned", "pulled", "pushes")


class Attendance:
    """Which workers are attached, when each was last heard, and whether the job is over. Threads:
    any.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._num_workers: int | None = None
        self._last_heard: dict[int, float] = {}
        self._gone: dict[int, int] = {}  # worker -> its incarnation that said goodbye
        self._reports: dict[int, dict[str, int]] = {}
        self._stopped: str | None = None

    def handlers(self) -> dict[str, Handler]:
        return {
            "server.ready": lambda _: Reply(),
            "server.alive": self._on_alive,
            "server.goodbye": self._on_goodbye,
            "server.attendance": self._on_attendance,
        }

    def _on_alive(self, request: Request) -> Reply:
        with self._changed:
            worker, incarnation = self._hear(request)
            self._reports[worker] = _report(request)
            if incarnation > self._gone.get(worker, 0):  # a successor; else late by the network
                self._gone.pop(worker, None)
        return Reply()

    def _on_goodbye(self, request: Request) -> Reply:
        with self._changed:
            worker, incarnation = self._hear(request)
            self._gone[worker] = max(incarnation, self._gone.get(worker, 0))
            self._changed.notify_all()
        return Reply()

    def _hear(self, request: Request) -> tuple[int, int]:
        worker = need(request.body, "worker", int)
        num_workers = need(request.body, "num_workers", int)
        incarnation = need(request.body, "incarnation", int)
        if not 0 <= worker < num_workers <= WORKERS_MAX:
            raise BadRequest(
                f"server: expected 0 <= worker < num_workers <= {WORKERS_MAX},"
                f" found {worker} and {num_workers}"
            )
        self._num_workers = num_workers
        self._last_heard[worker] = self._clock()
        return worker, incarnation

    def _on_attendance(self, request: Request) -> Reply:
        within_s = need(request.body, "within_s", float)
        with self._changed:
            since = self._clock() - within_s
            silent = [
                worker
                for worker in range(self._num_workers or 0)
                if worker in self._gone or self._last_heard.get(worker, -math.inf) < since
            ]
        return Reply({"silent": silent})

    def silences_s(self) -> dict[int, float]:
        """Seconds since each worker was heard, of those that have not said goodbye."""
        with self._changed:
            now = self._clock()
            return {
                worker: now - heard
                for worker, heard in sorted(self._last_heard.items())
                if worker not in self._gone
            }

    def reports(self) -> dict[int, dict[str, int]]:
        """What each worker that has not said goodbye said of itself last."""
        with self._changed:
            known = sorted(self._reports.items())
            return {worker: dict(said) for worker, said in known if worker not in self._gone}

    def stop(self, reason: str) -> None:
        """End the wait from another thread or a signal handler."""
        with self._changed:
            self._stopped = reason
            self._changed.notify_all()

    def wait(self, silence_s: float) -> str:
        """Wait for the end of the job; returns why it is over.

        Raises:
            Unavailable: workers have not said goodbye, and none has been heard for `silence_s`.
        """
        with self._changed:
            while True:
                if self._stopped is not None:
                    return self._stopped
                if self._num_workers is not None:
                    missing = sorted(set(range(self._num_workers)) - self._gone.keys())
                    if not missing:
                        return "all workers have said goodbye"
                    if self._clock() - max(self._last_heard.values()) > silence_s:
                        raise Unavailable(
                            f"server: workers {missing} have been silent for {silence_s:.0f} s"
                            " without saying goodbye"
                        )
                self._changed.wait(timeout=1.0)


def _report(request: Request) -> dict[str, int]:
    """What a worker says of itself: numbers by names of this list."""
    said = need({"report": {}, **request.body}, "report", dict)
    if not said.keys() <= set(REPORTED):
        raise BadRequest(f"server.alive: expected reports of {REPORTED}, found {list(said)}"[:500])
    return {what: need(said, what, int) for what in said}


@contextmanager
def _stop_on_signals(attendance: Attendance) -> Iterator[None]:
    """SIGTERM and SIGINT end the wait; only the main thread can install handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    stop = {
        number: signal.signal(
            number,
            lambda received, _: attendance.stop(f"stopped by {signal.Signals(received).name}"),
        )
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, previous in stop.items():
            signal.signal(number, previous)


def serve(
    listen: str,
    *,
    listen_fd: int | None = None,
    threads: int = 0,
    keys: ServerKeys | None = None,
    insecure: bool = False,
    timeout_s: float = 60.0,
    root: Path | None = None,
    limits: Limits | None = None,
    name: str = "server",
    metrics: str | None = None,
    on_ready: Callable[[str], None] | None = None,
) -> str:
    """Serve tables and blocks until the job is over; returns why it ended.

    Args:
        listen: "host:port"; port 0 chooses a free one.
        listen_fd: a socket that listens there already, handed over by whoever chose the port.
        threads: that work on one request; 0: as many as there are cores.
        keys: encrypt, and admit these clients only.
        insecure: allow an address beyond loopback without keys.
        timeout_s: silence of all remaining workers after which the job counts as lost.
        root: folder below which checkpoints are written and read; default the working directory.
        name: what workers' messages call it, beside its address.
        metrics: "[host:]port" to answer /metrics and /healthz at; port 0 chooses a free one.
        on_ready: called with the real "host:port" once it listens.

    Raises:
        BadRequest: an address that may not be used, or a root that is no folder. Unavailable: the
            workers vanished.
    """
    root = Path.cwd() if root is None else root
    if not root.is_dir():
        raise BadRequest(f"serve: expected root to be a folder, found {str(root)!r}")
    registry, health = new_registry("server", name), Health()
    with ExitStack() as stack:
        if metrics is not None:  # before the server: it says so while that is not open yet
            stack.enter_context(Endpoint(metrics, registry, health))
        shard, attendance = Shard(start_pool(threads)), Attendance()
        requests = RequestMetrics(registry)
        watch_shard(registry, shard)
        watch_workers(registry, attendance)
        handlers = handlers_of(shard, Coordinator(), attendance.handlers(), root.resolve())
        server = Server(
            listen,
            handlers | requests.handlers(),
            name=name,
            limits=limits or Limits(),
            keys=keys,
            insecure=insecure,
            listen_fd=listen_fd,
            observe=requests.observe,
        )
        # One thread steps the blocks: they are too small to be worth waking others for.
        for part in (settled(), torch_threads(1), server, _stop_on_signals(attendance)):
            stack.enter_context(part)
        requests.watch(server)
        health.opened()
        log.info("listening on %s", server.endpoint)
        if on_ready is not None:
            on_ready(server.endpoint)
        reason = attendance.wait(max(2 * timeout_s, 10.0))
        health.hinder("end", f"the job is over: {reason}")
    log.info("server %s ends: %s", server.endpoint, reason)
    return reason
