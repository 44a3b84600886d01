"""Calls and replies, requests and deferred replies, and what observers of them are given."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from trireme.errors import BadRequest, TriremeError
from trireme.rpc.frames import Array, Place

Body: TypeAlias = dict[str, Any]
"""Values by name: str, int, float, bool, None, bytes, and lists and maps of these."""


@dataclass(slots=True)
class Call:
    """One call of a client. Methods must be safe to repeat: a server may receive a call twice.

    `arrays` are sent without a copy: do not change them until the call has ended. once: when the
    server cannot be reached or the connection is lost, the call ends at once with Unavailable, and
    with ResourceExhausted when the server has no room for it ("full" is in its details), instead of
    being sent again until the deadline: for a caller who may ask another server. room: where a
    server in this process may have the reply's last array.
    """

    endpoint: str
    method: str
    body: Body = field(default_factory=dict)
    arrays: Sequence[Array] = ()
    once: bool = False
    room: Array | None = None


@dataclass(slots=True)
class Reply:
    """The reply of a handler.

    Its arrays are sent without a copy after the handler has returned, so they must not change any
    more. The client receives read-only arrays. places: set by the server, where arrays lie in
    memory that it shares with the client.
    """

    body: Body = field(default_factory=dict)
    arrays: Sequence[Array] = ()
    places: Sequence[Place] = ()


@dataclass(slots=True, eq=False)
class Request:
    """A call in a handler.

    `arrays` are read-only; large ones are views that keep the received message in memory. `peer` is
    the client's name for itself, `address` its address, `key` its public key or "". `deadline` is a
    time.monotonic() value after which no caller waits for the answer. `reply_bytes_max`: a larger
    reply would be refused. room: see `Call`.
    """

    id: int
    method: str
    body: Body
    arrays: list[Array]
    peer: str
    address: str
    key: str
    deadline: float
    reply_bytes_max: int = 1 << 60
    room: Array | None = None


Answer: TypeAlias = "Reply | TriremeError"


class Deferred:
    """A handler returns this to answer later, from any thread. The first of `reply`, `fail` and the
    request's deadline answers; later ones are ignored. describe: what the answer waits for: the
    text of the error at the deadline.
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


class Ended(NamedTuple):
    """A call of a client that has ended."""

    method: str
    seconds: float  # until all calls of one `call_all` had ended, retries included
    error: str  # its name (RESOURCE_EXHAUSTED); "" after a reply
    num_retries: int  # the connection was lost, or the server was full
    num_bytes_sent: int  # of its messages
    num_bytes_received: int  # of its messages


class Waiting(NamedTuple):
    """Calls of a client that a server has not answered yet. As text: a line for the log."""

    server: str  # its address, with its name where it is known
    method: str
    num_calls: int
    status: str  # why: "no answer", "not reached", each with more where it is known
    seconds: float  # since the calls began

    def __str__(self) -> str:
        calls = self.method if self.num_calls == 1 else f"{self.num_calls} x {self.method}"
        return f"waiting for {self.server} ({calls}): {self.status} for {self.seconds:.0f} s"


CallObserver: TypeAlias = Callable[[Ended], None]
"""Called for each call of a client, in the calling thread."""

RequestObserver: TypeAlias = Callable[[str, float, str], None]
"""Called for each request of a server when it is answered: its method ("unknown" if the server
lacks it), seconds since it arrived, and the name of the error or "". It runs under the server's
lock: it must be quick and must not wait.
"""


class Usage(NamedTuple):
    """The requests that a server holds, and its traffic since the start."""

    queued: int  # requests that wait for a thread
    running: int  # requests in a handler
    deferred: int  # handled requests that wait for their answer
    num_bytes: int  # of all these
    connections: int  # open ones
    num_bytes_in: int  # of whole messages, with their framing
    num_bytes_out: int  # the same
    num_faults: int  # messages against the protocol, or beyond a connection's credit
