"""The connections of a server, from accept to close: their identity, use and limits.

ZeroMQ hides its connections, and its limits have a hole: a high-water mark counts complete
messages, so a peer that sends one message of endless parts can fill the server's memory. So each
connection is observed from outside. The socket's monitor reports each accept and close with the
file descriptor; the kernel's counters (TCP_INFO, Linux) give the bytes received, and the bytes sent
that the peer has acknowledged. A connection is closed if it
  - is the oldest without a welcome when more than `connections_max` are open,
  - has not finished the handshake in time,
  - has sent more since its last complete message than a message may have,
  - is the largest when all unfinished messages together exceed `total_bytes_max`, or all replies
    that wait to be received,
  - has not sent the next piece of a call in time,
  - breaks the protocol more than `faults_max` times.

Threads: everything here is guarded by the server's lock.
"""

import contextlib
import errno
import fcntl
import logging
import os
import socket as sockets
import struct
import sys
import termios
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import zmq

from trireme.rpc.address_filter import AddressFilter
from trireme.rpc.limits import Limits
from trireme.rpc.pieces import Assembly
from trireme.rpc.rate_limited_log import RateLimitedLog
from trireme.rpc.shared_memory import Bytes
from trireme.rpc.sockets import Socket, has_input

_log = logging.getLogger("trireme.rpc")

# Bytes that a peer may send before its welcome: the handshakes of ZMTP and CURVE and a hello take
# less than 2 KiB.
_STRANGER_BYTES_MAX = 1 << 13
# Framing of a part with CURVE; and ZMTP's handshake, with what ZeroMQ reads ahead.
_PART_BYTES, _AHEAD_BYTES = 64, 1 << 16
_ROUTING_ID_BYTES = 5
# Interval of reading counters. Within it a peer can exceed a limit by what the network carries.
TICK_S = 0.05
# Reading the counters of thousands of connections in each interval would take a fifth of a core.
# What peers send and do not finish is in this process' memory: while that has not grown, only some
# connections are read, in turn.
_READ_PER_TICK, _GROWN_BYTES = 128, 1 << 24
PIECE_TIMEOUT_S = 60.0
"""Time from one piece of a call to the next, after which the connection is closed."""

# Clients that share memory: each takes a file descriptor more.
_SHARING_MAX = 256

_TCP_INFO_BYTES = 136
_BYTES_ACKED_OFFSET = 120  # struct tcp_info: two u64, tcpi_bytes_acked and tcpi_bytes_received


@dataclass(slots=True, eq=False)
class Peer:
    """One connection. `routing_id` and `name` are set by its hello."""

    socket: sockets.socket
    host: str
    address: str  # host:port
    name: str = ""
    routing_id: bytes = b""
    since: float = field(default_factory=time.monotonic)
    is_dropped: bool = False
    is_welcome: bool = False  # its hello was accepted
    is_running: bool = False  # a handler runs one of its requests
    queue: deque[Any] = field(default_factory=deque)
    num_requests: int = 0  # received and not yet answered
    num_bytes: int = 0  # of these requests
    num_bytes_in: int = 0  # of complete messages, with their framing
    num_bytes_out: int = 0  # of replies handed to ZeroMQ, with their framing
    num_faults: int = 0
    message_bytes_max: int = 0
    call_bytes_max: int = 0  # of a reply, in pieces if it is larger than a message
    refused_id: int = 0  # of a call whose first piece was refused: the others are of no use
    key: str = ""
    shared: Bytes | None = None  # memory of the client, for arrays
    num_read: int = 0  # bytes from it that ZeroMQ had read at the last read()
    _num_bytes_in_before: int = -1
    _acked: int = 0

    def __str__(self) -> str:
        return f"{self.name or 'unknown'} ({self.address})"

    @property
    def is_here(self) -> bool:
        """Whether it seems to be on this machine, where both ends have one address."""
        return bool(self.socket.getsockname()[0] == self.host)

    def read(self) -> None:
        """Read the counters: bytes acknowledged by the peer, and bytes that ZeroMQ read from it."""
        waiting = bytearray(4)
        try:
            info = self.socket.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_INFO, _TCP_INFO_BYTES)
            fcntl.ioctl(self.socket, termios.FIONREAD, waiting)
        except OSError:  # closed meanwhile; the monitor will report it
            return
        self._acked, received = struct.unpack_from("=QQ", info, _BYTES_ACKED_OFFSET)
        self.num_read = received - int.from_bytes(waiting, sys.byteorder)

    def unfinished_bytes(self) -> int:
        """Bytes of an incomplete message and of ZMTP's handshake, at the last read(). 0 if a
        message was completed since the last call: others may wait to be received.
        """
        is_quiet = self.num_bytes_in == self._num_bytes_in_before
        self._num_bytes_in_before = self.num_bytes_in
        return self.num_read - self.num_bytes_in if is_quiet else 0

    def is_stalled(self, unsent_bytes_max: int) -> bool:
        """Whether more bytes of replies than this wait for the peer to receive them."""
        if self.unsent_bytes > unsent_bytes_max:
            self.read()
        return self.unsent_bytes > unsent_bytes_max

    @property
    def unsent_bytes(self) -> int:
        """Bytes of replies that the peer had not received at the last read()."""
        return self.num_bytes_out - self._acked


class Peers:
    """The connections of one ROUTER socket.

    Args:
        forget: called once for each peer that is gone or dropped.
        address_filter: gets the host of each peer that was dropped, or left before its welcome.
        strangers_log, admitted_log: for warnings about peers before and after their hello.
    """

    def __init__(
        self,
        router: Socket,
        limits: Limits,
        forget: Callable[[Peer], None],
        address_filter: AddressFilter,
        strangers_log: RateLimitedLog,
        admitted_log: RateLimitedLog,
    ) -> None:
        self._forget, self._address_filter = forget, address_filter
        self._strangers_log, self._admitted_log = strangers_log, admitted_log
        self._limits = limits
        self.port = 0  # of the socket, once it is bound
        framing_bytes = (limits.arrays_max + 1) * _PART_BYTES + _AHEAD_BYTES
        self._message_bytes_max = limits.message_bytes_max + framing_bytes
        self._by_descriptor: dict[int, Peer] = {}
        self._by_routing_id: dict[bytes, Peer] = {}
        self._num_open = 0  # neither gone nor dropped
        self._strangers: dict[Peer, None] = {}  # open and not welcome yet, the oldest first
        self._unfinished: dict[Peer, int] = {}  # bytes of admitted ones at the last check, if any
        self._unsent_most = 0  # bytes of all replies that wait to be received, at most
        self.assembling: dict[Peer, Assembly] = {}  # their calls of which some pieces have arrived
        self._sharing: list[Peer] = []  # memory, and some that are gone
        self._next = 0  # of the connections to read in turn
        self._resident_bytes = 0  # when all were read
        self.monitor = router.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)

    def __len__(self) -> int:
        return len(self._by_descriptor)

    def __iter__(self) -> Iterator[Peer]:
        return iter(list(self._by_descriptor.values()))

    def known(self, routing_id: bytes) -> Peer | None:
        """The connection whose messages come under this routing id, if it sent any before."""
        return self._by_routing_id.get(routing_id)

    def meet(self, routing_id: bytes, descriptor: int) -> Peer | None:
        """The connection whose first message came under `routing_id`; None if it has gone.

        ZeroMQ delivers the last messages of a closed connection even when its descriptor already
        belongs to a later one. Routing ids tell them apart: ZeroMQ numbers connections upwards.
        """
        self.follow()
        peer = self._by_descriptor.get(descriptor)
        if peer is None:
            return None
        if len(routing_id) != _ROUTING_ID_BYTES or routing_id[0] != 0:
            self.drop(peer, f"it chose its own routing id, {routing_id[:32]!r}")
            return None
        if peer.routing_id:
            if not _is_newer(routing_id, peer.routing_id):
                return None
            self._detach(peer)  # the messages until now were its predecessor's: start over
            peer = Peer(peer.socket, peer.host, peer.address)
            self._add(descriptor, peer)
        peer.routing_id = routing_id
        self._by_routing_id[routing_id] = peer
        return peer

    def room_to_share(self) -> int:
        """How much memory the next client may share."""
        self._sharing = [peer for peer in self._sharing if not peer.is_dropped]
        shared = [peer.shared for peer in self._sharing if peer.shared is not None]
        if len(shared) >= _SHARING_MAX:
            return 0
        room = self._limits.total_bytes_max - sum(map(len, shared))
        return min(room, self._limits.shared_bytes_max)

    def share(self, peer: Peer, memory: Bytes) -> None:
        peer.shared = memory
        self._sharing.append(peer)

    def welcome(self, peer: Peer) -> None:
        """Its hello was accepted."""
        peer.is_welcome = True
        self._strangers.pop(peer, None)

    def drop(self, peer: Peer, reason: str) -> None:
        """Close the connection; ZeroMQ notices, and its DISCONNECTED event forgets the peer."""
        if not peer.is_dropped:
            self._end(peer)
            self._address_filter.failed(peer.host)
            log = self._admitted_log if peer.is_welcome else self._strangers_log
            log.warning("closed the connection of %s: %s", peer, reason)
            with contextlib.suppress(OSError):  # it is closed already
                # No lingering: a peer that continues sending gets a reset, not a full window.
                no_linger = struct.pack("=ii", 1, 0)
                peer.socket.setsockopt(sockets.SOL_SOCKET, sockets.SO_LINGER, no_linger)
                peer.socket.shutdown(sockets.SHUT_RDWR)

    def follow(self) -> None:
        """Process the monitor's events: new connections and closed ones."""
        while has_input(self.monitor):
            event, _ = self.monitor.recv_multipart(zmq.NOBLOCK)
            kind, descriptor = struct.unpack("=Hi", event)
            # An accept also ends the old one: a descriptor is reused only after a close.
            if (gone := self._by_descriptor.pop(descriptor, None)) is not None:
                self._detach(gone)
                gone.socket.close()
            if kind == zmq.EVENT_ACCEPTED:
                self._accept(descriptor)

    def check(self) -> None:
        """Read the counters of connections and close those that exceed a limit."""
        now = time.monotonic()
        for peer in self._due():
            peer.read()
            num_bytes = peer.unfinished_bytes()
            if peer.is_dropped:
                continue
            if peer.is_welcome:
                bytes_max, self._unfinished[peer] = self._message_bytes_max, num_bytes
            else:
                bytes_max = _STRANGER_BYTES_MAX
                if now - peer.since > self._limits.handshake_timeout_s:
                    self.drop(peer, f"no handshake in {self._limits.handshake_timeout_s} s")
            if num_bytes > bytes_max:
                self.drop(peer, f"{num_bytes} bytes without a complete message, may be {bytes_max}")
        self._check_total()
        for peer, assembly in list(self.assembling.items()):
            if now > assembly.give_up_at and not self.wait_for_piece(peer, assembly):
                self.drop(peer, f"no further piece of a call in {PIECE_TIMEOUT_S:g} s")

    def wait_for_piece(self, peer: Peer, assembly: Assembly) -> bool:
        """Wait longer for the rest of a call; returns whether bytes of it came since the last."""
        peer.read()
        before, assembly.num_read = assembly.num_read, peer.num_read
        assembly.give_up_at = time.monotonic() + PIECE_TIMEOUT_S
        return before != peer.num_read

    def note_sent(self, peer: Peer, num_bytes: int) -> None:
        """Count a reply that ZeroMQ has got; close connections if all unsent ones are too many."""
        peer.num_bytes_out += num_bytes
        self._unsent_most += num_bytes
        if self._unsent_most <= self._limits.total_bytes_max:
            return
        waiting = [other for other in self if other.num_bytes_out and not other.is_dropped]
        for other in waiting:
            other.read()
        waiting.sort(key=lambda other: other.unsent_bytes)
        self._unsent_most = sum(other.unsent_bytes for other in waiting)
        while self._unsent_most > self._limits.total_bytes_max and len(waiting) > 1:
            num_bytes = (largest := waiting.pop()).unsent_bytes
            self._unsent_most -= num_bytes
            self.drop(largest, f"it has not received {num_bytes} bytes of replies, of too many")

    def _due(self) -> list[Peer]:
        """The connections to read now: all if there are few or the process has grown, else the
        strangers, those that have sent part of a message, and some of the others.
        """
        peers = list(self._by_descriptor.values())
        if len(peers) <= _READ_PER_TICK:
            return peers
        resident_bytes = _resident_bytes()
        if resident_bytes > self._resident_bytes + _GROWN_BYTES:
            self._resident_bytes = resident_bytes
            return peers
        self._resident_bytes = min(self._resident_bytes, resident_bytes)
        self._next = (self._next + _READ_PER_TICK) % len(peers)
        in_turn = peers[self._next : self._next + _READ_PER_TICK]
        suspects = [peer for peer, size in self._unfinished.items() if size > _AHEAD_BYTES]
        return list(dict.fromkeys([*self._strangers, *suspects, *in_turn]))

    def close(self) -> None:
        self.monitor.close(linger=0)
        for peer in self._by_descriptor.values():
            peer.socket.close()
        self._by_descriptor.clear()
        self._by_routing_id.clear()
        self._strangers.clear()
        self._unfinished.clear()
        self.assembling.clear()

    def _detach(self, peer: Peer) -> None:
        self._by_routing_id.pop(peer.routing_id, None)
        if not peer.is_dropped:
            self._end(peer)
            if not peer.is_welcome:
                self._address_filter.failed(peer.host)

    def _end(self, peer: Peer) -> None:
        peer.is_dropped, peer.shared = True, None
        self._num_open -= 1
        self._strangers.pop(peer, None)
        self._unfinished.pop(peer, None)
        self.assembling.pop(peer, None)
        self._forget(peer)

    def _add(self, descriptor: int, peer: Peer) -> None:
        self._by_descriptor[descriptor] = peer
        self._num_open += 1
        self._strangers[peer] = None

    def _accept(self, descriptor: int) -> None:
        # A copy of the descriptor, which stays valid when ZeroMQ closes its own. ZeroMQ may have
        # closed it already, and the number may belong to another file: check that it is ours.
        try:
            socket = sockets.socket(fileno=os.dup(descriptor))
        except OSError as error:
            if error.errno == errno.EMFILE:
                self._close_unfollowed(descriptor)
            return
        try:
            is_ours = socket.getsockname()[1] == self.port
            host, port = socket.getpeername()[:2]
        except (OSError, IndexError, TypeError):
            is_ours = False
        if not is_ours:
            socket.close()
            return
        peer = Peer(socket, host, f"{host}:{port}")
        self._add(descriptor, peer)
        if self._num_open > self._limits.connections_max:  # silent peers cannot shut others out
            oldest = next(iter(self._strangers))
            waited = "" if oldest is peer else ", and this one has waited longest without a hello"
            open_max = f"{self._limits.connections_max} connections are open (connections_max)"
            self.drop(oldest, f"{open_max}{waited}")

    def _close_unfollowed(self, descriptor: int) -> None:
        """Close a connection that cannot be observed, since its descriptor cannot be copied."""
        _log.error("closed a connection: this process has no file descriptor left to follow it")
        with contextlib.suppress(OSError):
            socket = sockets.socket(fileno=descriptor)
            try:
                if socket.getsockname()[1] == self.port:
                    socket.shutdown(sockets.SHUT_RDWR)
            finally:
                socket.detach()  # ZeroMQ closes it

    def _check_total(self) -> None:
        while sum(self._unfinished.values()) > self._limits.total_bytes_max:
            peer, num_bytes = max(self._unfinished.items(), key=lambda item: item[1])
            self.drop(peer, f"{num_bytes} bytes unfinished, {self._limits.total_bytes_max} for all")


def _resident_bytes() -> int:
    """Memory of this process."""
    with open("/proc/self/statm", "rb") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _is_newer(routing_id: bytes, than: bytes) -> bool:
    """Compare two ids of ZeroMQ: a zero byte and a 32-bit number that wraps around."""
    ahead = int.from_bytes(routing_id[1:], "big") - int.from_bytes(than[1:], "big")
    return ahead % (1 << 32) < 1 << 31
