"""Serves calls: one ROUTER socket, a few threads that all receive, handle and answer.

Every serving thread waits on ZeroMQ's file descriptor in one edge-triggered epoll, so the kernel
wakes exactly one per event. It takes the lock, receives everything that is there into its peers'
queues, and handles
one request after another, outside the lock, answering from the same thread: a request costs one
thread wake-up. There is one thread more than may handle at a time, so somebody always receives. A
keeper thread follows connections, authenticates them and ends requests whose deadline has passed.

Invariants:
  - The socket is used with the lock held only, and whoever used it receives until nothing is left
    (or wakes a thread that does): any use may consume the event that would have woken a thread.
  - A peer is in `_ready` if and only if its queue is not empty, no handler runs for it and it is
    not stalled.
  - A request counts against its peer's and the server's limits from arrival until it is answered.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import zmq

from trireme.errors import (
    BadRequest,
    DeadlineExceeded,
    Internal,
    ResourceExhausted,
    TriremeError,
    Unavailable,
)
from trireme.rpc import frames
from trireme.rpc.auth import ServerKeys, answer_zap, numeric_address, secure_server
from trireme.rpc.calls import Answer, Deferred, Handler, Reply, Request
from trireme.rpc.limits import Limits
from trireme.rpc.peers import TICK_S, Peer, Peers
from trireme.rpc.sockets import Socket, edges, has_input, new_context, router, url

_log = logging.getLogger("trireme.rpc")

# Messages received in one go, before answers get their turn.
_BATCH = 64
# Deferred answers are given up this long before the client gives up, so that it hears why.
_EARLY_S = 0.3
_GONE = Unavailable("the client has gone")


@dataclass(slots=True, eq=False)
class _Pending:
    """A request that is not answered yet, with what it counts."""

    peer: Peer
    request: Request
    num_bytes: int
    is_answered: bool = False


class _Fault(Exception):  # not an error of its own: carries one, with the id of its request
    def __init__(self, request_id: int, error: TriremeError) -> None:
        super().__init__(str(error))
        self.id = request_id
        self.error = error


class Server:
    """Serves `handlers` at `bind` from start() to stop(); also a context manager.

    Requests of one connection are handled in order of arrival, one at a time (a Deferred counts as
    handled when it is returned); those of different connections in parallel on `threads` threads.

    A handler's TriremeError travels to the caller; any other exception becomes INTERNAL there and
    is logged here with its traceback. Neither stops the server.

    Args:
        bind: "host:port"; port 0 chooses a free one, `endpoint` says which.
        handlers: by method name.
        name: how this server calls itself in its clients' errors.
        keys: demand CURVE of every client and admit the listed ones only. Without keys only a
            loopback address may be bound, unless `insecure`.
        threads: handlers that run at a time.
        listen_fd: a socket that listens at `bind` already, which the server takes over: whoever
            chose a free port hands it on so, and nobody else can take it in between.

    Threads: any thread may use any method.
    """

    def __init__(
        self,
        bind: str,
        handlers: Mapping[str, Handler],
        *,
        name: str,
        limits: Limits | None = None,
        keys: ServerKeys | None = None,
        insecure: bool = False,
        threads: int = 2,
        listen_fd: int | None = None,
    ) -> None:
        if threads < 1:
            raise BadRequest(f"Server: threads must be at least 1, found {threads}")
        self.name = name
        self._bind = numeric_address(bind, keys, insecure)
        self._handlers = dict(handlers)
        self._limits = limits or Limits()
        self._keys = keys
        self._num_threads = threads
        self._listen_fd = listen_fd
        self._lock = threading.Lock()
        self._ready: deque[Peer] = deque()
        self._stalled: list[Peer] = []
        self._num_running = 0
        self._num_requests = 0
        self._num_bytes = 0
        self._deferred: dict[_Pending, Deferred] = {}
        self._is_stopping = False
        self._is_closed = False
        self._endpoint = ""
        self._threads: list[threading.Thread] = []

    @property
    def endpoint(self) -> str:
        """ "host:port" that is really bound; empty before start()."""
        return self._endpoint

    def start(self) -> Server:
        """Bind and serve, in background threads.

        Raises:
            BadRequest: the address cannot be bound, or start() was called before.
        """
        if self._threads or self._is_stopping:
            raise BadRequest(f"Server.start: may be called once, found {self.name} started before")
        self._context = new_context()
        self._router = router(self._context, self._limits)
        try:
            secure_server(self._router, self._keys)
            self._zap = self._bind_zap()
            if self._listen_fd is not None:
                os.set_inheritable(self._listen_fd, False)
                self._router.setsockopt(zmq.USE_FD, self._listen_fd)
            self._router.bind(url(self._router, self._bind))
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise BadRequest(f"Server.start: cannot bind {self._bind}: {error}") from error
        bound: bytes = self._router.getsockopt(zmq.LAST_ENDPOINT)  # type: ignore[assignment]
        self._endpoint = bound.decode().removeprefix("tcp://").rstrip("\0")
        port = int(self._endpoint.rpartition(":")[2])
        self._peers = Peers(self._router, port, self._limits, self._forget)
        self._work = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._news = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._serving = edges(self._router, self._work)
        zap = [] if self._zap is None else [self._zap]
        self._keeping = edges(self._peers.monitor, self._news, *zap)
        serve = [(self._serve, f"{self.name}-serve-{i}") for i in range(self._num_threads + 1)]
        for target, thread_name in [*serve, (self._keep, f"{self.name}-keep")]:
            self._threads.append(threading.Thread(target=target, name=thread_name, daemon=True))
        for thread in self._threads:
            thread.start()
        return self

    def stop(self, timeout_s: float = 5.0) -> None:
        """Stop serving: running handlers get `timeout_s` to end; other requests are answered
        UNAVAILABLE.

        Raises:
            DeadlineExceeded: a handler still ran after `timeout_s`. The server serves no more; the
                thread stays until the handler returns.
        """
        with self._lock:
            self._is_stopping = True
            if self._is_closed or not self._threads:
                return
        os.eventfd_write(self._work, 1)
        os.eventfd_write(self._news, 1)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        alive = [thread.name for thread in self._threads if thread.is_alive()]
        if alive:
            raise DeadlineExceeded(
                f"Server.stop: handlers must end in {timeout_s} s, found running: {alive}"
            )
        with self._lock:
            self._refuse_rest()
            self._close()

    def __enter__(self) -> Server:
        return self if self._threads else self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    # Serving threads

    def _serve(self) -> None:
        while True:
            self._serving.poll()
            with self._lock:
                self._receive()
                pending = self._take()
            while pending is not None:
                answer = self._handle(pending.request)
                with self._lock:
                    self._done_running(pending, answer)
                    self._receive()
                    following = self._take()
                if isinstance(answer, Deferred):
                    answer.bind(partial(self._answer_later, pending))
                pending = following
            if self._is_stopping:
                os.eventfd_write(self._work, 1)  # wake the next one
                return

    def _handle(self, request: Request) -> Reply | Deferred | TriremeError:
        handler = self._handlers.get(request.method)
        if handler is None:
            return BadRequest(
                f"{self.name} has no such method; it has {sorted(self._handlers)}"[:500]
            )
        if request.deadline < time.monotonic():
            return DeadlineExceeded("the deadline passed before its turn came")
        try:
            answer: object = handler(request)
        except TriremeError as error:
            return error
        except Exception as error:  # noqa: BLE001 whatever it is, it ends this request, not the server
            _log.exception("%s: the handler of %s failed", self.name, request.method)
            return Internal(f"{type(error).__name__}: {error}")
        if answer is None:
            return Reply()
        if not isinstance(answer, Reply | Deferred):
            return Internal(f"a handler must return Reply, Deferred or None, found {type(answer)}")
        return answer

    def _take(self) -> _Pending | None:
        """The next request to handle, if another handler may run. Wakes a thread for the one after
        it.
        """
        while self._ready and self._num_running < self._num_threads and not self._is_stopping:
            peer = self._ready.popleft()
            if not peer.queue:  # dropped meanwhile
                continue
            if peer.is_stalled(self._limits.inflight_bytes_max):
                self._stalled.append(peer)
                continue
            pending: _Pending = peer.queue.popleft()
            peer.is_running = True
            self._num_running += 1
            if self._ready and self._num_running < self._num_threads:
                os.eventfd_write(self._work, 1)
            return pending
        return None

    def _done_running(self, pending: _Pending, answer: Reply | Deferred | TriremeError) -> None:
        peer = pending.peer
        peer.is_running = False
        self._num_running -= 1
        if peer.queue:
            self._ready.append(peer)
        if isinstance(answer, Deferred):
            self._deferred[pending] = answer
        else:
            self._answer(pending, answer)

    def _answer_later(self, pending: _Pending, answer: Answer) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._answer(pending, answer)
            if has_input(self._router):
                os.eventfd_write(self._work, 1)

    # Receiving, with the lock held

    def _receive(self) -> None:
        for _ in range(_BATCH):
            if not has_input(self._router):
                return
            self._receive_one()
        os.eventfd_write(self._work, 1)

    def _receive_one(self) -> None:
        part = self._router.recv(zmq.NOBLOCK, copy=False)
        routing_id = part.bytes
        parts: list[zmq.Frame] = []
        num_parts = num_bytes = 0
        while part.more:
            part = self._router.recv(zmq.NOBLOCK, copy=False)
            num_parts += 1
            num_bytes += len(part)
            if num_parts <= self._limits.arrays_max + 1:
                parts.append(part)
        peer = self._peers.known(routing_id) or self._meet(part)
        if peer is None or peer.is_dropped:
            return
        peer.was_active = True
        try:
            if (
                num_parts > self._limits.arrays_max + 1
                or num_bytes > self._limits.message_bytes_max
            ):
                raise ResourceExhausted(
                    f"a message may have {self._limits.arrays_max + 1} parts and "
                    f"{self._limits.message_bytes_max} bytes, found {num_parts} and {num_bytes}"
                )
            header, arrays = frames.unpack(parts, self._limits)
            self._accept(peer, routing_id, header, arrays, num_bytes)
        except _Fault as fault:
            self._fault(peer, routing_id, fault.id, fault.error)
        except TriremeError as error:
            self._fault(peer, routing_id, 0, error)

    def _meet(self, part: zmq.Frame) -> Peer | None:
        """The peer of a routing id that is new."""
        self._peers.follow()
        try:
            peer = self._peers.find(int(part.get(zmq.SRCFD)))
            if peer is not None and self._keys is not None:
                peer.key = str(part.get("User-Id"))
        except zmq.ZMQError:  # it carries no descriptor: the connection is gone
            return None
        return peer

    def _accept(
        self,
        peer: Peer,
        routing_id: bytes,
        header: frames.Header,
        arrays: list[Any],
        num_bytes: int,
    ) -> None:
        if peer.routing_id != routing_id:
            self._welcome(peer, routing_id, header)
            return
        if header["t"] != frames.CALL:
            raise BadRequest(
                f"after the welcome a client may send calls only, found {header['t']!r}"
            )
        request_id = frames.int_field(header, "id", low=1)
        try:
            request = Request(
                id=request_id,
                method=frames.str_field(header, "m"),
                body=frames.map_field(header, "b"),
                arrays=arrays,
                peer=peer.name,
                address=peer.address,
                key=peer.key,
                deadline=time.monotonic()
                + frames.int_field(header, "ms", high=frames.TIMEOUT_MS_MAX) / 1000,
            )
            self._check_credit(peer, num_bytes)
        except TriremeError as error:
            raise _Fault(request_id, error) from error
        pending = _Pending(peer, request, num_bytes)
        self._count(pending, 1)
        full = self._full()
        if full:
            self._answer(pending, ResourceExhausted(full), handled=False)
            return
        peer.queue.append(pending)
        if len(peer.queue) == 1 and not peer.is_running and peer not in self._stalled:
            self._ready.append(peer)

    def _check_credit(self, peer: Peer, num_bytes: int) -> None:
        limits = self._limits
        if peer.num_requests >= limits.requests_max:
            raise ResourceExhausted(
                f"a connection may have {limits.requests_max} requests, found one more"
            )
        if peer.num_requests and peer.num_bytes + num_bytes > limits.inflight_bytes_max:
            raise ResourceExhausted(
                f"a connection may have {limits.inflight_bytes_max} bytes of requests, found "
                f"{peer.num_bytes + num_bytes}"
            )

    def _full(self) -> str:
        limits = self._limits
        if self._num_requests > limits.total_requests_max:
            return f"{self.name} holds {limits.total_requests_max} requests: later"
        if self._num_bytes > limits.total_bytes_max and self._num_requests > 1:
            return f"{self.name} holds {limits.total_bytes_max} bytes of requests: later"
        return ""

    def _welcome(self, peer: Peer, routing_id: bytes, header: frames.Header) -> None:
        if header["t"] != frames.HELLO or header.get("magic") != frames.MAGIC:
            raise BadRequest(f"the first message must be a hello, found {header['t']!r}")
        first, last = frames.int_field(header, "v0"), frames.int_field(header, "v1")
        if not first <= frames.VERSION <= last:
            raise BadRequest(
                f"{self.name} speaks protocol version {frames.VERSION}, found a client that speaks "
                f"{first} to {last}"
            )
        peer.name = frames.str_field(header, "name")
        peer.message_bytes_max = frames.int_field(header, "message_bytes_max", low=1)
        self._peers.welcome(peer, routing_id)
        self._send(
            peer,
            frames.pack(
                {
                    "t": frames.WELCOME,
                    "v": frames.VERSION,
                    "name": self.name,
                    "requests_max": self._limits.requests_max,
                    "inflight_bytes_max": self._limits.inflight_bytes_max,
                    "message_bytes_max": self._limits.message_bytes_max,
                    "header_bytes_max": self._limits.header_bytes_max,
                    "arrays_max": self._limits.arrays_max,
                },
                (),
            ),
        )

    def _fault(self, peer: Peer, routing_id: bytes, request_id: int, error: TriremeError) -> None:
        peer.num_faults += 1
        if peer.num_faults > self._limits.faults_max:
            self._peers.drop(peer, f"{peer.num_faults} faults, the last: {error}")
            return
        self._send(peer, frames.pack(_error_header(request_id, error), ()), routing_id)

    # Answering, with the lock held

    def _answer(self, pending: _Pending, answer: Answer, handled: bool = True) -> None:
        if pending.is_answered:
            return
        pending.is_answered = True
        self._deferred.pop(pending, None)
        self._count(pending, -1)
        if pending.peer.is_dropped:
            return
        self._send(pending.peer, self._pack(pending, answer, handled))

    def _pack(self, pending: _Pending, answer: Answer, handled: bool) -> list[Any]:
        request_id = pending.request.id
        if isinstance(answer, Reply):
            try:
                parts = frames.pack(
                    {"t": frames.REPLY, "id": request_id, "b": answer.body}, answer.arrays
                )
                num_bytes = sum(map(len, parts))
                if num_bytes <= pending.peer.message_bytes_max:
                    return parts
                answer = ResourceExhausted(
                    f"the reply may have {pending.peer.message_bytes_max} bytes, found {num_bytes}"
                )
            except BadRequest as error:  # what the handler returned is at fault, not the request
                answer = Internal(str(error))
        return frames.pack(_error_header(request_id, answer, handled), ())

    def _send(self, peer: Peer, parts: Sequence[Any], routing_id: bytes = b"") -> None:
        try:
            self._router.send_multipart(
                [routing_id or peer.routing_id, *parts], zmq.NOBLOCK, copy=False
            )
        except zmq.Again:
            self._peers.drop(peer, "it does not take its replies")
        except zmq.ZMQError as error:
            if (
                error.errno != zmq.EHOSTUNREACH
            ):  # the peer has gone, so has its interest in the answer
                raise
        else:
            peer.num_bytes_out += frames.wire_bytes(parts, is_curve=self._keys is not None)

    def _count(self, pending: _Pending, sign: int) -> None:
        pending.peer.num_requests += sign
        pending.peer.num_bytes += sign * pending.num_bytes
        self._num_requests += sign
        self._num_bytes += sign * pending.num_bytes

    # The keeper thread

    def _keep(self) -> None:
        while not self._is_stopping:
            self._keeping.poll(TICK_S if self._has_duties() else None)
            with self._lock:
                if self._zap is not None and self._keys is not None:
                    answer_zap(self._zap, self._keys)
                self._peers.follow()
                self._peers.check()
                self._resume_stalled()
            self._expire()

    def _has_duties(self) -> bool:
        with self._lock:
            return bool(len(self._peers) or self._deferred)

    def _expire(self) -> None:
        """Without the lock: describing what is waited for may take locks of the handlers'."""
        now = time.monotonic()
        with self._lock:
            late = [
                (pending, deferred)
                for pending, deferred in self._deferred.items()
                if pending.request.deadline - _EARLY_S < now
            ]
        for pending, deferred in late:
            self._answer_later(pending, DeadlineExceeded(deferred.describe()))

    def _resume_stalled(self) -> None:
        stalled, self._stalled = self._stalled, []
        for peer in stalled:
            if peer.is_stalled(self._limits.inflight_bytes_max):
                self._stalled.append(peer)
            elif peer.queue and not peer.is_running:
                self._ready.append(peer)
                os.eventfd_write(self._work, 1)

    def _forget(self, peer: Peer) -> None:
        """The peer is gone or dropped: nobody waits for what it had asked."""
        for pending in [*peer.queue, *(p for p in self._deferred if p.peer is peer)]:
            self._answer(pending, _GONE)
        peer.queue.clear()

    # Ending

    def _bind_zap(self) -> Socket | None:
        if self._keys is None:
            return None
        zap = self._context.socket(zmq.REP)
        zap.setsockopt(zmq.LINGER, 0)
        zap.bind("inproc://zeromq.zap.01")
        return zap

    def _refuse_rest(self) -> None:
        error = Unavailable(f"{self.name} stops")
        for pending in [*self._deferred, *(p for peer in self._peers for p in peer.queue)]:
            self._answer(pending, error, handled=False)

    def _close(self) -> None:
        self._is_closed = True
        self._router.disable_monitor()
        self._peers.close()
        if self._zap is not None:
            self._zap.close()
        self._router.close()
        self._context.term()
        self._serving.close()
        self._keeping.close()
        os.close(self._work)
        os.close(self._news)


def _error_header(request_id: int, error: TriremeError, handled: bool = True) -> frames.Header:
    header = {
        "t": frames.ERROR,
        "id": request_id,
        "code": error.code,
        "name": error.name,
        "message": str(error)[: frames.MESSAGE_CHARS_MAX],
        "handled": handled,
    }
    return header | ({"details": error.details} if error.details else {})
