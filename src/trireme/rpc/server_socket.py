"""A server's socket: turns messages into requests, and sends answers.

It welcomes new connections, answers faults (messages against the protocol), and closes connections
with too many of them. Its owner handles the requests.

Threads: everything here is guarded by the server's lock.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import zmq

from trireme.errors import BadRequest, Internal, ResourceExhausted, TriremeError
from trireme.rpc import frames
from trireme.rpc.address_filter import AddressFilter
from trireme.rpc.auth import ServerKeys, answer_zap, secure_server
from trireme.rpc.errors_on_wire import pack_error
from trireme.rpc.limits import SHARED_BYTES_MIN, Limits
from trireme.rpc.messages import Answer, Reply, Request
from trireme.rpc.peers import Peer, Peers
from trireme.rpc.pieces import Assembly, announced_bytes, cut
from trireme.rpc.port_user import advice_on_port
from trireme.rpc.rate_limited_log import RateLimitedLog
from trireme.rpc.shared_memory import opened
from trireme.rpc.sockets import (
    COPY_BYTES_MAX,
    Socket,
    has_input,
    listening,
    new_context,
    router,
    url,
)

_log = logging.getLogger("trireme.rpc")

_LAST = int(zmq.NOBLOCK)  # as enums, their "|" would take longer than the call
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)


class ReceivedRequest(NamedTuple):
    """A request, the peer that sent it, the bytes that it counts for, the places of its arrays in
    shared memory, and (start, size) of the room there for its reply.
    """

    peer: Peer
    request: Request
    num_bytes: int
    places: list[frames.Place]
    room: tuple[int, int] | None


class ServerSocket:
    """The ROUTER socket of the server `name`, bound to `address`, and its connections. forget:
    called once for each peer that is gone or dropped. refusal: why no call of so many bytes can be
    taken now; empty: it can. state: as for Server. Raises BadRequest: the address cannot be bound.
    """

    def __init__(
        self,
        name: str,
        address: str,
        limits: Limits,
        keys: ServerKeys | None,
        listen_fd: int | None,
        forget: Callable[[Peer], None],
        refusal: Callable[[int], str],
        state: str,
    ) -> None:
        self._refusal = refusal
        self._name, self._limits, self._keys, self._state = name, limits, keys, state
        self._is_curve = keys is not None
        self._context = new_context()
        self.socket = router(self._context, limits)
        self.num_bytes_in = self.num_bytes_out = self.num_faults = 0
        # Separate logs, so that lines of one topic cannot suppress those of another.
        self._strangers_log = RateLimitedLog(_log, "strangers")
        self._blocked_log = RateLimitedLog(_log, "blocked addresses")
        self._admitted_log = RateLimitedLog(_log, "connections that had said hello")
        self._logs = (self._strangers_log, self._blocked_log, self._admitted_log)
        with ExitStack() as undo:
            undo.callback(self._context.destroy, linger=0)
            try:
                self._listener = undo.enter_context(listening(address, limits, listen_fd))
                self.address_filter = AddressFilter(
                    self._listener, limits.failures_max, self._blocked_log
                )
                # Before bind: it must see every accept.
                logs = self._strangers_log, self._admitted_log
                self.peers = Peers(self.socket, limits, forget, self.address_filter, *logs)
                undo.callback(self.peers.close)
                secure_server(self.socket, keys)
                self.zap = self._bind_zap()
                self._bind(address)
            except (OSError, zmq.ZMQError) as error:
                what = f"Server.start: cannot bind {address}: {error.strerror}"
                if error.errno == errno.EADDRINUSE:
                    what += f"; {advice_on_port(int(address.rpartition(':')[2]))}"
                raise BadRequest(what) from error
            undo.pop_all()
        bound: bytes = self.socket.getsockopt(zmq.LAST_ENDPOINT)  # type: ignore[assignment]
        self.endpoint = bound.decode().removeprefix("tcp://").rstrip("\0")
        self.peers.port = int(self.endpoint.rpartition(":")[2])

    def has_input(self) -> bool:
        return has_input(self.socket)

    def receive(self) -> ReceivedRequest | None:
        """Receive a message. None: it was not a request and has been processed. Raises zmq.Again:
        none is waiting.
        """
        routing_id = self.socket.recv(_LAST)  # a part of the message follows it always
        parts: list[zmq.Frame] = []
        num_parts = num_bytes = num_bytes_in = 0
        is_complete = False
        while not is_complete:
            part = self.socket.recv(_LAST, copy=False)
            is_complete = not part.more
            num_parts += 1
            num_bytes += len(part)
            num_bytes_in += frames.wire_bytes(len(part), self._is_curve)
            if num_parts <= self._limits.arrays_max + 1:
                parts.append(part)
        self.num_bytes_in += num_bytes_in
        peer = self.peers.known(routing_id) or self._meet(routing_id, part)
        if peer is None or peer.is_dropped:
            return None
        peer.num_bytes_in += num_bytes_in
        request_id = 0
        try:
            self._check_size(num_parts, num_bytes)
            header, arrays = frames.unpack(parts, self._limits, peer.shared)
            if not peer.is_welcome:
                self._welcome(peer, header)
                return None
            if header["t"] == frames.PIECE:
                request_id = frames.int_field(header, "id", low=1)
                if (whole := self._assembled(peer, request_id, header, arrays)) is None:
                    return None
                header, arrays = frames.unpack(whole.parts, self._limits, peer.shared)
                num_bytes = whole.num_bytes
            if header["t"] != frames.CALL:
                raise BadRequest(f"after its hello a client may only call, found {header['t']!r}")
            request_id = frames.int_field(header, "id", low=1)
            reply_bytes_max = min(peer.call_bytes_max, self._limits.total_bytes_max)
            request = _request(request_id, header, arrays, peer, reply_bytes_max)
            places = frames.places_of(header)
            if places:
                num_shared = frames.shared_bytes(arrays, places)
                self.num_bytes_in += num_shared
                num_bytes += num_shared
            return ReceivedRequest(peer, request, num_bytes, places, _room(header, peer))
        except TriremeError as error:
            self.fault(peer, request_id, error)
        except Exception as error:  # noqa: BLE001 no message may end the receiving thread
            _log.exception("%s: could not take a message of %s", self._name, peer)
            self.fault(peer, request_id, Internal(f"{type(error).__name__}: {error}"))
        return None

    def send_answer(self, peer: Peer, request_id: int, answer: Answer, handled: bool) -> None:
        """Send a reply or an error. `handled` False asks the client to call again."""
        if isinstance(answer, Reply):
            answer = self._send_reply(peer, request_id, answer) or answer
        if isinstance(answer, TriremeError):
            self._send(peer, pack_error(request_id, answer, handled))

    def fault(self, peer: Peer, request_id: int, error: TriremeError) -> None:
        """Answer a message against the protocol; close the connection after too many."""
        self.num_faults += 1
        peer.num_faults += 1
        if peer.num_faults > self._limits.faults_max:
            self.peers.drop(peer, f"{peer.num_faults} faults, the last: {error}")
        else:
            self._send(peer, pack_error(request_id, error, handled=True))

    def answer_zap(self) -> None:
        """Answer the connections that wait for authentication."""
        if self.zap is not None and self._keys is not None:
            answer_zap(self.zap, self._keys, self._strangers_log)

    @property
    def has_duties(self) -> bool:
        """Whether `check` has work even if no message arrives."""
        is_behind = any(log.is_behind for log in self._logs)
        return bool(len(self.peers) or len(self.address_filter) or is_behind)

    def check(self) -> None:
        """Do periodic work: read counters, unblock addresses, flush logs."""
        self.peers.check()
        self.address_filter.check()
        for log in self._logs:
            log.check()

    def close(self) -> None:
        """Close, after a short time for pending replies to leave."""
        self.address_filter.close()
        for log in self._logs:
            log.flush()
        self._listener.close()
        self.socket.disable_monitor()
        self.peers.close()
        if self.zap is not None:
            self.zap.close()
        self.socket.close()
        self._context.term()

    def _bind(self, address: str) -> None:
        """Let ZeroMQ accept from a copy of the listening socket, which ZeroMQ closes."""
        copy = os.dup(self._listener.fileno())
        try:
            self.socket.setsockopt(zmq.USE_FD, copy)
            self.socket.bind(url(self.socket, address))
        except zmq.ZMQError:
            os.close(copy)
            raise

    def _bind_zap(self) -> Socket | None:
        if self._keys is None:
            return None
        zap: Socket = self._context.socket(zmq.REP)
        zap.setsockopt(zmq.LINGER, 0)
        zap.bind("inproc://zeromq.zap.01")
        return zap

    def _meet(self, routing_id: bytes, part: zmq.Frame) -> Peer | None:
        try:
            peer = self.peers.meet(routing_id, int(part.get(zmq.SRCFD)))
        except zmq.ZMQError:  # a part without a descriptor; its connection is gone
            return None
        if peer is not None and self._keys is not None:
            peer.key = str(part.get("User-Id"))
        return peer

    def _assembled(
        self, peer: Peer, call_id: int, header: frames.Header, pieces: list[frames.Array]
    ) -> Assembly | None:
        """The call of which this was the last piece. Its bytes count from the first piece on."""
        assembling = self.peers.assembling
        if peer not in assembling:
            if header.get("at") and call_id == peer.refused_id:
                return None
            peer.refused_id = call_id
            num_bytes = announced_bytes(header, self._limits)
            if full := self._refusal(num_bytes):
                self._send(peer, pack_error(call_id, ResourceExhausted(full), handled=False))
                return None
            assembling[peer] = Assembly(header)
        try:
            is_complete = assembling[peer].add(header, pieces)
        except BadRequest:
            del assembling[peer]
            raise
        self.peers.wait_for_piece(peer, assembling[peer])
        return assembling.pop(peer) if is_complete else None

    @property
    def assembling_bytes(self) -> int:
        """Bytes of the calls of which some pieces have arrived."""
        assembling = self.peers.assembling
        return sum(a.num_bytes for a in assembling.values()) if assembling else 0

    def _check_size(self, num_parts: int, num_bytes: int) -> None:
        limits = self._limits
        if num_parts > limits.arrays_max + 1 or num_bytes > limits.message_bytes_max:
            raise ResourceExhausted(
                f"a message may have {limits.arrays_max + 1} parts (arrays_max and a header) and"
                f" {limits.message_bytes_max} bytes (message_bytes_max), found {num_parts} and"
                f" {num_bytes}"
            )

    def _welcome(self, peer: Peer, header: frames.Header) -> None:
        if header["t"] != frames.HELLO or header.get("magic") != frames.MAGIC:
            raise BadRequest(f"the first message must be a hello, found {header['t']!r}")
        first = frames.int_field(header, "version_min")
        last = frames.int_field(header, "version_max")
        if not first <= frames.VERSION <= last:
            raise BadRequest(
                f"{self._name} speaks protocol version {frames.VERSION}, "
                f"found a client that speaks {first} to {last}"
            )
        peer.name = frames.str_field(header, "name")
        peer.message_bytes_max = frames.int_field(header, "message_bytes_max", low=1)
        # A client of before there were pieces takes what fits a message.
        whole = {"call_bytes_max": peer.message_bytes_max} | header
        peer.call_bytes_max = frames.int_field(whole, "call_bytes_max", low=1)
        self.peers.welcome(peer)
        welcome = {"t": frames.WELCOME, "version": frames.VERSION, "name": self._name}
        welcome |= {name: getattr(self._limits, name) for name in frames.CREDIT}
        welcome["call_bytes_max"] = self._limits.total_bytes_max
        if self._state:
            welcome["state"] = self._state
        if "shared" in header and (num_bytes := self._share(peer, header["shared"])):
            welcome["shared"] = num_bytes
        self._send(peer, frames.pack(welcome, ()))

    def _share(self, peer: Peer, offer: Any) -> int:
        """Open the memory that a client offers; returns how many bytes of it. Raises BadRequest."""
        try:
            num_bytes_max = self.peers.room_to_share() if peer.is_here else 0
            if num_bytes_max < SHARED_BYTES_MIN:
                return 0
            memory = opened(offer, num_bytes_max)
        except OSError as error:
            _log.info("%s: the memory of %s cannot be shared: %s", self._name, peer, error)
            return 0
        self.peers.share(peer, memory)
        return len(memory)

    def _send_reply(self, peer: Peer, request_id: int, reply: Reply) -> TriremeError | None:
        """Send a reply; returns an error if it cannot be sent."""
        try:
            header = {"t": frames.REPLY, "id": request_id, "b": reply.body}
            parts = frames.pack(header, reply.arrays, reply.places)
        except BadRequest as error:  # the fault is the handler's, not the request's
            return Internal(f"the handler's reply: {error}")
        if reply.places and len(parts[0]) > self._limits.header_bytes_max:  # because of them
            return self._send_reply(peer, request_id, Reply(reply.body, reply.arrays))
        num_bytes = sum([len(part) for part in parts])
        num_shared = frames.shared_bytes(reply.arrays, reply.places)
        if num_bytes + num_shared > peer.call_bytes_max:
            return ResourceExhausted(
                f"the client takes replies of {peer.call_bytes_max} bytes, found one of"
                f" {num_bytes + num_shared}"
            )
        self.num_bytes_out += num_shared
        if num_bytes <= peer.message_bytes_max:
            self._send(peer, parts)
            return None
        try:
            for message in cut(parts, request_id, peer.message_bytes_max):
                self._send(peer, message)
        except ResourceExhausted as error:
            return error
        return None

    def _send(self, peer: Peer, parts: Sequence[Any]) -> None:
        try:
            self.socket.send(peer.routing_id, _MORE)
            for part in parts[:-1]:
                self.socket.send(part, _MORE, copy=len(part) < COPY_BYTES_MAX)
            self.socket.send(parts[-1], _LAST, copy=len(parts[-1]) < COPY_BYTES_MAX)
        except zmq.Again:  # ROUTER_MANDATORY: its queue is full
            self.peers.drop(peer, "it does not take its replies")
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:  # the peer is gone: no caller waits for the answer
                raise
        else:
            num_bytes = sum([frames.wire_bytes(len(p), self._is_curve) for p in parts])
            self.peers.note_sent(peer, num_bytes)
            self.num_bytes_out += num_bytes


def _request(
    id: int, header: frames.Header, arrays: list[frames.Array], peer: Peer, reply_bytes_max: int
) -> Request:
    timeout_ms = frames.int_field(header, "ms", high=frames.TIMEOUT_MS_MAX)
    return Request(
        id=id,
        method=frames.str_field(header, "m"),
        body=frames.map_field(header, "b"),
        arrays=arrays,
        peer=peer.name,
        address=peer.address,
        key=peer.key,
        deadline=time.monotonic() + timeout_ms / 1000,
        reply_bytes_max=reply_bytes_max,
    )


def _room(header: frames.Header, peer: Peer) -> tuple[int, int] | None:
    """(start, size) of the shared memory that a call reserves for its reply. Raises BadRequest."""
    if (room := header.get("room")) is None:
        return None
    num_bytes = 0 if peer.shared is None else len(peer.shared)
    if type(room) is not list or [*map(type, room)] != [int, int]:
        raise BadRequest(f"rpc: expected room as [start, size], found {repr(room)[:80]}")
    start, size = room
    if min(start, size) < 0 or start + size > num_bytes:
        raise BadRequest(
            f"rpc: expected room in {num_bytes} bytes of shared memory, found {room}"[:200]
        )
    return start, size
