"""Calls and replies, and their forms in a handler: requests and deferred replies."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from trireme.errors import BadRequest, TriremeError
from trireme.rpc.frames import Array

Body: TypeAlias = dict[str, Any]
"""Values by name: str, int, float, bool, None, bytes, and lists and maps of these."""


@dataclass(slots=True)
class Call:
    """One call of a client. Methods must be safe to repeat: a server may receive a call twice.

    `arrays` are sent without a copy: do not change them until the call has ended.
    """

    endpoint: str
    method: str
    body: Body = field(default_factory=dict)
    arrays: Sequence[Array] = ()


@dataclass(slots=True)
class Reply:
    """The reply of a handler.

    Its arrays are sent without a copy after the handler has returned, so they must not change any
    more. The client receives read-only arrays.
    """

    body: Body = field(default_factory=dict)
    arrays: Sequence[Array] = ()


@dataclass(slots=True, eq=False)
class Request:
    """A call in a handler.

    `arrays` are read-only; large ones are views that keep the received message in memory. `peer` is
    the client's name for itself, `address` its address, `key` its public key or "". `deadline` is a
    time.monotonic() value after which nobody waits for the answer.
    """

    id: int
    method: str
    body: Body
    arrays: list[Array]
    peer: str
    address: str
    key: str
    deadline: float


Answer: TypeAlias = "Reply | TriremeError"


class Deferred:
    """A handler returns this to answer later, from any thread.

    The first of `reply`, `fail` and the request's deadline answers; later ones are ignored.

    Args:
        describe: what the answer waits for: the text of the error at the deadline.
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
        """Set where the answer is sent; an answer that exists already is sent at once."""
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
