"""What calls tell whoever counts them: how long they took, how they ended, what they carried."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias


class Ended(NamedTuple):
    """A call of a client that has ended.

    method: as it was called. seconds: until all calls made at once had ended, retries included.
    error: the name of what ended it (RESOURCE_EXHAUSTED), "" after a reply. num_retries: how often
    it was sent again, after a lost connection or because the server was full. num_bytes_sent,
    num_bytes_received: of its messages.
    """

    method: str
    seconds: float
    error: str
    num_retries: int
    num_bytes_sent: int
    num_bytes_received: int


CallObserver: TypeAlias = Callable[[Ended], None]
"""Told of each call of a client, in the thread that called."""

RequestObserver: TypeAlias = Callable[[str, float, str], None]
"""Told of each request of a server when it is answered: its method ("unknown" if the server has no
such), seconds since it came, and the name of the error or "". It is called under the server's lock:
it must be quick and wait for nothing.
"""


class Usage(NamedTuple):
    """What a server holds at a moment, and what went through it since its start.

    queued: requests that wait for a thread. running: that a handler works on. deferred: handled,
    and waiting for what they asked for. num_bytes: of all these. connections: that are open.
    num_bytes_in, num_bytes_out: of whole messages, with their framing. num_faults: messages against
    the protocol, or beyond a connection's credit.
    """

    queued: int
    running: int
    deferred: int
    num_bytes: int
    connections: int
    num_bytes_in: int
    num_bytes_out: int
    num_faults: int
