"""Operations on all servers: started by one call each, then watched until all have ended."""

import json
import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from trireme.errors import DeadlineExceeded, TriremeError, Unavailable, class_of_code
from trireme.rpc import Reply
from trireme.storage.remote import RemoteStorage
from trireme.storage.storage import Storage
from trireme.worker.client import WorkerClient

log = logging.getLogger("trireme.checkpoint")

T = TypeVar("T")

SAVE_TIMEOUT_S = 3600.0
PAUSE_S_MIN, PAUSE_S_MAX = 0.002, 0.25

ATTEMPTS = 5
"""How often a save or load is tried, because a server restarted in the middle of it."""

# (done, total) of all servers together.
Watch = Callable[[int, int], None]


class ServerOperations:
    """Runs operations of one save or load on all servers; `watch` is called with their progress."""

    def __init__(
        self,
        client: WorkerClient,
        storage: Storage,
        watch: Watch | None,
        timeout_s: float = SAVE_TIMEOUT_S,
    ) -> None:
        self._client, self._watch = client, watch
        options = storage.options if isinstance(storage, RemoteStorage) else {}
        self._body = {"path": storage.name, "options": dict(options)}
        self._deadline = time.monotonic() + timeout_s
        self._timeout_s = timeout_s

    def run(self, action: str, **body: Any) -> list[Mapping[str, Any]]:
        """Results in the order of the servers. After an error, all servers have stopped. Raises
        what a server raised; DeadlineExceeded; Unavailable.
        """
        name = uuid.uuid4().hex
        message = {**self._body, **body, "action": action, "job": name}
        message["patience_s"] = float(self._client.timeout_s)
        try:
            self._client.servers.until_current(
                "checkpoint.start", lambda _: self._everywhere("checkpoint.start", message)
            )
            return self._wait(name)
        except BaseException:
            self._stop(name)
            raise

    def _everywhere(self, method: str, body: Mapping[str, Any]) -> list[Reply]:
        return self._client.servers.everywhere(method, dict(body), aside=True)

    def _wait(self, name: str) -> list[Mapping[str, Any]]:
        pause = threading.Event()
        started = time.monotonic()
        while True:
            replies = self._everywhere("checkpoint.status", {"job": name})
            statuses = [reply.body for reply in replies]
            for status in statuses:
                if status["error"] is not None:
                    code, message = status["error"]
                    raise class_of_code(code)(message)
            if self._watch is not None:
                done, total = (sum(int(s[field]) for s in statuses) for field in ("done", "total"))
                self._watch(done, total)
            if not any(status["running"] for status in statuses):
                return [json.loads(reply.arrays[0].tobytes()) for reply in replies]
            now = time.monotonic()
            if now > self._deadline:
                raise DeadlineExceeded(
                    f"checkpoint: expected to be done in {self._timeout_s:g} s, found servers busy"
                )
            # A tenth of the time so far: neither many calls nor a long wait at the end.
            pause.wait(min(max((now - started) / 10, PAUSE_S_MIN), PAUSE_S_MAX))

    def _stop(self, name: str) -> None:
        """Stop the operation and wait until no server writes any more."""
        deadline = time.monotonic() + self._client.timeout_s
        pause = threading.Event()
        for method in ("checkpoint.stop", "checkpoint.status"):
            while time.monotonic() < deadline:
                try:
                    replies = self._everywhere(method, {"job": name})
                except TriremeError as error:
                    log.debug("checkpoint: %s of a failed operation: %s", method, error)
                    break
                if not any(reply.body.get("running") for reply in replies):
                    break
                pause.wait(PAUSE_S_MAX / 5)


def retry(what: str, attempt: Callable[[], T]) -> T:
    """Call `attempt`; again if a server restarted meanwhile, and so lost its operation."""
    for _ in range(ATTEMPTS - 1):
        try:
            return attempt()
        except Unavailable as error:
            if "lost_job" not in (error.details or {}):
                raise
            log.warning("%s: starts over: %s", what, error)
    return attempt()
