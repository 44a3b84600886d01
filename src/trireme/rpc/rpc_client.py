"""Calls servers in the calling thread, with retries until a deadline."""

from __future__ import annotations

import itertools
import logging
import math
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, overload

import zmq

from trireme.errors import BadRequest, DeadlineExceeded, TriremeError, Unavailable
from trireme.rpc import frames
from trireme.rpc.auth import ClientKeys
from trireme.rpc.connection import Connection, ConnectionState, PendingCall
from trireme.rpc.frames import Array
from trireme.rpc.limits import Limits
from trireme.rpc.messages import Body, Call, CallObserver, Ended, Reply, Waiting
from trireme.rpc.notices import Notices
from trireme.rpc.sockets import Context, Socket, new_context

_log = logging.getLogger("trireme.rpc")


class RpcClient:
    """Calls any number of servers, each over one connection that is kept.

    Args:
        name: of this client, as servers show it.
        keys: speak CURVE, and require it of every server.
        on_wait: called while a server does not answer, for each method, as often as Notices says;
            default: log a warning.
        watch: called with (name of this client, line) beside `on_wait`, and with (name, "") when
            the wait is over.
        observe: called for every call when it has ended.
        states: endpoint -> name of what its server holds, read at each connection: no call is sent
            to a server that holds something else. The caller may fill it later.
        unreached_s: a call whose server has not been reached for so long ends, however much time it
            has to be answered.

    Threads: one thread uses a client; `clone` makes one for another thread. Processes: a client
    does not survive fork (DataLoader workers): make one in each process.
    """

    def __init__(
        self,
        *,
        name: str,
        limits: Limits | None = None,
        keys: ClientKeys | None = None,
        on_wait: Callable[[Waiting], None] | None = None,
        watch: Callable[[str, str], None] | None = None,
        observe: CallObserver | None = None,
        states: Mapping[str, str] | None = None,
        unreached_s: float = math.inf,
        _context: _SharedContext | None = None,
    ) -> None:
        self.name = name
        self._limits = limits or Limits()
        self._keys = keys
        self._on_wait = on_wait or _log.warning
        self._watch, self._observe = watch, observe
        self._states = {} if states is None else states
        self._unreached_s = unreached_s
        self._has_noticed = False
        self._shared = _context or _SharedContext()
        self._context = self._shared.join()
        self._process = os.getpid()
        self._connections: dict[str, Connection] = {}
        self._poller = zmq.Poller()
        self._readers: dict[Socket, Callable[[], None]] = {}
        # Ids need to be unique in a connection only; a random start tells clients apart in logs.
        self._ids = itertools.count(secrets.randbits(48) + 1)
        self._busy = threading.Lock()  # held during a call, to notice a second thread
        self._is_interrupted = False  # also during a call: Ctrl-C may come at any point of it
        self._is_closed = False

    def clone(self, name: str | None = None) -> RpcClient:
        """A client for another thread: with connections of its own, but the same I/O thread."""
        return RpcClient(
            name=name or self.name,
            limits=self._limits,
            keys=self._keys,
            on_wait=self._on_wait,
            watch=self._watch,
            observe=self._observe,
            states=self._states,
            unreached_s=self._unreached_s,
            _context=self._shared,
        )

    def call(
        self,
        endpoint: str,
        method: str,
        body: Body | None = None,
        arrays: Sequence[Array] = (),
        *,
        timeout_s: float,
    ) -> Reply:
        """Call one method and wait for its reply.

        The same request, with the same id, is sent again after a lost connection until `timeout_s`
        has passed, so the method must be safe to repeat.

        Raises:
            TriremeError: the handler's error, of the same class, with method, endpoint and server.
            DeadlineExceeded: the server did not answer in time; it may still execute the call.
            ResourceExhausted: the server was full all the time, or the call exceeds a limit.
            Unavailable: the server could not be reached in time, or does not admit this client.
            Corruption: the server holds another state than `states` names.
        """
        [reply] = self.call_all([Call(endpoint, method, body or {}, arrays)], timeout_s=timeout_s)
        return reply

    @overload
    def call_all(self, calls: Iterable[Call], *, timeout_s: float) -> list[Reply]: ...
    @overload
    def call_all(
        self, calls: Iterable[Call], *, timeout_s: float, return_errors: Literal[True]
    ) -> list[Reply | TriremeError]: ...
    def call_all(
        self, calls: Iterable[Call], *, timeout_s: float, return_errors: bool = False
    ) -> list[Reply] | list[Reply | TriremeError]:
        """Make several calls at once; the replies come in the order of the calls.

        Calls to one endpoint are sent in their order, without waiting for each other. The first
        error ends all calls, unless `return_errors`: then errors are returned among the replies.

        Raises:
            As `call`.
        """
        self._check_usable(timeout_s)
        if self._busy.locked():
            raise BadRequest(f"RpcClient.call: client {self.name} is for one thread, found two")
        with self._busy:
            return self._call_all(calls, timeout_s, return_errors)

    def close(self) -> None:
        """Close all connections, at once. Closing twice is allowed."""
        if self._is_closed or os.getpid() != self._process:
            return
        self._is_closed = True
        self._start_over()
        self._shared.leave()

    def __enter__(self) -> RpcClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call_all(
        self, calls: Iterable[Call], timeout_s: float, return_errors: bool
    ) -> list[Reply] | list[Reply | TriremeError]:
        if self._is_interrupted:
            self._start_over()
        start = time.monotonic()
        deadline = start + timeout_s
        batch = [
            (self._connection(c.endpoint), PendingCall(c, next(self._ids), deadline)) for c in calls
        ]
        connections = list(dict.fromkeys(connection for connection, _ in batch))
        self._is_interrupted = True
        try:
            for connection, pending in batch:
                connection.put(pending)
            self._run(batch, connections, start, timeout_s, return_errors)
            for connection in connections:
                connection.abandon()
            self._is_interrupted = False
        finally:
            if self._is_interrupted:
                self._start_over()
            self._report(batch, time.monotonic() - start)
        answers = [_named(*pair) for pair in batch]
        if not return_errors:
            errors = [
                answer
                for (_, pending), answer in zip(batch, answers, strict=True)
                if isinstance(pending.answer, TriremeError) and isinstance(answer, TriremeError)
            ]
            if errors:  # a deadline tells less than other errors
                raise min(errors, key=lambda error: isinstance(error, DeadlineExceeded))
        return answers

    def _start_over(self) -> None:
        """Close all connections, whatever an interrupted call has left of them."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        self._poller, self._readers = zmq.Poller(), {}
        self._is_interrupted = False

    def _run(
        self,
        batch: list[tuple[Connection, PendingCall]],
        connections: list[Connection],
        start: float,
        timeout_s: float,
        return_errors: bool,
    ) -> None:
        now, deadline, notices = start, start + timeout_s, Notices(start)
        while True:
            due = min((connection.advance(now) for connection in connections), default=math.inf)
            waiting = [pair for pair in batch if pair[1].answer is None]
            errors = [o.answer for _, o in batch if isinstance(o.answer, TriremeError)]
            if errors and not return_errors:
                if any(isinstance(error, DeadlineExceeded) for error in errors):
                    # A server's deadline ends slightly before ours.
                    gone = [pair for pair in waiting if pair[0].state is not ConnectionState.READY]
                    _expire(gone, timeout_s)
                return
            if not waiting:
                return
            if now >= deadline:
                _expire(waiting, timeout_s)
                return
            if now - start >= self._unreached_s:
                unreached = [
                    pair for pair in waiting if pair[0].unreached_s(now) >= self._unreached_s
                ]
                if unreached:
                    _expire(unreached, self._unreached_s)
                    continue
            if notices.take_due(now):
                self._notice(waiting, now - start)
            self._wait(min(due, deadline, notices.next_at) - now)
            now = time.monotonic()

    def _report(self, batch: list[tuple[Connection, PendingCall]], seconds: float) -> None:
        if self._has_noticed and self._watch is not None:
            self._watch(self.name, "")
        self._has_noticed = False
        if self._observe is not None:
            for _, pending in batch:
                self._observe(_ended(pending, seconds))

    def _wait(self, timeout_s: float) -> None:
        if not self._readers:  # all connections are lost: a poller of none returns at once
            time.sleep(max(0.0, timeout_s))
        for socket, _ in self._poller.poll(max(0, math.ceil(timeout_s * 1000))):
            if (read := self._readers.get(socket)) is not None:  # else another has closed it
                read()

    def _poll(self, socket: Socket, read: Callable[[], None] | None) -> None:
        if read is None:
            self._poller.unregister(socket)
            del self._readers[socket]
        else:
            self._poller.register(socket, zmq.POLLIN)
            self._readers[socket] = read

    def _connection(self, endpoint: str) -> Connection:
        if endpoint not in self._connections:
            host, _, port = endpoint.rpartition(":")
            if host.split() != [host] or not port.isdecimal() or not 0 < int(port) < 1 << 16:
                raise BadRequest(f"RpcClient.call: endpoint must be host:port, found {endpoint!r}")
            self._connections[endpoint] = Connection(
                self._context,
                endpoint,
                self.name,
                self._limits,
                self._keys,
                self._states,
                self._poll,
            )
        return self._connections[endpoint]

    def _check_usable(self, timeout_s: float) -> None:
        if os.getpid() != self._process:
            raise BadRequest(
                f"RpcClient.call: a client is for the process that made it, {self._process}, "
                f"found {os.getpid()}, forked from it: make a client in each process"
            )
        if self._is_closed:
            raise BadRequest(f"RpcClient.call: client {self.name} must be open, found it closed")
        if not 0 < timeout_s < frames.TIMEOUT_MS_MAX / 1000:
            raise BadRequest(
                f"RpcClient.call: timeout_s must be positive and finite, found {timeout_s}"
            )

    def _notice(self, waiting: list[tuple[Connection, PendingCall]], waited_s: float) -> None:
        self._has_noticed = True
        for (connection, method), count in Counter((c, o.call.method) for c, o in waiting).items():
            waiting_for = Waiting(str(connection), method, count, connection.status, waited_s)
            self._on_wait(waiting_for)
            if self._watch is not None:
                self._watch(self.name, str(waiting_for))


class _SharedContext:
    """A ZeroMQ context (an I/O thread) that is terminated with the last of its clients."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_clients = 0
        self._context = new_context()

    def join(self) -> Context:
        with self._lock:
            if self._context.closed:
                raise BadRequest(
                    "RpcClient.clone: one of the clients must be open, found all closed"
                )
            self._num_clients += 1
            return self._context

    def leave(self) -> None:
        with self._lock:
            self._num_clients -= 1
            if self._num_clients == 0:
                self._context.term()


def _expire(waiting: list[tuple[Connection, PendingCall]], timeout_s: float) -> None:
    for connection, pending in waiting:
        is_ready = connection.state is ConnectionState.READY
        kind = (pending.refused or DeadlineExceeded) if is_ready else Unavailable
        pending.answer = kind(f"{connection.status} for {timeout_s:g} s")


def _ended(pending: PendingCall, seconds: float) -> Ended:
    answer = pending.answer
    error = "" if isinstance(answer, Reply) else (answer or Unavailable()).name
    return Ended(
        pending.call.method,
        seconds,
        error,
        max(0, pending.num_sent - 1),
        pending.num_sent * pending.num_bytes,
        pending.num_bytes_received,
    )


def _named(connection: Connection, pending: PendingCall) -> Reply | TriremeError:
    """The answer of a call; errors name the call."""
    answer = pending.answer
    if isinstance(answer, TriremeError):
        named = type(answer)(f"{pending.call.method} at {connection}: {answer}")
        named.details = answer.details
        return named
    if answer is None:  # another call's error ended it
        return Unavailable(
            f"{pending.call.method} at {connection}: given up after another call failed"
        )
    return answer
