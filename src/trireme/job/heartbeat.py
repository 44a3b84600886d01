"""Heartbeats: every worker tells every server that it lives, and learns who else is silent."""

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from trireme.errors import TriremeError, start_thread
from trireme.rpc import Call
from trireme.worker.client import WorkerClient
from trireme.worker.monitoring import WorkerMetrics
from trireme.worker.transport import Transport

log = logging.getLogger("trireme")

PERIOD_S_MAX = 5.0
STOP_S = PERIOD_S_MAX + 2.0
"""Until servers hear that workers stop, if all processes of a job get a signal at once."""
BEATS = 6
"""Heartbeats within a client's timeout, or within a silence where workers share streams."""
SILENCES = 4
"""Silences within a client's timeout: streams change hands before other workers give up."""


@dataclass
class StopRequest:
    """Whether training is to stop after a step, at the request of any worker."""

    reason: str = ""  # empty: there is no request
    code: int = 0  # that this process ends with
    is_alone: bool = False  # only this worker leaves the job, and others continue with its stream


class Heartbeat:
    """A thread that sends heartbeats to all servers and exchanges stop requests through them.
    metrics: have the numbers that each heartbeat carries. body: names this worker to the servers.
    """

    def __init__(
        self,
        client: WorkerClient,
        transport: Transport,
        metrics: WorkerMetrics,
        stop_request: StopRequest,
    ) -> None:
        self._client, self._transport, self._metrics = client, transport, metrics
        self._stop_request = stop_request
        self.body = {
            "worker": client.worker,
            "num_workers": client.num_workers,
            "incarnation": client.incarnation,
        }
        if client.is_late:
            self.body["late"] = True
        beats = SILENCES * BEATS if client.num_streams else BEATS
        self._period_s = min(max(client.timeout_s / beats, 0.2), PERIOD_S_MAX)
        self._stop = threading.Event()
        self._silent: set[int] = set()
        self._reported: set[int] = set()
        self._thread = threading.Thread(target=self._run, name="trireme-heartbeat", daemon=True)
        start_thread(self._thread)

    def _run(self) -> None:
        while True:
            try:
                self._beat()
            except TriremeError as error:
                # The calls of training have deadlines of their own and report more.
                log.debug("heartbeat: %s", error)
            if self._stop.wait(self._period_s):
                break
        self._transport.close()

    def _beat(self) -> None:
        request, servers = self._stop_request, self._client.servers.map.servers
        stops = "" if request.is_alone else request.reason
        body = {**self.body, **self._metrics.report(), "stops": stops}
        calls = [Call(server, "server.alive", body, []) for server in servers]
        within = {"within_s": 1.5 * self._period_s, "worker": self.body["worker"]}
        calls.append(Call(servers[0], "server.attendance", within, []))
        *_, attendance = self._transport.call_all(calls, timeout_s=self._period_s)
        self._log_silence(attendance.body)
        stops = str(attendance.body["stops"])
        # An empty one must not undo a SIGTERM, and its own must not stop what it does next.
        if stops and not self._client.is_only_worker:
            request.reason = request.reason or stops

    def _log_silence(self, attendance: Mapping[str, list[int]]) -> None:
        """Log which workers are silent, and when they are back."""
        silent = set(attendance["silent"]) - set(attendance["gone"])
        lasting = silent & self._silent  # a single heartbeat may just be late
        if new := sorted(lasting - self._reported):
            log.warning(
                "workers %s have not come yet, or are silent: calls that need them wait", new
            )
        if back := sorted(self._reported - silent):
            log.info("workers %s are no longer silent, or have ended", back)
        self._silent, self._reported = silent, (self._reported & silent) | lasting

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
