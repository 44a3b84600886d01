"""What observers of calls and requests are given."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias


class Ended(NamedTuple):
    """A call of a client that has ended.

    seconds: until all calls of one `call_all` had ended, retries included. error: the name of its
    error (RESOURCE_EXHAUSTED), "" after a reply. num_retries: times that it was sent again, after a
    lost connection or because the server was full. num_bytes_sent, num_bytes_received: of its
    messages.
    """

    method: str
    seconds: float
    error: str
    num_retries: int
    num_bytes_sent: int
    num_bytes_received: int


CallObserver: TypeAlias = Callable[[Ended], None]
"""Called for each call of a client, in the calling thread."""

RequestObserver: TypeAlias = Callable[[str, float, str], None]
"""Called for each request of a server when it is answered: its method ("unknown" if the server
lacks it), seconds since it arrived, and the name of the error or "". It runs under the server's
lock: it must be quick and must not wait.
"""


class Usage(NamedTuple):
    """The requests that a server holds, and its traffic since the start.

    queued: requests that wait for a thread. running: requests in a handler. deferred: handled
    requests that wait for their answer. num_bytes: of all these. connections: open ones.
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
