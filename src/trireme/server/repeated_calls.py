"""Calls that write files: they come again when a connection was lost or the server was killed."""

import threading
import time
from typing import Any

from trireme.errors import DeadlineExceeded
from trireme.rpc import Deferred, Handler, Reply, Request


def repeatable(write: Handler) -> Handler:
    """The handler of a call that writes into a folder which no other call has, one at a time. One
    that comes again waits for the first and has its answer. `write` itself replaces what it may
    find there: what a killed server has left.
    """
    lock = threading.Lock()
    body: dict[str, Any] | None = None
    answer: Reply | Deferred | None = None

    def on_request(request: Request) -> Reply | Deferred | None:
        nonlocal body, answer
        if not lock.acquire(timeout=max(0.0, request.deadline - time.monotonic())):
            raise DeadlineExceeded(f"{request.method}: expected the one before to end, it has not")
        try:
            if request.body != body:
                answer, body = write(request), request.body
            return answer
        finally:
            lock.release()

    return on_request
