"""The limits of rpc: what a peer may use."""

from dataclasses import dataclass, fields

from trireme.errors import BadRequest

_LEAST = (
    ("header_bytes_max", 1 << 10, "what opens a connection must fit"),
    ("connections_max", 5, "a worker that saves has as many"),
)

SHARED_BYTES_MIN = 1 << 22
"""With less memory than this it is not worth sharing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The limits of one server or client. A server sends its own in the handshake.

    Peers can make a server hold `total_bytes_max` of requests, as much again of messages that are
    still arriving (docs/protocol.md: for messages of many tiny parts), as much again of replies
    that wait to be received, and the replies of requests that are being handled.
    """

    message_bytes_max: int = 1 << 28
    """Bytes of one message, all parts together. A larger call or reply travels in several."""
    header_bytes_max: int = 1 << 20
    """Bytes of a message's first part."""
    arrays_max: int = 4096
    """Arrays in one message."""
    requests_max: int = 64
    """Credit of a connection: requests sent and not yet answered."""
    inflight_bytes_max: int = 1 << 30
    """Credit of a connection: bytes of requests sent and not yet answered; one request is always
    admitted. A server also pauses a connection's requests while more bytes of replies wait for
    it."""
    total_bytes_max: int = 1 << 32
    """Bytes of requests of all connections; further ones are refused until some are answered. One
    call or reply has at most as many."""
    shared_bytes_max: int = 1 << 26
    """Memory that a client on the same machine shares with a server, for the arrays of one
    connection's calls and replies; 0: they travel with the messages. All clients share at most
    `total_bytes_max`."""
    total_requests_max: int = 1 << 14
    """Requests of all connections; further ones are refused until some are answered."""
    connections_max: int = 5120
    """Connections of a server: five for each of 1,000 workers. With one more it closes the oldest
    without a hello, which may be the new one."""
    faults_max: int = 8
    """Requests against the protocol that a connection may make before it is closed."""
    failures_max: int = 100
    """Connections from one address that may fail within a second: those closed for a fault, or
    without a hello. With more, the address is blocked for 5 s."""
    handshake_timeout_s: float = 10.0
    """Time from connecting to the welcome, on either side."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value, may_be_none = getattr(self, field.name), field.name == "shared_bytes_max"
            if value <= 0 and not (may_be_none and value == 0):
                raise BadRequest(f"Limits: {field.name} must be positive, found {value}")
        if self.header_bytes_max > self.message_bytes_max:
            raise BadRequest(
                f"Limits: header_bytes_max must be at most message_bytes_max, found "
                f"{self.header_bytes_max} and {self.message_bytes_max}"
            )
        if 0 < self.shared_bytes_max < SHARED_BYTES_MIN:
            raise BadRequest(
                f"Limits: shared_bytes_max must be 0 or at least {SHARED_BYTES_MIN}, found"
                f" {self.shared_bytes_max}"
            )
        for name, least, why in _LEAST:
            if (value := getattr(self, name)) < least:
                raise BadRequest(f"Limits: {name} must be at least {least}, found {value}: {why}")
