"""An S3 server for tests, on loopback, with its objects in memory."""

from __future__ import annotations

import logging
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from moto.server import ThreadedMotoServer

BUCKET = "bucket"


@contextmanager
def s3_server() -> Iterator[dict[str, Any]]:
    """Yields the storage options that reach it; it has the bucket `bucket`."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # one line per request otherwise
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    try:
        # The objects are those of all servers of this process.
        reset = urllib.request.Request(f"{endpoint}/moto-api/reset", method="POST")
        urllib.request.urlopen(reset, timeout=30).close()
        _put(f"{endpoint}/{BUCKET}", b"")
        yield {"key": "key", "secret": "secret", "endpoint_url": endpoint}
    finally:
        server.stop()


def put(options: dict[str, Any], name: str, data: bytes) -> None:
    """Store an object in the bucket."""
    _put(f"{options['endpoint_url']}/{BUCKET}/{name}", data)


def _put(url: str, data: bytes) -> None:
    headers = {
        "Authorization": "AWS4-HMAC-SHA256 Credential=key/20260101/us-east-1/s3/aws4_request",
        "Content-Type": "application/octet-stream",
    }
    request = urllib.request.Request(url, data, method="PUT", headers=headers)
    with urllib.request.urlopen(request, timeout=30) as response:
        assert response.status == 200
