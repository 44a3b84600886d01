"""Serves calls: one ROUTER socket, a few threads that all receive, handle and answer.

Every serving thread waits on ZeroMQ's file descriptor in one edge-triggered epoll, so the kernel
wakes exactly one thread per event. It takes the lock, receives all waiting messages into the peers'
queues, and then handles requests outside the lock, answering from the same thread: a request costs
one thread wake-up. One thread more exists than handlers may run, so one is always free to receive.
A keeper thread observes connections, authenticates them and ends requests at their deadlines.

Answers of quick requests wait for a moment while others are ready to be handled, and those that a
handler gives to deferred requests until it returns. They leave together: an answer by itself wakes
ZeroMQ's thread, which takes longer than to handle an empty push. If a handler proves slow, another
thread or the keeper sends them.

Invariants:
  - The socket is used with the lock held only. A thread that used it receives until nothing is left
    or wakes another thread: any use may consume the event that would have woken one. Likewise a
    thread that leaves something in `_ready` wakes another if one may be idle.
  - A peer is in `_ready` if and only if its queue is not empty, no handler runs for it and it is
    not stalled.
  - A request counts against its peer's and the server's limits from arrival until it is answered.
  - While an answer is in `_unsent`, a handler or the keeper runs, or a thread has been woken.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import TypeVar

import zmq

from trireme.errors import (
    BadRequest,
    DeadlineExceeded,
    Internal,
    ResourceExhausted,
    TriremeError,
    Unavailable,
    as_error,
    check_counts,
    start_thread,
)
from trireme.rpc.auth import ServerKeys, numeric_address
from trireme.rpc.frames import Place, own
from trireme.rpc.limits import Limits
from trireme.rpc.messages import Answer, Deferred, Handler, Reply, Request, RequestObserver, Usage
from trireme.rpc.peers import TICK_S, Peer
from trireme.rpc.server_socket import ReceivedRequest, ServerSocket
from trireme.rpc.shared_memory import copy_into
from trireme.rpc.sockets import OTHER_FILES, allow_descriptors, edges

_log = logging.getLogger("trireme.rpc")
_T = TypeVar("_T")

# Messages received at a time, before answers are sent.
_BATCH = 64
# An answer waits for those of requests that are handled within this time.
_TOGETHER_S = 0.0002
# A deferred request ends this long before the client's deadline, so that the client learns why.
_EARLY_S_MAX = 0.3
_CALLS_SHOWN = 4  # of a handler that does not end
_DESCRIPTORS = 2  # of a connection: ZeroMQ's and the copy of peers.py
_GONE = Unavailable("the client has gone")


def open_files_needed(limits: Limits) -> int:
    """The hard limit of open files that a server with these limits needs."""
    return _DESCRIPTORS * limits.connections_max + OTHER_FILES


def connections_within(open_files: int) -> int:
    """The largest `connections_max` of a server with this hard limit; below 1: none."""
    return (open_files - OTHER_FILES) // _DESCRIPTORS


@dataclass(slots=True, eq=False)
class _PendingRequest:
    """A request that is not answered yet."""

    peer: Peer
    id: int
    method: str
    num_bytes: int
    give_up_at: float
    arrived: float
    request: Request | None  # until it is handled: a deferred request keeps no arrays
    places: list[Place]  # of its arrays
    room: tuple[int, int] | None  # in shared memory, for its reply
    is_answered: bool = False
    # Locked by whoever answers: another answer would write into room that the client has allocated
    # for other calls since.
    turn: threading.Lock = field(default_factory=threading.Lock)

    def take_request(self) -> Request:
        request, self.request = self.request, None
        assert request is not None
        return request

    def take_turn(self) -> bool:
        """Whether the caller is the one who answers. Threads: any."""
        return self.turn.acquire(blocking=False)


class Server:
    """Serves `handlers` at `bind` from start() to stop(); also a context manager.

    Requests of one connection are handled in order of arrival, one at a time (a Deferred counts as
    handled when it is returned); those of different connections in parallel on `threads` threads.

    A handler's TriremeError travels to the caller; any other exception becomes INTERNAL there and
    is logged here with its traceback. Neither stops the server.

    Args:
        bind: "host:port"; port 0 chooses a free one, `endpoint` says which.
        handlers: by method name.
        name: of this server, in errors of its clients.
        keys: require CURVE and admit the listed clients only. Without keys only a loopback address
            may be bound, unless `insecure`.
        threads: handlers that run at a time.
        listen_fd: a socket that listens at `bind` already, which the server takes over, so that no
            other process can take a free port between choosing and binding it.
        observe: called for every request when it is answered.
        state: names what this process holds; every connection learns it before its first call.
            Empty: nothing that clients rely on.

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
        observe: RequestObserver | None = None,
        state: str = "",
    ) -> None:
        check_counts("Server", threads=threads)
        self.name = name
        self._bind = numeric_address(bind, keys, insecure)
        self._handlers = dict(handlers)
        self._limits = limits or Limits()
        self._keys = keys
        self._num_threads = threads
        self._listen_fd = listen_fd
        self._observe, self._state = observe, state
        self._lock = threading.Lock()
        self._ready: deque[Peer] = deque()
        self._stalled: list[Peer] = []
        self._running: dict[_PendingRequest, int] = {}  # and the thread of its handler
        self._num_requests = 0
        self._num_bytes = 0
        self._deferred: dict[_PendingRequest, Deferred] = {}
        self._unsent: deque[tuple[_PendingRequest, Answer]] = deque()  # any thread may append
        self._unsent_since = 0.0
        self._serving_ids: set[int] = set()  # of the threads that serve
        self._is_stopping = False
        self._is_closed = False
        self._is_keeper_idle = True
        self.endpoint = ""  # "host:port" that is bound, after start()
        self._threads: list[threading.Thread] = []

    def start(self) -> Server:
        """Bind and serve, in background threads.

        Raises:
            BadRequest: the address cannot be bound, start() was called before, or the system allows
                too few open files for `connections_max`.
            ResourceExhausted: the system refuses a thread.
        """
        if self._threads or self._is_stopping:
            raise BadRequest(f"Server.start: may be called once, found {self.name} started before")
        num = self._limits.connections_max
        allow_descriptors(
            _DESCRIPTORS * num, f"{self.name} with connections_max={num} (--limits, TRIREME_LIMITS)"
        )
        self._socket = ServerSocket(
            self.name,
            self._bind,
            self._limits,
            self._keys,
            self._listen_fd,
            self._forget,
            self._refusal,
            self._state,
        )
        self.endpoint = self._socket.endpoint
        self._work = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._news = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._serving = edges(self._socket.socket, self._work)
        zap = [] if self._socket.zap is None else [self._socket.zap]
        self._keeping = edges(self._socket.peers.monitor, self._news, *zap)
        serve = [(self._serve, f"{self.name}-serve-{i}") for i in range(self._num_threads + 1)]
        for target, thread_name in [*serve, (self._keep, f"{self.name}-keep")]:
            thread = threading.Thread(target=target, name=thread_name, daemon=True)
            try:
                start_thread(thread)
            except TriremeError:
                self.stop()
                raise
            self._threads.append(thread)
        return self

    def stop(self, timeout_s: float = 5.0) -> None:
        """Stop serving: running handlers get `timeout_s` to end; other requests get UNAVAILABLE.

        Raises:
            DeadlineExceeded: a handler still runs after `timeout_s`. The server serves no more; its
                threads end when the handler returns. Calling again is allowed.
        """
        with self._lock:
            self._is_stopping = True
            if self._is_closed or not self.endpoint:  # it was not started
                return
        os.eventfd_write(self._work, 1)
        os.eventfd_write(self._news, 1)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        with self._lock:
            if any(thread.is_alive() for thread in self._threads):
                frames = sys._current_frames()
                running = [
                    f"{pending.method} ({_place(frames.get(thread))})"
                    for pending, thread in self._running.items()
                ]
                raise DeadlineExceeded(
                    f"Server.stop: handlers must end in {timeout_s} s, found running:"
                    f" {', '.join(sorted(running)) or 'none, but a thread that serves'}"
                )
            self._refuse_rest()
            self._close()

    def usage(self) -> Usage:
        """The requests and bytes that it holds now and has processed."""
        with self._lock:
            self._flush()
            running, deferred = len(self._running), len(self._deferred)
            return Usage(
                queued=self._num_requests - running - deferred,
                running=running,
                deferred=deferred,
                num_bytes=self._held_bytes(),
                connections=len(self._socket.peers),
                num_bytes_in=self._socket.num_bytes_in,
                num_bytes_out=self._socket.num_bytes_out,
                num_faults=self._socket.num_faults,
            )

    def waits(self, methods: Collection[str], num_max: int) -> list[str]:
        """What the first answers to these methods wait for, where it is not ready."""
        with self._lock:
            deferred = [d for p, d in self._deferred.items() if p.method in methods]
        return [one.describe() for one in deferred[:num_max]]

    def __enter__(self) -> Server:
        return self if self._threads else self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    # Serving threads

    def _serve(self) -> None:
        self._serving_ids.add(threading.get_ident())
        while True:
            self._serving.poll()
            with self._lock:
                self._send_unsent()
                self._receive()
                pending = self._take()
            while pending is not None:
                start = time.monotonic()
                answer = _placed(pending, self._handle(pending, start))
                with self._lock:
                    self._done_running(pending, answer, start)
                    if not self._ready or time.monotonic() - self._unsent_since > _TOGETHER_S:
                        self._send_unsent()
                    self._receive()
                    following = self._take()
                if isinstance(answer, Deferred):
                    answer.bind(partial(self._answer_later, pending))
                if following is None and self._unsent:
                    os.eventfd_write(self._work, 1)  # a thread comes to send them
                pending = following
            if self._is_stopping:
                os.eventfd_write(self._work, 1)  # wake the next one
                return

    def _handle(self, pending: _PendingRequest, now: float) -> Reply | Deferred | TriremeError:
        request = pending.take_request()
        handler = self._handlers.get(request.method)
        if handler is None:
            return BadRequest(
                f"{self.name} has no such method; it has {sorted(self._handlers)}"[:500]
            )
        if request.deadline < now:
            return DeadlineExceeded("the deadline passed before its turn came")
        try:
            request.arrays = own(request.arrays, pending.places)
            answer: object = handler(request)
        except TriremeError as error:
            # Its frames hold what the request had, as room in tables that the next one waits for.
            error.__cause__ = error.__context__ = None
            return error.with_traceback(None)
        except Exception as error:  # noqa: BLE001 ends this request, not the server
            _log.exception("%s: the handler of %s failed", self.name, request.method)
            return as_error(error)
        if answer is None:
            return Reply()
        if not isinstance(answer, Reply | Deferred):
            return Internal(f"a handler must return Reply, Deferred or None, found {type(answer)}")
        return answer

    def _take(self) -> _PendingRequest | None:
        """The next request, if another handler may run. Wakes a thread for the one after that."""
        while self._ready and len(self._running) < self._num_threads and not self._is_stopping:
            peer = self._ready.popleft()
            if not peer.queue:  # dropped meanwhile
                continue
            if peer.is_stalled(self._limits.inflight_bytes_max):
                self._stalled.append(peer)
                continue
            pending: _PendingRequest = peer.queue.popleft()
            peer.is_running = True
            self._running[pending] = threading.get_ident()
            if self._ready and len(self._running) < self._num_threads:
                os.eventfd_write(self._work, 1)
            return pending
        return None

    def _done_running(
        self, pending: _PendingRequest, answer: Reply | Deferred | TriremeError, start: float
    ) -> None:
        """start: when its handler began."""
        peer = pending.peer
        peer.is_running = False
        del self._running[pending]
        if peer.queue:
            self._ready.append(peer)
        if isinstance(answer, Deferred):
            self._deferred[pending] = answer
            return
        if not self._unsent:
            self._unsent_since = start
        self._unsent.append((pending, answer))

    def _send_unsent(self) -> None:
        while self._unsent:
            self._answer(*self._unsent.popleft())

    def _flush(self) -> None:
        """As `_send_unsent`, on a thread that does not receive."""
        if self._unsent:
            os.eventfd_write(self._work, 1)  # sending may consume the event of a message
            self._send_unsent()

    def _answer_later(self, pending: _PendingRequest, answer: Answer) -> None:
        if not pending.take_turn():
            return
        answer = _placed(pending, answer)
        if threading.get_ident() in self._serving_ids and len(self._unsent) < _BATCH:
            # Without the lock: a handler may answer a thousand deferred requests.
            self._unsent.append((pending, answer))
            return
        with self._lock:
            if self._is_closed:
                return
            self._unsent.append((pending, answer))
            self._send_unsent()
            if self._socket.has_input():
                os.eventfd_write(self._work, 1)

    # With the lock held

    def _receive(self) -> None:
        if self._socket.has_input():
            self._receive_some()
        if self._is_keeper_idle and self._has_duties():
            # Meeting a peer has consumed the monitor's event, which would have woken the keeper.
            self._is_keeper_idle = False
            os.eventfd_write(self._news, 1)

    def _receive_some(self) -> None:
        for _ in range(_BATCH):
            try:
                received = self._socket.receive()
            except zmq.Again:  # costs less than asking before each message
                return
            if received is not None:
                self._accept(received)
        os.eventfd_write(self._work, 1)

    def _accept(self, received: ReceivedRequest) -> None:
        peer, request = received.peer, received.request
        if excess := self._credit_excess(received):
            self._socket.fault(peer, request.id, ResourceExhausted(excess))
            return
        now = time.monotonic()
        early_s = min(_EARLY_S_MAX, max(0.0, request.deadline - now) / 10)
        pending = _PendingRequest(
            peer,
            request.id,
            request.method,
            received.num_bytes,
            request.deadline - early_s,
            now,
            request,
            received.places,
            received.room,
        )
        self._count(pending, 1)
        if full := self._full():
            self._answer(pending, ResourceExhausted(full), handled=False)
            return
        peer.queue.append(pending)
        if len(peer.queue) == 1 and not peer.is_running and peer not in self._stalled:
            self._ready.append(peer)

    def _credit_excess(self, received: ReceivedRequest) -> str:
        peer, limits = received.peer, self._limits
        num_bytes = peer.num_bytes + received.num_bytes
        if peer.num_requests >= limits.requests_max:
            num = limits.requests_max
            return f"a connection may have {num} requests (requests_max), found one more"
        if peer.num_requests and num_bytes > limits.inflight_bytes_max:
            return (
                f"a connection may have {limits.inflight_bytes_max} bytes (inflight_bytes_max),"
                f" found {num_bytes}"
            )
        return ""

    def _full(self) -> str:
        limits = self._limits
        if self._num_requests > limits.total_requests_max:
            num = limits.total_requests_max
            return f"{self.name} holds {num} requests: later (total_requests_max)"
        if self._held_bytes() > limits.total_bytes_max and self._num_requests > 1:
            num = limits.total_bytes_max
            return f"{self.name} holds {num} bytes of requests: later (total_bytes_max)"
        return ""

    def _refusal(self, num_bytes: int) -> str:
        """Why a call in pieces cannot be taken now; empty: it can. One is always admitted."""
        held_bytes = self._held_bytes()
        if not held_bytes or held_bytes + num_bytes <= self._limits.total_bytes_max:
            return ""
        return (
            f"{self.name} holds {held_bytes} bytes of requests, no room for {num_bytes}: later"
            " (total_bytes_max)"
        )

    def _held_bytes(self) -> int:
        return self._num_bytes + self._socket.assembling_bytes

    def _answer(self, pending: _PendingRequest, answer: Answer, handled: bool = True) -> None:
        if not pending.is_answered:
            pending.is_answered = True
            self._deferred.pop(pending, None)
            self._count(pending, -1)
            if self._observe is not None:
                method = pending.method if pending.method in self._handlers else "unknown"
                error = answer.name if isinstance(answer, TriremeError) else ""
                self._observe(method, time.monotonic() - pending.arrived, error)
            if not pending.peer.is_dropped:
                self._socket.send_answer(pending.peer, pending.id, answer, handled)

    def _count(self, pending: _PendingRequest, sign: int) -> None:
        pending.peer.num_requests += sign
        pending.peer.num_bytes += sign * pending.num_bytes
        self._num_requests += sign
        self._num_bytes += sign * pending.num_bytes

    # The keeper thread

    def _keep(self) -> None:
        while not self._is_stopping:
            with self._lock:
                self._is_keeper_idle = not self._has_duties()
            self._keeping.poll(None if self._is_keeper_idle else TICK_S)
            with self._lock:
                self._flush()
                self._socket.answer_zap()
                self._socket.peers.follow()
                self._socket.check()
                self._resume_stalled()
            self._expire()

    def _has_duties(self) -> bool:
        return self._socket.has_duties or bool(self._deferred)

    def _expire(self) -> None:
        """Runs without the lock: describing a wait may take locks of the handlers."""
        now = time.monotonic()
        with self._lock:
            late = [(p, deferred) for p, deferred in self._deferred.items() if p.give_up_at < now]
        for pending, deferred in late:
            self._answer_later(pending, _late(deferred))

    def _resume_stalled(self) -> None:
        stalled, self._stalled = self._stalled, []
        for peer in stalled:
            if peer.is_stalled(self._limits.inflight_bytes_max):
                self._stalled.append(peer)
            elif peer.queue and not peer.is_running:
                self._ready.append(peer)
                os.eventfd_write(self._work, 1)

    def _forget(self, peer: Peer) -> None:
        """The peer is gone or dropped: no caller waits for its answers."""
        for pending in [*peer.queue, *(p for p in self._deferred if p.peer is peer)]:
            self._answer(pending, _GONE)
        peer.queue.clear()

    # Ending

    def _refuse_rest(self) -> None:
        self._send_unsent()
        error = Unavailable(f"{self.name} stops")
        for pending in [*self._deferred, *(p for peer in self._socket.peers for p in peer.queue)]:
            self._answer(pending, error, handled=False)

    def _close(self) -> None:
        self._is_closed = True
        self._socket.close()
        self._serving.close()
        self._keeping.close()
        os.close(self._work)
        os.close(self._news)


def _placed(pending: _PendingRequest, answer: _T) -> _T | Reply:
    """The answer, a reply with its large arrays in the room that the client reserves."""
    shared = pending.peer.shared
    if not isinstance(answer, Reply) or pending.room is None or shared is None:
        return answer
    places = copy_into(shared, *pending.room, answer.arrays)
    return Reply(answer.body, answer.arrays, places)  # others may get the same answer


def _late(deferred: Deferred) -> TriremeError:
    try:
        return DeadlineExceeded(deferred.describe())
    except Exception as error:  # noqa: BLE001 must not end the keeper
        _log.exception("could not describe what a deferred answer waits for")
        return DeadlineExceeded(f"no answer was ready: {type(error).__name__}: {error}")


def _place(frame: FrameType | None) -> str:
    """Where a thread is: the last calls of its stack, innermost first."""
    calls = reversed(traceback.extract_stack(frame)[-_CALLS_SHOWN:] if frame else [])
    return ", ".join(f"{os.path.basename(c.filename)}:{c.lineno} {c.name}" for c in calls)
