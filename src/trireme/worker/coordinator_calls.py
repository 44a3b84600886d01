"""A worker's calls to the coordinator after joining; among them meetings with other workers."""

import hashlib
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from trireme.errors import DeadlineExceeded, TriremeError
from trireme.protocol.wire import ALL, Array
from trireme.rpc import Call, Reply
from trireme.worker.script import Script
from trireme.worker.servers import Servers

log = logging.getLogger("trireme.worker")

PATIENCE = 30
"""Timeouts that a worker waits for others that are alive."""
LEFT_S = 1.0
"""Seconds to tell servers that their answers to a goodbye have come."""


class CoordinatorCalls:
    """The coordinator as one worker calls it, from one thread. script: names the meetings."""

    def __init__(self, servers: Servers, script: Script, worker: int, incarnation: int) -> None:
        self._servers, self._script = servers, script
        self._worker, self._incarnation = worker, incarnation
        self._numbers = itertools.count(1)
        # By group of workers whose exchanges this thread makes: how many it has made.
        self.exchanges: dict[str, int] = {}

    def call(
        self,
        method: str,
        body: dict[str, Any],
        arrays: Sequence[Array] = (),
        *,
        timeout_s: float | None = None,
    ) -> Reply:
        """Call a method of the coordinator as this worker."""
        return self._servers.coordinator(method, self._signed(body), arrays, timeout_s=timeout_s)

    def _signed(self, body: dict[str, Any]) -> dict[str, Any]:
        """The body with the worker that calls, and the call's number."""
        call = next(self._numbers)
        return {**body, "worker": self._worker, "incarnation": self._incarnation, "call": call}

    def agree(self, fact: str, value: str) -> None:
        """Fix a fact of the job. Raises SchemaMismatch if it has another value."""
        self.call("coord.agree", {"fact": fact, "value": value})

    def gather(
        self,
        body: dict[str, Any],
        arrays: Sequence[Array],
        *,
        purpose: str = "barrier",
        timeout_s: float | None = None,
        patient: bool = False,
        to: str = ALL,
    ) -> list[tuple[dict[str, Any], list[Array]]]:
        """Meet all workers; returns what each of them contributed, in the order of the workers.

        Args:
            timeout_s: how long to wait for the others; default the client's, or if patient PATIENCE
                times as long.
            patient: the others may have more to do than this one. Yet wait no longer than the
                client's timeout once a worker sends no heartbeats.
            to: who gets the arrays, see `MEETING_ARRAYS`. Others get none; with SUM there is one
                contribution, whose body is that of each.

        Raises:
            BadRequest: another worker came to this meeting for another purpose. DeadlineExceeded:
                workers did not come; the message says which. ResourceExhausted: a predecessor
                attended, and the answers are not kept any more.
        """
        place = {"pass": self._script.number, "name": self._script.next_meeting()}
        place["exchanges"] = dict(self.exchanges)
        message = self._signed({**place, "purpose": purpose, "body": body, "arrays": to})
        whole_s = self._servers.timeout_s * (PATIENCE if patient else 1)
        whole_s = whole_s if timeout_s is None else timeout_s

        def attempt(left_s: float) -> Reply:
            return self._servers.coordinator("coord.gather", message, arrays, timeout_s=left_s)

        reply = self.patiently(attempt, whole_s) if patient else attempt(whole_s)
        rest = iter(reply.arrays)
        return [(one, [next(rest) for _ in range(num)]) for one, num in reply.body["bodies"]]

    def compare_files(self, files: str) -> list[bool]:
        """Of each worker, whether its files are these. Every worker calls it."""
        digest = hashlib.sha256(files.encode()).hexdigest()
        replies = self.gather({"files": digest}, [], purpose="compare files")
        return [body["files"] == digest for body, _ in replies]

    def patiently(self, attempt: Callable[[float], Reply], whole_s: float) -> Reply:
        """The answer to a call that waits for other workers, repeated for `whole_s` while all of
        them send heartbeats. attempt: calls with this timeout.
        """
        deadline = time.monotonic() + whole_s
        while True:
            try:
                return attempt(min(whole_s, self._servers.timeout_s))
            except DeadlineExceeded as error:
                whole_s = deadline - time.monotonic()
                if whole_s <= 0 or self.silent_workers():
                    raise
                log.warning("still waiting, all workers are alive: %s", error)

    def check_exchange(self, group: str, *, timeout_s: float) -> None:
        """Ask while the next exchange of a group waits. Raises BadRequest: for a worker that waits
        at a meeting for this one, which then fails too.
        """
        body = {"group": group, "ended": self.exchanges[group]}
        self.call("coord.in_exchange", body, timeout_s=timeout_s)

    def silent_workers(self) -> list[int]:
        """Workers without a heartbeat at server 0 for the client's timeout, or that have ended."""
        within = {"within_s": float(self._servers.timeout_s)}
        silent: list[int] = self._servers.ask("server.attendance", within).body["silent"]
        return silent

    def say_goodbye(self, body: dict[str, Any]) -> None:
        """End the script of this worker, for successors too. body: of `server.goodbye`.

        A server whose answer was lost stays for a while, so that it is there for the repetition.
        """
        end = self.call("coord.end", {"run": self._script.run})
        servers, body = self._servers, {**body, "members": end.body.get("members")}
        goodbyes = [Call(server, "server.goodbye", body, []) for server in servers.endpoints]
        servers.call_all(goodbyes, servers.timeout_s)
        ends = [Call(server, "server.left", body, [], once=True) for server in servers.endpoints]
        try:
            servers.call_all(ends, LEFT_S)
        except TriremeError as error:  # the server has ended, or does so by itself
            log.debug("at the end: %s", error)
