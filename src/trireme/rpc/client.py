"""Calls servers: in the calling thread, with a deadline, again and again until it has passed."""

from __future__ import annotations

import itertools
import logging
import math
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, overload

import zmq

from trireme.errors import BadRequest, DeadlineExceeded, TriremeError, Unavailable
from trireme.rpc import frames
from trireme.rpc.auth import ClientKeys
from trireme.rpc.calls import Body, Call, Reply
from trireme.rpc.channel import Channel, Outgoing, State
from trireme.rpc.frames import Array
from trireme.rpc.limits import Limits
from trireme.rpc.observers import CallObserver, Ended
from trireme.rpc.sockets import Context, Socket, new_context

_log = logging.getLogger("trireme.rpc")

NOTICE_S = 3.0
"""While a server does not answer, its client says so this often."""


class Client:
    """Calls any number of servers, each over one connection that is kept.

    Args:
        name: how the client calls itself; servers show it.
        keys: speak CURVE, and demand it of every server.
        on_wait: gets a line every 3 s while a server does not answer; a logging warning if not
            given.
        watch: told (name of this client, what it waits for) beside `on_wait`, and (name, "") when
            that is over: it was answered, or given up.
        observe: told of every call when it has ended.

    Threads: one thread uses a client; `clone` makes one for another thread. Processes: a client
    does not survive fork (DataLoader workers): make one in each process.
    """

    def __init__(
        self,
        *,
        name: str,
        limits: Limits | None = None,
        keys: ClientKeys | None = None,
        on_wait: Callable[[str], None] | None = None,
        watch: Callable[[str, str], None] | None = None,
        observe: CallObserver | None = None,
        _context: _SharedContext | None = None,
    ) -> None:
        self.name = name
        self._limits = limits or Limits()
        self._keys = keys
        self._on_wait = on_wait or _log.warning
        self._watch, self._observe = watch, observe
        self._has_noticed = False
        self._shared = _context or _SharedContext()
        self._context = self._shared.join()
        self._process = os.getpid()
        self._channels: dict[str, Channel] = {}
        self._poller = zmq.Poller()
        self._readers: dict[Socket, Callable[[], None]] = {}
        # Ids are unique among the clients that one server may see in one connection: any start will
        # do. A random one tells the clients apart in logs.
        self._ids = itertools.count(secrets.randbits(48) + 1)
        self._busy = threading.Lock()  # held during a call, to notice a second thread
        self._is_closed = False

    def clone(self, name: str | None = None) -> Client:
        """A client for another thread; it shares ZeroMQ's I/O thread with this one, not the
        connections.
        """
        return Client(
            name=name or self.name,
            limits=self._limits,
            keys=self._keys,
            on_wait=self._on_wait,
            watch=self._watch,
            observe=self._observe,
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
            TriremeError: what the handler raised, by its class, naming method, endpoint and server.
            DeadlineExceeded: the server is there but did not answer in time; it may still do what
                was asked.
            ResourceExhausted: it was full all the time, or asked for more than a limit allows.
            Unavailable: no server could be reached in time, or it does not admit this client.
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
        error ends
        all of it, unless `return_errors`: then every call ends by itself, and errors are returned.

        Raises:
            As `call`.
        """
        self._check_usable(timeout_s)
        if not self._busy.acquire(blocking=False):
            raise BadRequest(f"Client.call: client {self.name} is for one thread, found two")
        try:
            return self._call_all(calls, timeout_s, return_errors)
        finally:
            self._busy.release()

    def close(self) -> None:
        """Close all connections, at once. Closing twice is allowed."""
        if self._is_closed or os.getpid() != self._process:
            return
        self._is_closed = True
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()
        self._shared.leave()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call_all(
        self, calls: Iterable[Call], timeout_s: float, return_errors: bool
    ) -> list[Reply] | list[Reply | TriremeError]:
        start = time.monotonic()
        deadline = start + timeout_s
        batch = [(self._channel(c.endpoint), Outgoing(c, next(self._ids), deadline)) for c in calls]
        for channel, outgoing in batch:
            channel.put(outgoing)
        channels = list(dict.fromkeys(channel for channel, _ in batch))
        try:
            self._run(batch, channels, timeout_s, deadline, return_errors)
        finally:
            for channel in channels:
                channel.abandon()
            self._tell(batch, time.monotonic() - start)
        answers = [_named(channel, outgoing) for channel, outgoing in batch]
        if not return_errors:
            errors = [
                answer
                for (_, outgoing), answer in zip(batch, answers, strict=True)
                if isinstance(outgoing.answer, TriremeError) and isinstance(answer, TriremeError)
            ]
            if errors:  # who waits in vain says less than who is not there
                raise min(errors, key=lambda error: isinstance(error, DeadlineExceeded))
        return answers

    def _run(
        self,
        batch: list[tuple[Channel, Outgoing]],
        channels: list[Channel],
        timeout_s: float,
        deadline: float,
        return_errors: bool,
    ) -> None:
        start = now = time.monotonic()
        notice_at = start + NOTICE_S
        while True:
            due = min((channel.advance(now) for channel in channels), default=math.inf)
            waiting = [pair for pair in batch if pair[1].answer is None]
            failed = not return_errors and any(
                isinstance(outgoing.answer, TriremeError) for _, outgoing in batch
            )
            if failed:
                if any(isinstance(o.answer, DeadlineExceeded) for _, o in batch):
                    # A server's own deadline comes a moment before ours.
                    gone = [pair for pair in waiting if pair[0].state is not State.READY]
                    _expire(gone, timeout_s)
                return
            if not waiting:
                return
            if now >= deadline:
                _expire(waiting, timeout_s)
                return
            if now >= notice_at:
                self._notice(waiting, now - start)
                notice_at += NOTICE_S
            self._wait(min(due, deadline, notice_at) - now)
            now = time.monotonic()

    def _tell(self, batch: list[tuple[Channel, Outgoing]], seconds: float) -> None:
        if self._has_noticed and self._watch is not None:
            self._watch(self.name, "")
        self._has_noticed = False
        if self._observe is not None:
            for _, outgoing in batch:
                self._observe(_ended(outgoing, seconds))

    def _wait(self, timeout_s: float) -> None:
        for socket, _ in self._poller.poll(max(0, math.ceil(timeout_s * 1000))):
            read = self._readers.get(socket)  # none if another reader has closed it
            if read is not None:
                read()

    def _poll(self, socket: Socket, read: Callable[[], None] | None) -> None:
        if read is None:
            self._poller.unregister(socket)
            del self._readers[socket]
        else:
            self._poller.register(socket, zmq.POLLIN)
            self._readers[socket] = read

    def _channel(self, endpoint: str) -> Channel:
        channel = self._channels.get(endpoint)
        if channel is None:
            host, _, port = endpoint.rpartition(":")
            if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
                raise BadRequest(f"Client.call: endpoint must be host:port, found {endpoint!r}")
            channel = Channel(
                self._context, endpoint, self.name, self._limits, self._keys, self._poll
            )
            self._channels[endpoint] = channel
        return channel

    def _check_usable(self, timeout_s: float) -> None:
        if os.getpid() != self._process:
            raise BadRequest(
                f"Client.call: a client is for the process that made it, {self._process}, "
                f"found {os.getpid()}, forked from it: make a client in each process"
            )
        if self._is_closed:
            raise BadRequest(f"Client.call: client {self.name} must be open, found it closed")
        if not 0 < timeout_s < frames.TIMEOUT_MS_MAX / 1000:
            raise BadRequest(
                f"Client.call: timeout_s must be positive and finite, found {timeout_s}"
            )

    def _notice(self, waiting: list[tuple[Channel, Outgoing]], waited_s: float) -> None:
        self._has_noticed = True
        for (channel, method), count in Counter((c, o.call.method) for c, o in waiting).items():
            calls = method if count == 1 else f"{count} x {method}"
            line = f"waiting for {channel} ({calls}): {channel.status} for {waited_s:.0f} s"
            self._on_wait(line)
            if self._watch is not None:
                self._watch(self.name, line)


class _SharedContext:
    """A ZeroMQ context, which is an I/O thread, that lives as long as one of its clients."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_clients = 0
        self._context = new_context()

    def join(self) -> Context:
        with self._lock:
            if self._context.closed:
                raise BadRequest("Client.clone: one of the clients must be open, found all closed")
            self._num_clients += 1
            return self._context

    def leave(self) -> None:
        with self._lock:
            self._num_clients -= 1
            if self._num_clients == 0:
                self._context.term()


def _expire(waiting: list[tuple[Channel, Outgoing]], timeout_s: float) -> None:
    for channel, outgoing in waiting:
        if channel.state is State.READY:
            kind = outgoing.refused or DeadlineExceeded
        else:
            kind = Unavailable
        outgoing.answer = kind(f"{channel.status} for {timeout_s:g} s")


def _ended(outgoing: Outgoing, seconds: float) -> Ended:
    answer = outgoing.answer
    error = "" if isinstance(answer, Reply) else (answer or Unavailable()).name
    return Ended(
        outgoing.call.method,
        seconds,
        error,
        max(0, outgoing.num_sent - 1),
        outgoing.num_sent * outgoing.num_bytes,
        outgoing.num_bytes_received,
    )


def _named(channel: Channel, outgoing: Outgoing) -> Reply | TriremeError:
    """The answer; an error says which call it ended."""
    answer = outgoing.answer
    if isinstance(answer, TriremeError):
        named = type(answer)(f"{outgoing.call.method} at {channel}: {answer}")
        named.details = answer.details
        return named
    if answer is None:  # another call's error ended it
        return Unavailable(
            f"{outgoing.call.method} at {channel}: given up after another call failed"
        )
    return answer
