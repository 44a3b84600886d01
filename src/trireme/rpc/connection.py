"""A client's connection to one server: connect, handshake, send within credit, receive, reconnect.

A connection is a state machine that never waits: the client polls its sockets and calls `advance`,
`receive` and `watch`. Each DEALER socket is used once. When it is lost it is closed, and every
request without an answer is sent again, with the same id, on the next one.
"""

import contextlib
import dataclasses
import logging
import math
import random
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import zmq

from trireme.errors import (
    BadRequest,
    Corruption,
    Internal,
    NotAdmitted,
    ResourceExhausted,
    TriremeError,
    Unavailable,
    class_of_code,
)
from trireme.rpc import frames
from trireme.rpc.auth import ClientKeys, secure_client
from trireme.rpc.errors_on_wire import error_of
from trireme.rpc.limits import Limits
from trireme.rpc.messages import Call, Reply
from trireme.rpc.pieces import Assembly, announced_bytes, cut
from trireme.rpc.shared_memory import SharedMemory
from trireme.rpc.sockets import Context, Socket, dealer, has_input, looked_up, url

_log = logging.getLogger("trireme.rpc")

_BACKOFF_S_MIN, _BACKOFF_S_MAX = 0.02, 0.5
_LOOKUP_S = 0.005  # between looks whether a name has been looked up
_REFUSED_S = 2.0  # a machine that is there refuses a connection sooner
_UNANSWERED = "its machine is off, or a network or firewall between drops what is sent"
# Time for ZeroMQ to release the arrays of a connection that is closed.
_RELEASE_TIMEOUT_S = 5.0

_LOST = (
    zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


class ConnectionState(Enum):
    CLOSED = "closed"  # until `retry_at`
    GREETING = "greeting"  # hello sent, welcome awaited
    READY = "ready"


@dataclass(slots=True, eq=False)
class PendingCall:
    """A call that waits to be sent, waits for its answer, or is answered."""

    call: Call
    id: int
    deadline: float
    num_bytes: int = 0
    num_bytes_received: int = 0  # of its answer
    num_sent: int = 0  # times
    refused: type[TriremeError] | None = None  # the last error that asked to call again
    not_before: float = 0.0
    answer: Reply | TriremeError | None = None
    _buffers: list[weakref.ref[memoryview]] = field(default_factory=list)  # that ZeroMQ reads from
    _allocated: list[int] = field(default_factory=list)  # starts in the shared memory

    def pack(self, now: float, shared: SharedMemory | None) -> list[Any]:
        """The message, with the remaining time; large arrays in shared memory, if there is any."""
        remaining_ms = min(max(1, int((self.deadline - now) * 1000)), frames.TIMEOUT_MS_MAX)
        header = {"t": frames.CALL, "id": self.id, "m": self.call.method, "ms": remaining_ms}
        header["b"] = self.call.body
        places: list[frames.Place] = []
        if shared is not None:
            places, start = shared.put(self.call.arrays)
            self._allocated += [] if start is None else [start]
            if (room := shared.reserve(self.call.method)) is not None:
                header["room"] = list(room)
                self._allocated.append(room[0])
        parts = frames.pack(header, self.call.arrays, places)
        self.num_bytes = sum(map(len, parts)) + frames.shared_bytes(self.call.arrays, places)
        return parts

    def free(self, shared: SharedMemory | None) -> None:
        """Free the shared memory of a call that is answered, or was not sent. None: it is gone."""
        while self._allocated:
            start = self._allocated.pop()
            if shared is not None:
                shared.free(start)

    def note_buffers(self, parts: list[Any]) -> None:
        """Remember the buffers that ZeroMQ reads from."""
        self._buffers += [weakref.ref(part) for part in parts if isinstance(part, memoryview)]

    def wait_released(self) -> None:
        """Wait until ZeroMQ has released all arrays, so that the caller may change them."""
        for buffer in self._buffers:
            if (view := buffer()) is None:
                continue
            released = threading.Event()
            watch = weakref.finalize(view, released.set)
            del view
            if not released.wait(_RELEASE_TIMEOUT_S):
                watch.detach()
                raise Internal(
                    f"{self.call.method}: ZeroMQ must release a closed connection's arrays in "
                    f"{_RELEASE_TIMEOUT_S} s, found them in use"
                )


class Connection:
    """The connection of a client to `endpoint`. Not thread-safe; its client owns it."""

    def __init__(
        self,
        context: Context,
        endpoint: str,
        name: str,
        limits: Limits,
        keys: ClientKeys | None,
        states: Mapping[str, str],
        poll: Callable[[Socket, Callable[[], None] | None], None],
    ) -> None:
        self.endpoint = endpoint
        self.server_name = ""
        self.state = ConnectionState.CLOSED
        self._is_old = False  # made for calls that have ended
        self._hint = ""  # the last failure
        self._context, self._name, self._limits, self._keys = context, name, limits, keys
        self._states = states  # endpoint -> name of what its server holds
        self._poll = poll  # (socket, action when it is readable; None: stop polling it)
        self._retry_at = 0.0
        self._unreached_since = -math.inf  # unless it is ready
        self._random = random.Random()  # not the global generator, which scripts may seed
        self._num_failures = 0
        self._num_attempts = 0  # to connect
        self._lookup: Future[list[str]] | None = None  # under way
        self._give_up_at = 0.0
        self._queue: deque[PendingCall] = deque()
        self._sent: dict[int, PendingCall] = {}
        self._num_bytes_sent = 0
        self._is_sending = False  # also when the connection was lost in the middle of a call
        self._credit = limits  # the server's, from its welcome
        self._assembly: Assembly | None = None  # a reply of which some pieces have arrived
        self._shared: SharedMemory | None = None  # with the server, if it is on this machine

    def __str__(self) -> str:
        return f"{self.endpoint} ({self.server_name})" if self.server_name else self.endpoint

    @property
    def status(self) -> str:
        """The reason for which calls wait, as text for messages."""
        if self.state is ConnectionState.READY:
            return f"no answer ({self._hint})" if self._hint else "no answer"
        return f"not reached ({self._hint})" if self._hint else "not reached"

    def unreached_s(self, now: float) -> float:
        """For how long the server has not been reached."""
        return 0.0 if self.state is ConnectionState.READY else now - self._unreached_since

    def put(self, pending: PendingCall) -> None:
        self._queue.append(pending)

    def advance(self, now: float) -> float:
        """Do what is due: connect, give up a handshake, send what the credit allows.

        Returns:
            The time.monotonic() when something is due again, if nothing is received before.
        """
        if self.state is ConnectionState.CLOSED:
            if now < self._retry_at:
                return self._retry_at
            self._connect(now)
            if self.state is ConnectionState.CLOSED:
                return self._retry_at
        if self.state is ConnectionState.GREETING:
            if now < self._give_up_at:
                return self._give_up_at
            self._lose("connected, but no welcome came")
            return self._retry_at
        return self._send(now)

    def abandon(self) -> None:
        """Drop all unanswered calls; close the connection if one has been sent, or a part of one.
        Waits until ZeroMQ has released their arrays.
        """
        unanswered = [*self._sent.values(), *self._queue]
        if self._sent or self._is_sending:
            self.close()
        for pending in unanswered:
            pending.free(self._shared)
        self._sent.clear()
        self._queue.clear()
        self._num_bytes_sent = 0
        self._is_old = True
        for pending in unanswered:
            pending.wait_released()

    def close(self) -> None:
        if self.state is ConnectionState.READY:
            self._unreached_since = time.monotonic()
        if self.state is not ConnectionState.CLOSED:
            self.state = ConnectionState.CLOSED
            self._retry_at = 0.0
            self._poll(self._socket, None)
            self._poll(self._monitor, None)
            self._socket.disable_monitor()
            self._monitor.close()
            self._socket.close()
            self._assembly, self._is_sending = None, False
            self._share_nothing()

    def _share_nothing(self) -> None:
        """Calls on their way may still use the memory, so a later connection has another one."""
        if self._shared is not None:
            self._shared.close()
            self._shared = None
        for pending in [*self._sent.values(), *self._queue]:
            pending.free(None)

    def _connect(self, now: float) -> None:
        self._lookup = self._lookup or looked_up(self.endpoint)  # a server may come back at another
        if not self._lookup.done():
            self._retry_at = now + _LOOKUP_S
            self._hint = self._hint or "its name is being looked up"
            return
        lookup, self._lookup = self._lookup, None
        try:
            addresses = lookup.result()
        except (OSError, UnicodeError) as error:  # a name in DNS may come with its server
            self._lose(f"the name has no address: {getattr(error, 'strerror', None) or error}")
            return
        # The server may listen on one of them only.
        address = addresses[self._num_attempts % len(addresses)]
        self._num_attempts += 1
        self._socket = dealer(self._context, self._limits)
        secure_client(self._socket, self._keys)
        self._monitor = self._socket.get_monitor_socket(_LOST)
        self._monitor.setsockopt(zmq.LINGER, 0)
        self._poll(self._socket, self._receive)
        self._poll(self._monitor, self._watch)
        self.state, self._is_old = ConnectionState.GREETING, False
        self._give_up_at = now + self._limits.handshake_timeout_s
        try:
            self._socket.connect(url(self._socket, address))
        except zmq.ZMQError as error:
            self.close()
            raise BadRequest(
                f"RpcClient.call: endpoint must be host:port, found {self.endpoint!r}: {error}"
            ) from error
        hello: frames.Header = {"t": frames.HELLO, "magic": frames.MAGIC}
        hello |= {"version_min": frames.VERSION, "version_max": frames.VERSION}
        hello |= {"name": self._name, "message_bytes_max": self._limits.message_bytes_max}
        hello["call_bytes_max"] = self._limits.total_bytes_max
        if self._limits.shared_bytes_max:
            try:
                self._shared = SharedMemory(self._limits.shared_bytes_max)
                hello["shared"] = self._shared.offer()
            except OSError as error:
                _log.info("%s: no memory to share: %s", self._name, error)
        with contextlib.suppress(zmq.Again):  # it failed already; the monitor will report it
            self._socket.send_multipart(frames.pack(hello, ()), zmq.NOBLOCK)

    def _lose(self, failure: str) -> None:
        """Close a lost connection, and queue its unanswered calls again in their order, but those
        that are made once.
        """
        self.close()
        self._hint = failure
        waiting = [*self._sent.values(), *self._queue]
        for pending in waiting:
            if pending.call.once and pending.answer is None:
                pending.answer = Unavailable(failure)
        self._queue = deque(pending for pending in waiting if pending.answer is None)
        self._sent.clear()
        self._num_bytes_sent = 0
        # Half of the pause is random, so that clients of a restarted server do not reconnect all at
        # once.
        pause_s = min(_BACKOFF_S_MAX, _BACKOFF_S_MIN * 2**self._num_failures)
        self._retry_at = time.monotonic() + pause_s * (0.5 + self._random.random() / 2)
        self._num_failures = min(self._num_failures + 1, 16)

    def _refuse(self, error: TriremeError) -> None:
        """End every call: no retry can help."""
        for pending in [*self._sent.values(), *self._queue]:
            pending.answer = error
        self._lose(str(error))
        self._queue.clear()

    def _send(self, now: float) -> float:
        while self._queue:
            pending = self._queue[0]
            if pending.not_before > now:
                return pending.not_before
            try:
                messages = self._messages(pending, now)
            except TriremeError as error:
                pending.free(self._shared)
                pending.answer = error
                self._queue.popleft()
                continue
            if self._sent and (
                len(self._sent) >= self._credit.requests_max
                or self._num_bytes_sent + pending.num_bytes > self._credit.inflight_bytes_max
            ):
                pending.free(self._shared)
                break
            self._is_sending = True
            try:
                for parts in messages:
                    pending.note_buffers(parts)
                    self._socket.send_multipart(parts, zmq.NOBLOCK, copy=False)
            except zmq.Again:  # the connection was just lost; the monitor will report it
                break
            self._queue.popleft()
            pending.num_sent += 1
            self._sent[pending.id] = pending
            self._num_bytes_sent += pending.num_bytes
            self._is_sending = False
        return math.inf

    def _messages(self, pending: PendingCall, now: float) -> list[list[Any]]:
        """The call as one message, or as several if it is larger."""
        parts, limits = pending.pack(now, self._shared), self._credit
        if len(parts[0]) > limits.header_bytes_max:  # perhaps because of places in shared memory
            pending.free(self._shared)
            parts = pending.pack(now, None)
        for name, size, limit in (
            ("total_bytes_max", pending.num_bytes, limits.total_bytes_max),
            ("header_bytes_max", len(parts[0]), limits.header_bytes_max),
            ("arrays_max", len(pending.call.arrays), limits.arrays_max),
        ):
            if size > limit:
                raise ResourceExhausted(f"the server's {name} is {limit}, found {size}")
        if sum(map(len, parts)) <= limits.message_bytes_max:
            return [parts]
        return list(cut(parts, pending.id, limits.message_bytes_max))

    def _receive(self) -> None:
        while self.state is not ConnectionState.CLOSED and has_input(self._socket):
            parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            memory = None if self._shared is None else self._shared.bytes
            try:
                header, arrays = frames.unpack(parts, self._limits, memory)
                num_bytes = sum(map(len, parts))
                if header["t"] == frames.PIECE:
                    if (whole := self._assembled(header, arrays)) is None:
                        continue
                    header, arrays = frames.unpack(whole.parts, self._limits, memory)
                    num_bytes = whole.num_bytes
                places = frames.places_of(header)
                num_bytes += frames.shared_bytes(arrays, places)
                self._take(header, frames.own(arrays, places), num_bytes)
            except (BadRequest, ResourceExhausted) as error:
                self._lose(f"the server sent a malformed message: {error}")

    def _assembled(self, header: frames.Header, pieces: list[frames.Array]) -> Assembly | None:
        """The reply of which this was the last piece."""
        if self._assembly is None:
            announced_bytes(header, self._limits)
            self._assembly = Assembly(header)
        if not self._assembly.add(header, pieces):
            return None
        whole, self._assembly = self._assembly, None
        return whole

    def _take(self, header: frames.Header, arrays: list[frames.Array], num_bytes: int) -> None:
        kind = header["t"]
        if kind == frames.WELCOME:
            self._welcomed(header)
            return
        request_id = frames.int_field(header, "id")
        if kind == frames.ERROR and request_id == 0:
            self._refuse(error_of(header))
            return
        pending = self._sent.pop(request_id, None)
        if pending is None:  # a second answer to a request that was sent twice
            return
        self._num_bytes_sent -= pending.num_bytes
        pending.num_bytes_received += num_bytes
        pending.free(self._shared)
        if self._shared is not None:
            self._shared.note_reply(pending.call.method, arrays)
        if kind == frames.REPLY:
            pending.answer = Reply(frames.map_field(header, "b"), arrays)
        elif header.get("handled", True):
            pending.answer = error_of(header)
        elif pending.call.once:
            pending.answer = error_of(header)
            if isinstance(pending.answer, ResourceExhausted):
                pending.answer.details = {"full": True}
        else:
            self._num_failures = min(self._num_failures + 1, 16)
            pause_s = min(_BACKOFF_S_MAX, _BACKOFF_S_MIN * 2**self._num_failures)
            pending.not_before = time.monotonic() + pause_s
            pending.refused = class_of_code(frames.int_field(header, "code"))
            self._hint = frames.str_field(header, "message", frames.MESSAGE_CHARS_MAX)
            self._queue.appendleft(pending)

    def _welcomed(self, header: frames.Header) -> None:
        credit = {name: frames.int_field(header, name, low=1) for name in frames.CREDIT}
        # A server of before there were pieces takes what fits a message.
        whole = {"call_bytes_max": credit["message_bytes_max"]} | header
        credit["total_bytes_max"] = frames.int_field(whole, "call_bytes_max", low=1)
        self._credit = dataclasses.replace(self._limits, **credit)
        self.server_name = frames.str_field(header, "name")
        if self._shared is not None:
            num_shared = frames.int_field({"shared": 0} | header, "shared")
            if num_shared:
                self._shared.use(num_shared)
            else:
                self._share_nothing()
        # A server of before states were sent has none to compare.
        state = frames.str_field({"state": ""} | header, "state")
        if state and state != (expected := self._states.get(self.endpoint, state)):
            error = _of_another_state(self._states, expected, state)
            if self._is_old:  # made before this call: perhaps to a process that has ended since
                self._lose(str(error))
            else:
                self._refuse(error)
            return
        self.state = ConnectionState.READY
        self._hint = ""
        self._num_failures = 0

    def _watch(self) -> None:
        if self.state is ConnectionState.CLOSED or not has_input(self._monitor):
            return
        kind, value = struct.unpack("=Hi", self._monitor.recv_multipart(zmq.NOBLOCK)[0])
        self._receive()  # messages that came before the connection was lost
        self._end(kind, value)

    def _end(self, kind: int, value: int) -> None:
        if self.state is ConnectionState.CLOSED:
            return
        if kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            assert self._keys is not None  # without keys there is no such event
            message = f"the server does not admit this client's key {self._keys.own.public}:"
            message += " its file clients.pub must list it when the server starts"
            self._refuse(NotAdmitted(message))
        elif kind == zmq.EVENT_DISCONNECTED and self.state is ConnectionState.READY:
            self._lose("the connection was lost")
        elif kind == zmq.EVENT_CLOSED:
            since = self._give_up_at - self._limits.handshake_timeout_s
            was_refused = time.monotonic() - since < _REFUSED_S
            self._lose("no process listens there" if was_refused else _UNANSWERED)
        else:
            self._lose(_failed_handshake(kind, value, has_keys=self._keys is not None))


def _failed_handshake(kind: int, value: int, *, has_keys: bool) -> str:
    """What may be the cause. A process that ends, another program and a server that does not
    understand this client all just close the connection; only what answers in other words is
    certainly running.
    """
    causes = ["another program", *(["a wrong server key"] if has_keys else [])]
    if kind == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
        what = f"the handshake failed ({value:#x})"
    else:
        what = "it closed the connection before a handshake"
        causes = ["it has ended", *causes, "it has connections_max already"]
    return f"{what}: {', '.join(causes)}, or keys on one side only"


def _of_another_state(states: Mapping[str, str], expected: str, state: str) -> Corruption:
    """A server was started again without its state, or with that of another one."""
    other = next((endpoint for endpoint, name in states.items() if name == state), None)
    if other is not None:
        return Corruption(
            f"expected the server whose state is {expected}, found the state of {other}, {state};"
            " start each server again with its own --state_dir: nothing is lost, this call changed"
            " nothing"
        )
    return Corruption(
        f"expected the server whose state is {expected}, found state {state}: it has started over"
        " without its --state_dir, or with another one. Start it again with its own; if that is"
        " lost, so is what no checkpoint holds: stop all servers, empty their state folders, start"
        " the job again and load the newest checkpoint; --durability process keeps a server's state"
        " when it is killed"
    )
