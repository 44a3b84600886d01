"""The HTTP endpoint of a process: /metrics for Prometheus, /healthz for supervisors."""

from __future__ import annotations

import ipaddress
import logging
from urllib.parse import urlsplit

from prometheus_client import MetricsHandler

from trireme.telemetry.health import Health
from trireme.telemetry.http_server import HttpServer, RequestHandler
from trireme.telemetry.registry import Registry

_log = logging.getLogger("trireme.telemetry")

THREADS_MAX = 8


class Endpoint(HttpServer):
    """Answers at `address` from start() to stop(); also a context manager.

    GET /metrics: 200, the registry in Prometheus' text or OpenMetrics' format. GET /healthz: 200
    and "ok", or 503 and the reasons, one per line.

    Args:
        address: see HttpServer.

    Raises:
        BadRequest: the address cannot be bound.
    """

    def __init__(self, address: str, registry: Registry, health: Health) -> None:
        self.registry, self.health = registry, health
        super().__init__("metrics", address, _EndpointHandler, threads_max=THREADS_MAX)

    def start(self) -> None:
        super().start()
        if not ipaddress.ip_address(urlsplit(self.url).hostname or "").is_loopback:
            _log.warning("metrics at %s are open to everyone who can reach it", self.url)
        _log.info("metrics at %s/metrics, health at %s/healthz", self.url, self.url)

    def __enter__(self) -> Endpoint:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class _EndpointHandler(RequestHandler, MetricsHandler):
    server: Endpoint

    def setup(self) -> None:
        super().setup()
        self.registry = self.server.registry

    def do_GET(self) -> None:
        self.limit_answer()
        path = self.url.path
        if path == "/metrics":
            MetricsHandler.do_GET(self)
        elif path == "/healthz":
            reasons = self.server.health.reasons()
            self._say(503 if reasons else 200, "\n".join(reasons) if reasons else "ok")
        else:
            self._say(404, "there are /metrics and /healthz")

    def _say(self, status: int, text: str) -> None:
        body = f"{text}\n".encode("utf-8", "backslashreplace")
        self.answer(status, body, "text/plain; charset=utf-8")
