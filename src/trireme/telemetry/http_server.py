"""An HTTP server with limits, for pages of numbers.

Python's http.server parses requests. It has no limits, so these are added: at most `threads_max`
connections at a time, each of one request, which must arrive within REQUEST_S and each write of
whose answer must be received within ANSWER_S.
"""

from __future__ import annotations

import io
import logging
import socket as sockets
import sys
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any, cast
from urllib.parse import SplitResult, urlsplit

from trireme.errors import BadRequest, start_thread
from trireme.telemetry.address import join_address, split_address

REQUEST_S = 10.0
ANSWER_S = 10.0
_POLL_S = 0.1  # interval of checking whether the server should stop


class HttpServer(ThreadingHTTPServer):
    """Serves from start() to stop().

    Args:
        name: of the server in messages, such as "metrics".
        address: "host:port"; port 0 chooses a free one, see `url`. A number alone is a port of
            loopback.
        handler: answers a request.
        threads_max: connections at a time; further ones are closed.

    Raises:
        BadRequest: the address cannot be bound.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 16

    def __init__(
        self, name: str, address: str, handler: type[RequestHandler], *, threads_max: int
    ) -> None:
        self.name, self.log = name, logging.getLogger(f"trireme.{name}")
        self._threads_max, self._free = threads_max, threading.Semaphore(threads_max)
        host, port = split_address(address, name)
        try:
            family, *_, bound = sockets.getaddrinfo(host, port, type=sockets.SOCK_STREAM)[0]
            self.address_family = family
            super().__init__(cast("tuple[str, int]", bound), handler)
        except OSError as error:
            raise BadRequest(f"{name}: cannot listen on {address}: {error}") from error
        self._thread = threading.Thread(
            target=self.serve_forever, args=(_POLL_S,), name=f"trireme-{name}", daemon=True
        )

    @property
    def url(self) -> str:
        """The address that it listens at: "http://host:port"."""
        host, port = self.socket.getsockname()[:2]
        return f"http://{join_address(host, port)}"

    def start(self) -> None:
        start_thread(self._thread)

    def stop(self) -> None:
        """Stop; a request that is being answered may still finish. May be called twice."""
        if self._thread.is_alive():
            self.shutdown()
            self._thread.join()
        self.server_close()

    def server_bind(self) -> None:
        """Bind without looking up this host's name, which HTTPServer would do."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            try:
                super().process_request(request, client_address)
            except BaseException:  # no thread for it
                self._free.release()
                raise
        else:
            self.log.warning(
                "%s: closed a connection of %s: %d are open",
                self.name,
                client_address[0],
                self._threads_max,
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
            self.log.info("%s: %s did not get its answer: %s", self.name, client_address[0], error)
        else:
            self.log.exception("%s: could not answer %s", self.name, client_address[0])


class RequestHandler(BaseHTTPRequestHandler):
    """Answers one request of a connection."""

    server: HttpServer
    url: SplitResult  # of the request

    def parse_request(self) -> bool:
        """Also answers what is no URL, which `urlsplit` refuses."""
        if not super().parse_request():
            return False
        try:
            self.url = urlsplit(self.path)
        except ValueError as error:
            self.limit_answer()
            self.send_error(400, f"expected a path, found none: {error}")
            return False
        return True

    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(_Incoming(self.connection, time.monotonic() + REQUEST_S))

    def limit_answer(self) -> None:
        """Give each write to the peer a deadline; sendall keeps one for the whole of its data."""
        self.connection.settimeout(ANSWER_S)

    def answer(
        self, status: int, body: bytes, content_type: str, headers: Mapping[str, str] | None = None
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        self.server.log.debug(format, *args)


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
