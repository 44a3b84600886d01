"""The connections of a server, from accept to close: who they are, what they use, when they are
dropped.

ZeroMQ hides its connections, and its own limits leave a hole: a high-water mark counts complete
messages, so a peer that sends one message of endless parts fills the server's memory unseen. So
each connection is followed from outside. The socket's monitor tells of each accept and close with
the file descriptor; the kernel's counters (TCP_INFO, Linux) tell how many bytes came in and how
many of ours were taken. A connection is closed that
  - comes when `connections_max` are open,
  - has not finished the handshake in time,
  - has sent more since its last complete message than a message may have,
  - is the largest when all unfinished messages together exceed `total_bytes_max`,
  - breaks the protocol more than `faults_max` times.

Threads: everything here is guarded by the server's lock.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket as sockets
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import zmq

from trireme.rpc.limits import Limits
from trireme.rpc.sockets import Socket, has_input

_log = logging.getLogger("trireme.rpc")

# What an unknown peer may send before it is welcomed: ZMTP's greeting and a hello take less than 2
# KiB.
_STRANGER_BYTES_MAX = 1 << 16
# Framing, and what may have arrived of the next message.
_SLACK_BYTES = 1 << 23
# How often counters are read. Between two readings a peer can overrun by what the network carries.
TICK_S = 0.05

_TCP_INFO_BYTES = 136
_BYTES_ACKED_OFFSET = 120  # struct tcp_info: two u64, tcpi_bytes_acked and tcpi_bytes_received


class Peer:
    """One connection. `routing_id` and `name` are known from its hello on."""

    __slots__ = (
        "_base_in",
        "_taken",
        "address",
        "is_dropped",
        "is_running",
        "key",
        "message_bytes_max",
        "name",
        "num_bytes",
        "num_bytes_out",
        "num_faults",
        "num_requests",
        "queue",
        "routing_id",
        "since",
        "socket",
        "was_active",
    )

    def __init__(self, socket: sockets.socket, address: str) -> None:
        self.socket = socket
        self.address = address
        self.name = ""
        self.routing_id = b""
        self.since = time.monotonic()
        self.is_dropped = False
        self.is_running = False  # a handler works on one of its requests
        self.queue: deque[Any] = deque()
        self.num_requests = 0  # received and not yet answered
        self.num_bytes = 0  # of these requests
        self.num_bytes_out = 0  # of replies handed to ZeroMQ, with their framing
        self.num_faults = 0
        self.message_bytes_max = 0
        self.was_active = False  # a complete message came since the last reading
        self.key = ""
        self._base_in = 0
        self._taken = 0

    def __str__(self) -> str:
        return f"{self.name or 'unknown'} ({self.address})"

    def counters(self) -> tuple[int, int]:
        """(bytes that the peer has taken from us, bytes that it has sent us) since it connected."""
        try:
            info = self.socket.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_INFO, _TCP_INFO_BYTES)
        except OSError:  # closed meanwhile; the monitor will say so
            return self.num_bytes_out, self._base_in
        taken, sent = struct.unpack_from("=QQ", info, _BYTES_ACKED_OFFSET)
        return taken, sent

    def unfinished_bytes(self) -> int:
        """Bytes that came since the last complete message."""
        _, sent = self.counters()
        if self.was_active:
            self.was_active, self._base_in = False, sent
        return sent - self._base_in

    def is_stalled(self, unsent_bytes_max: int) -> bool:
        """More bytes of replies than that wait for the peer to take them."""
        if self.num_bytes_out - self._taken > unsent_bytes_max:
            self._taken, _ = self.counters()
        return self.num_bytes_out - self._taken > unsent_bytes_max


class Peers:
    """The connections of one ROUTER socket."""

    def __init__(
        self,
        router: Socket,
        port: int,
        limits: Limits,
        forget: Callable[[Peer], None],
    ) -> None:
        self._forget = forget  # called once for each peer that is gone or dropped
        self._limits = limits
        self._port = port
        self._by_descriptor: dict[int, Peer] = {}
        self._by_routing_id: dict[bytes, Peer] = {}
        self.monitor = router.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)

    def __len__(self) -> int:
        return len(self._by_descriptor)

    def __iter__(self) -> Iterator[Peer]:
        return iter(list(self._by_descriptor.values()))

    def known(self, routing_id: bytes) -> Peer | None:
        return self._by_routing_id.get(routing_id)

    def find(self, descriptor: int) -> Peer | None:
        """The connection that a message came from, when its routing id is not known yet."""
        return self._by_descriptor.get(descriptor)

    def welcome(self, peer: Peer, routing_id: bytes) -> None:
        self._by_routing_id.pop(peer.routing_id, None)
        peer.routing_id = routing_id
        self._by_routing_id[routing_id] = peer

    def drop(self, peer: Peer, reason: str) -> None:
        """Close the connection; ZeroMQ notices, and its DISCONNECTED event forgets the peer."""
        if not peer.is_dropped:
            peer.is_dropped = True
            self._forget(peer)
            _log.warning("closed the connection of %s: %s", peer, reason)
            with contextlib.suppress(OSError):  # it is closed already
                peer.socket.shutdown(sockets.SHUT_RDWR)

    def follow(self) -> None:
        """Take in what the monitor tells: who came and who is gone."""
        while has_input(self.monitor):
            event, _ = self.monitor.recv_multipart(zmq.NOBLOCK)
            kind, descriptor = struct.unpack("=Hi", event)
            # An accept ends the old one too: the number can only be given again after a close.
            self._gone(self._by_descriptor.pop(descriptor, None))
            if kind == zmq.EVENT_ACCEPTED:
                self._accept(descriptor)

    def check(self) -> None:
        """Read the counters of all connections and close those that exceed a limit."""
        now = time.monotonic()
        unfinished = []
        for peer in self._by_descriptor.values():
            num_bytes = peer.unfinished_bytes()
            if peer.routing_id:
                bytes_max = self._limits.message_bytes_max + _SLACK_BYTES
                unfinished.append((num_bytes, peer))
            else:
                bytes_max = _STRANGER_BYTES_MAX
                if now - peer.since > self._limits.handshake_timeout_s:
                    self.drop(peer, f"no handshake in {self._limits.handshake_timeout_s} s")
            if num_bytes > bytes_max:
                self.drop(peer, f"{num_bytes} bytes without a complete message, may be {bytes_max}")
        self._check_total(unfinished)

    def close(self) -> None:
        self.monitor.close(linger=0)
        for peer in self._by_descriptor.values():
            peer.socket.close()
        self._by_descriptor.clear()
        self._by_routing_id.clear()

    def _gone(self, peer: Peer | None) -> None:
        if peer is not None:
            if self._by_routing_id.get(peer.routing_id) is peer:
                del self._by_routing_id[peer.routing_id]
            if not peer.is_dropped:
                peer.is_dropped = True
                self._forget(peer)
            peer.socket.close()

    def _accept(self, descriptor: int) -> None:
        # A copy of the descriptor, so that it means this connection also after ZeroMQ has closed
        # its own. It must be this server's: ZeroMQ may have closed it already and the number may
        # mean another file.
        try:
            socket = sockets.socket(fileno=os.dup(descriptor))
        except OSError:
            return
        try:
            is_ours = socket.getsockname()[1] == self._port
            host, port = socket.getpeername()[:2]
        except (OSError, IndexError, TypeError):
            is_ours = False
        if not is_ours:
            socket.close()
            return
        peer = Peer(socket, f"{host}:{port}")
        self._by_descriptor[descriptor] = peer
        if len(self._by_descriptor) > self._limits.connections_max:
            self.drop(peer, f"{self._limits.connections_max} connections are open")

    def _check_total(self, unfinished: list[tuple[int, Peer]]) -> None:
        total = sum(num_bytes for num_bytes, _ in unfinished)
        unfinished.sort(key=lambda pair: pair[0])
        while total > self._limits.total_bytes_max:
            num_bytes, peer = unfinished.pop()
            total -= num_bytes
            self.drop(peer, f"{num_bytes} bytes unfinished, {self._limits.total_bytes_max} for all")
