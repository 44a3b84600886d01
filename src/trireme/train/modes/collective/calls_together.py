"""Calls of the workers to the servers that they host, as exchanges that all make together.

Each worker makes exchanges until its calls are answered. In one exchange it sends its calls and its
answers to those that came before; then it handles what has come. So a call takes two exchanges if
its server answers at once, as when all workers pull for the same step. Workers may call different
methods in one exchange, and an answer may take more exchanges: nobody waits for anything but the
next exchange of the others. A worker that has nothing to call takes part all the same, until all
have nothing (`idle`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from trireme.errors import BadRequest, DeadlineExceeded, Internal, TriremeError
from trireme.rpc import Call, CallObserver, Deferred, Ended, Handler, Limits, Reply, Request, frames
from trireme.rpc.errors_on_wire import error_of, pack_error
from trireme.rpc.messages import Answer
from trireme.train.modes.collective.byte_exchange import ByteExchange, Parts

log = logging.getLogger("trireme.train")

_PEER = "all-to-all"
_LIMITS = Limits()
_PAUSE_S = 0.001
"""Between two exchanges in which nobody had anything to send: an answer waits for a thread."""


class CallsTogether:
    """A transport to the servers of all workers. One thread uses it at a time.

    Args:
        exchange: with all workers.
        endpoints: of the workers' servers, in their order. rank: of this worker.
        handlers: of the server here.
        observe: is told of every call.
    """

    def __init__(
        self,
        exchange: ByteExchange,
        endpoints: Sequence[str],
        rank: int,
        handlers: Mapping[str, Handler],
        observe: CallObserver,
    ) -> None:
        self._exchange, self._rank = exchange, rank
        self._rank_of = {endpoint: number for number, endpoint in enumerate(endpoints)}
        self._handlers, self._observe = handlers, observe
        self._next_id = 1
        self._pending: dict[int, Answer | None] = {}  # own calls; None: not answered yet
        self._outgoing: list[list[Parts]] = [[] for _ in endpoints]
        # (rank, id, answer) of requests that have been answered; any thread may append.
        self._answered: deque[tuple[int, int, Answer]] = deque()

    def call_all(self, calls: Sequence[Call], *, timeout_s: float) -> list[Reply]:
        """Make these calls; replies in their order. Raises the first error. DeadlineExceeded,
        Unavailable: a worker does not take part.
        """
        start = time.monotonic()
        ids = [self._send(call, start + timeout_s) for call in calls]
        while any(self._pending[id] is None for id in ids):
            if time.monotonic() > start + timeout_s:
                raise DeadlineExceeded(
                    f"{calls[0].method}: not answered within {timeout_s:g} s by the servers of all"
                    f" {len(self._outgoing)} workers"
                )
            self._run_exchange(is_active=True)
        answers = [self._pending.pop(id) for id in ids]
        seconds = time.monotonic() - start
        for call, answer in zip(calls, answers, strict=True):
            error = answer.name if isinstance(answer, TriremeError) else ""
            self._observe(Ended(call.method, seconds, error, 0, 0, 0))
        replies = []
        for answer in answers:
            if isinstance(answer, TriremeError):
                raise answer
            assert answer is not None
            replies.append(answer)
        return replies

    def idle(self) -> None:
        """Take part in the exchanges of others until no worker makes calls any more."""
        while self._run_exchange(is_active=False):
            pass

    def close(self) -> None:
        """Nothing: the group ends with its last user."""

    def _send(self, call: Call, deadline: float) -> int:
        """Have the call sent with the next exchange, or handle it here; returns its id."""
        id, rank = self._next_id, self._rank_of[call.endpoint]
        self._next_id += 1
        self._pending[id] = None
        if rank == self._rank:
            self._handle(rank, id, call.method, call.body, list(call.arrays), deadline)
        else:
            timeout_ms = int(1000 * max(0.0, deadline - time.monotonic()))
            header = {"t": frames.CALL, "id": id, "m": call.method, "b": call.body}
            parts = frames.pack({**header, "ms": timeout_ms}, call.arrays)
            self._outgoing[rank].append(parts)
        return id

    def _run_exchange(self, *, is_active: bool) -> bool:
        """One exchange; returns whether any worker was active in it."""
        self._send_answers()
        outgoing, self._outgoing = self._outgoing, [[] for _ in self._outgoing]
        received = self._exchange.exchange(outgoing, is_active=is_active)
        for rank, messages in enumerate(received.messages):
            for parts in messages:
                self._take(rank, parts)
        if received.is_empty and received.is_any_active and not self._answered:
            time.sleep(_PAUSE_S)
        return received.is_any_active

    def _send_answers(self) -> None:
        while self._answered:
            rank, id, answer = self._answered.popleft()
            if rank == self._rank:
                self._pending[id] = answer
            elif isinstance(answer, TriremeError):
                self._outgoing[rank].append(pack_error(id, answer, handled=True))
            else:
                header = {"t": frames.REPLY, "id": id, "b": answer.body}
                self._outgoing[rank].append(frames.pack(header, answer.arrays))

    def _take(self, rank: int, parts: Parts) -> None:
        header, arrays = frames.unpack(parts, _LIMITS)
        id = frames.int_field(header, "id")
        if header["t"] == frames.CALL:
            seconds = frames.int_field(header, "ms", high=frames.TIMEOUT_MS_MAX) / 1000
            method, body = frames.str_field(header, "m"), frames.map_field(header, "b")
            self._handle(rank, id, method, body, arrays, time.monotonic() + seconds)
        elif id in self._pending:  # else its caller has given up
            is_reply = header["t"] == frames.REPLY
            self._pending[id] = (
                Reply(frames.map_field(header, "b"), arrays) if is_reply else error_of(header)
            )

    def _handle(
        self, rank: int, id: int, method: str, body: Any, arrays: list[Any], deadline: float
    ) -> None:
        request = Request(id, method, body, arrays, f"worker {rank}", _PEER, "", deadline)
        answer = self._answer(request)
        if isinstance(answer, Deferred):
            answer.bind(lambda reply: self._answered.append((rank, id, reply)))
        else:
            self._answered.append((rank, id, answer))

    def _answer(self, request: Request) -> Answer | Deferred:
        handler = self._handlers.get(request.method)
        if handler is None:
            return BadRequest(f"{_PEER}: no method {request.method!r}")
        try:
            return handler(request) or Reply()
        except TriremeError as error:
            return error
        except Exception as error:
            log.exception("%s of %s has failed", request.method, request.peer)
            return Internal(f"{type(error).__name__}: {error}")


class IdleWorker:
    """Takes part in the exchanges of others, in a thread of its own, while this worker has no data
    and may evaluate, save or wait in a meeting.
    """

    def __init__(self, calls: CallsTogether) -> None:
        self._calls = calls
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def begin(self) -> None:
        self._thread = threading.Thread(target=self._run, name="trireme-exchange", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._calls.idle()
        except BaseException as error:  # noqa: BLE001 raised by `end`
            self._error = error

    def end(self) -> None:
        """Return when no worker has data any more. Raises the error of an exchange."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
