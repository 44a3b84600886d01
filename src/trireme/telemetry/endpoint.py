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


class Endpoint:
    """Answers at `address` from start() to stop(); also a context manager.

    GET /metrics: 200, the registry in Prometheus' text or OpenMetrics' format. GET /healthz: 200
    and "ok", or 503 and the reasons, one per line.

    Args:
        address: see HttpServer.

    Raises:
        BadRequest: the address cannot be bound.
    """

    def __init__(self, address: str, registry: Registry, health: Health) -> None:
        self._server = _EndpointServer(address, registry, health)

    @property
    def url(self) -> str:
        """The address that it listens at: "http://host:port"."""
        return self._server.url

    def start(self) -> Endpoint:
        self._server.start()
        if not ipaddress.ip_address(urlsplit(self.url).hostname or "").is_loopback:
            _log.warning("metrics at %s are open to everyone who can reach it", self.url)
        _log.info("metrics at %s/metrics, health at %s/healthz", self.url, self.url)
        return self

    def stop(self) -> None:
        """Stop; a request that is being answered may still finish. May be called twice."""
        self._server.stop()

    def __enter__(self) -> Endpoint:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


class _EndpointServer(HttpServer):
    def __init__(self, address: str, registry: Registry, health: Health) -> None:
        self.registry, self.health = registry, health
        super().__init__("metrics", address, _EndpointHandler, threads_max=THREADS_MAX)


class _EndpointHandler(RequestHandler, MetricsHandler):
    server: _EndpointServer

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
