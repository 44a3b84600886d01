"""Metrics of a worker's calls to its servers. docs/metrics.md lists them."""

from __future__ import annotations

from trireme.rpc import Ended
from trireme.telemetry.instruments import SECONDS, Counter, Histogram
from trireme.telemetry.registry import Registry


class CallMetrics:
    """Counts calls. Give `observe` to the worker's clients."""

    def __init__(self, registry: Registry) -> None:
        self._calls = Counter(
            "trireme_worker_calls_total",
            "Calls that ended, by method and by the name of the error, OK if none.",
            ["method", "code"],
        )
        self._seconds = Histogram(
            "trireme_worker_call_seconds",
            "Time of a call of a worker to its servers, retries and waiting included.",
            ["method"],
            SECONDS,
        )
        self._retries = Counter(
            "trireme_worker_retries_total",
            "Requests that were sent again: the connection was lost, or the server was full.",
            ["method"],
        )
        self._sent = Counter("trireme_worker_sent_bytes_total", "Bytes of requests sent.")
        self._received = Counter("trireme_worker_received_bytes_total", "Bytes of answers.")
        for metric in (self._calls, self._seconds, self._retries, self._sent, self._received):
            registry.register(metric)

    def num_retries(self) -> int:
        """Retries of all methods."""
        return int(sum(self._retries.read().values()))

    def observe(self, ended: Ended) -> None:
        self._calls.add(1, ended.method, ended.error or "OK")
        self._seconds.observe(ended.seconds, ended.method)
        self._retries.add(ended.num_retries, ended.method)
        self._sent.add(ended.num_bytes_sent)
        self._received.add(ended.num_bytes_received)
