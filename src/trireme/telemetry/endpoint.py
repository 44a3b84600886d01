"""The HTTP endpoint of a process: /metrics for Prometheus, /healthz for supervisors.

Python's http.server parses requests and Prometheus' client answers them. Neither has limits, so
these are added: at most THREADS_MAX connections at a time, each of one request, which must arrive
within REQUEST_S and whose answer must be received within ANSWER_S.
"""

from __future__ import annotations

import io
import ipaddress
import logging
import socket as sockets
import sys
import threading
import time
from http.server import ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any, cast
from urllib.parse import urlsplit

from prometheus_client import MetricsHandler

from trireme.errors import BadRequest
from trireme.telemetry.address import join_address, split_address
from trireme.telemetry.health import Health
from trireme.telemetry.registry import Registry

_log = logging.getLogger("trireme.telemetry")

THREADS_MAX = 8
REQUEST_S = 10.0
ANSWER_S = 10.0
_POLL_S = 0.1  # interval of checking whether the server should stop


class Endpoint:
    """Answers at `address` from start() to stop(); also a context manager.

    GET /metrics: 200, the registry in Prometheus' text or OpenMetrics' format. GET /healthz: 200
    and "ok", or 503 and the reasons, one per line.

    Args:
        address: "host:port"; port 0 chooses a free one, see `url`. A number alone is a port of
            loopback.

    Raises:
        BadRequest: the address cannot be bound.
    """

    def __init__(self, address: str, registry: Registry, health: Health) -> None:
        host, port = split_address(address)
        try:
            self._server = _HttpServer(host, port, registry, health)
        except OSError as error:
            raise BadRequest(f"metrics: cannot listen on {address}: {error}") from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_S,), name="trireme-metrics", daemon=True
        )

    @property
    def url(self) -> str:
        """The address that it listens at: "http://host:port"."""
        host, port = self._server.socket.getsockname()[:2]
        return f"http://{join_address(host, port)}"

    def start(self) -> Endpoint:
        self._thread.start()
        if not ipaddress.ip_address(urlsplit(self.url).hostname or "").is_loopback:
            _log.warning("metrics at %s are open to everyone who can reach it", self.url)
        _log.info("metrics at %s/metrics, health at %s/healthz", self.url, self.url)
        return self

    def stop(self) -> None:
        """Stop; a request that is being answered may still finish. May be called twice."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def __enter__(self) -> Endpoint:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


class _HttpServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 16

    def __init__(self, host: str, port: int, registry: Registry, health: Health) -> None:
        self.registry, self.health = registry, health
        self._free = threading.Semaphore(THREADS_MAX)
        family, *_, address = sockets.getaddrinfo(host, port, type=sockets.SOCK_STREAM)[0]
        self.address_family = family
        super().__init__(cast("tuple[str, int]", address), _Handler)

    def server_bind(self) -> None:
        """Bind without looking up this host's name, which HTTPServer would do."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            _log.warning(
                "metrics: closed a connection of %s: %d are open", client_address[0], THREADS_MAX
            )
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an error: at level info if the peer left or was too slow."""
        del request
        if isinstance(error := sys.exc_info()[1], OSError):
            _log.info("metrics: %s did not get its answer: %s", client_address[0], error)
        else:
            _log.exception("metrics: could not answer %s", client_address[0])


class _Handler(MetricsHandler):
    server: _HttpServer

    def setup(self) -> None:
        super().setup()
        self.registry = self.server.registry
        self.rfile = io.BufferedReader(_Incoming(self.connection, time.monotonic() + REQUEST_S))

    def do_GET(self) -> None:
        self.connection.settimeout(ANSWER_S)  # for the whole answer: sendall keeps one deadline
        path = urlsplit(self.path).path
        if path == "/metrics":
            super().do_GET()
        elif path == "/healthz":
            reasons = self.server.health.reasons()
            self._answer(503 if reasons else 200, "\n".join(reasons) if reasons else "ok")
        else:
            self._answer(404, "there are /metrics and /healthz")

    def _answer(self, status: int, text: str) -> None:
        body = f"{text}\n".encode("utf-8", "backslashreplace")
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        _log.debug(format, *args)


class _Incoming(io.RawIOBase):
    """Reads from a connection until a deadline, however slowly data arrives."""

    def __init__(self, connection: sockets.socket, deadline: float) -> None:
        self._connection, self._deadline = connection, deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"expected a request within {REQUEST_S} s")
        self._connection.settimeout(left_s)
        return self._connection.recv_into(buffer)
