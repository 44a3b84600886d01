"""What travels: calls and replies, and the request and the deferred reply that a handler sees."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from trireme.errors import BadRequest, TriremeError
from trireme.rpc.frames import Array

Body: TypeAlias = dict[str, Any]
"""A map of str to what msgpack knows: str, int, float, bool, None, bytes, lists and maps of these.
"""


@dataclass(slots=True)
class Call:
    """One call of a client. Every method must be safe to repeat: a server may see a call twice.

    `arrays` are sent from where they are, without a copy: do not change them until the call has
    ended.
    """

    endpoint: str
    method: str
    body: Body = field(default_factory=dict)
    arrays: Sequence[Array] = ()


@dataclass(slots=True)
class Reply:
    """What a handler answers and a client gets.

    A handler gives its arrays away: they are sent from where they are, after it has returned, and
    must not change any more. A client gets read-only arrays.
    """

    body: Body = field(default_factory=dict)
    arrays: Sequence[Array] = ()


@dataclass(slots=True, eq=False)
class Request:
    """A call as a handler sees it.

    `arrays` are read-only; large ones are views that keep the received message in memory. `peer` is
    the name that the client gave itself, `address` where it is, `key` its public key or "".
    `deadline` is a time.monotonic() value: nobody waits for the answer any longer.
    """

    id: int
    method: str
    body: Body
    arrays: list[Array]
    peer: str
    address: str
    key: str
    deadline: float

    @property
    def remaining_s(self) -> float:
        return max(0.0, self.deadline - time.monotonic())


Answer: TypeAlias = "Reply | TriremeError"


class Deferred:
    """A handler returns this to answer later, from any thread.

    The first of `reply`, `fail` and the request's deadline answers; what comes after it is ignored.

    Args:
        describe: says what the answer waits for: the error's text when the deadline passes.
    """

    def __init__(self, describe: Callable[[], str] | None = None) -> None:
        self.describe = describe or (lambda: "no answer was ready before the deadline")
        self._lock = threading.Lock()
        self._answer: Answer | None = None
        self._send: Callable[[Answer], None] | None = None

    def reply(self, reply: Reply) -> None:
        self._give(reply)

    def fail(self, error: TriremeError) -> None:
        self._give(error)

    def bind(self, send: Callable[[Answer], None]) -> None:
        """The server says where the answer goes; one that came while the handler still ran goes at
        once.
        """
        with self._lock:
            if self._send is not None:
                raise BadRequest("Deferred: one may be returned for one request, found a second")
            self._send, answer = send, self._answer
        if answer is not None:
            send(answer)

    def _give(self, answer: Answer) -> None:
        with self._lock:
            if self._answer is not None:
                return
            self._answer, send = answer, self._send
        if send is not None:
            send(answer)


Handler: TypeAlias = Callable[[Request], "Reply | Deferred | None"]
