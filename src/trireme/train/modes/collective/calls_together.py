"""Calls of the workers to the servers that they host, as exchanges that all make together.

Each worker makes exchanges until its calls are answered. In one exchange it sends its calls and its
answers to those that came before; then it handles what has come. So a call takes two exchanges if
its server answers at once, as when all workers pull for the same step. Workers may call different
methods in one exchange, and an answer may take more exchanges: nobody waits for anything but the
next exchange of the others. A worker that has nothing to call takes part all the same, until all
have nothing (`idle`).

A pull may follow a push in the same call (`after` in its body). The step of that push may be
applied when every server has the pushes of all workers; with each exchange a worker notes whether
its server has them. If every worker that calls anything calls both, servers keep the pulls until
all have noted it, and a step takes

    1. pushes and pulls,
    2. notes alone: they tell workers that their pushes are staged, in place of answers,
    3. rows,

where pushes and pulls by themselves take four exchanges with messages. If a push is refused, or a
worker calls something else, all workers have their pulls refused at once, and make them again
later: so none waits in an exchange for one that has gone on to a meeting. When all have given up
waiting, servers forget the pulls that they kept.
"""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from trireme.errors import (
    BadRequest,
    DeadlineExceeded,
    TriremeError,
    Unavailable,
    as_error,
    start_thread,
)
from trireme.rpc import Call, CallObserver, Deferred, Ended, Handler, Limits, Reply, Request, frames
from trireme.rpc.errors_on_wire import error_of, pack_error
from trireme.rpc.messages import Answer
from trireme.train.modes.collective.byte_exchange import ByteExchange, Parts

log = logging.getLogger("trireme.train")

_PEER = "all-to-all"
_LIMITS = Limits()
_PAUSE_S = 0.001
"""Between two exchanges in which nobody had anything to send: an answer waits for a thread."""
_PUSH = "ps.push"
_INTERRUPTED = "collective: an exchange was interrupted: start all workers again"


class _Note(enum.IntFlag):
    """What a worker tells all with an exchange."""

    ACTIVE = 1  # it waits for answers
    IS_FOLLOWED = 2  # it sends pulls that follow pushes
    HAS_OPEN = 4  # its server has not answered every push yet
    HAS_REFUSED = 8  # it has refused one since the last exchange


class _Stage(enum.Enum):
    """Of pulls that follow pushes, the same at all workers."""

    NONE = enum.auto()
    KEPT = enum.auto()  # until all servers have all pushes
    ANSWERED = enum.auto()  # with the next exchange


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
        self._stage = _Stage.NONE
        self._pushes: list[int] = []  # ids of own pushes that are followed
        self._following: list[int] = []  # ids of own pulls that follow them
        self._is_followed = False  # they are sent with the next exchange
        # At this server: (rank, request) of the pulls that it keeps; (rank, id) of the pushes that
        # it has answered, which workers learn from the notes, and of those that it has not yet.
        self._kept: list[tuple[int, Request]] = []
        self._staged: list[tuple[int, int]] = []
        self._open: set[tuple[int, int]] = set()
        self._has_refused = False
        self._broken: TriremeError | None = None  # what ended an exchange

    def check_whole(self) -> None:
        """Raises why the last exchange was none, so that the others would misread the next."""
        if self._broken is not None:
            raise self._broken

    def call_all(self, calls: Sequence[Call], *, timeout_s: float) -> list[Reply]:
        """Make these calls; replies in their order. Raises the first error. DeadlineExceeded,
        Unavailable: a worker does not take part.
        """
        start = time.monotonic()
        ids = [self._send(call, start + timeout_s) for call in calls]
        named = list(zip(ids, calls, strict=True))
        self._following = [id for id, call in named if "after" in call.body]
        self._pushes = [id for id, call in named if call.method == _PUSH and self._following]
        self._is_followed = bool(self._following)
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
            self._take_call(rank, id, call.method, call.body, list(call.arrays), deadline)
        else:
            timeout_ms = int(1000 * max(0.0, deadline - time.monotonic()))
            header = {"t": frames.CALL, "id": id, "m": call.method, "b": call.body}
            self._outgoing[rank].append(frames.pack({**header, "ms": timeout_ms}, call.arrays))
        return id

    def _run_exchange(self, *, is_active: bool) -> bool:
        """One exchange; returns whether any worker was active in it."""
        self.check_whole()
        try:
            return self._exchange_once(is_active=is_active)
        except BaseException as error:
            self._broken = error if isinstance(error, TriremeError) else Unavailable(_INTERRUPTED)
            raise

    def _exchange_once(self, *, is_active: bool) -> bool:
        self._send_answers()
        note = self._note(is_active=is_active)
        outgoing, self._outgoing = self._outgoing, [[] for _ in self._outgoing]
        received = self._exchange.exchange(outgoing, note=note)
        notes = [_Note(one) for one in received.notes]
        is_last = self._stage is _Stage.ANSWERED
        self._advance(notes)
        if self._is_followed and self._stage is not _Stage.KEPT:
            self._refuse("some workers call other things")
        self._is_followed = False
        for rank, messages in enumerate(received.messages):
            for parts in messages:
                self._take(rank, parts)
        if is_last:
            self._refuse("not answered together with the others")
        is_any_active = any(_Note.ACTIVE in one for one in notes)
        if received.is_empty and is_any_active and not self._answered:
            time.sleep(_PAUSE_S)
        return is_any_active

    def _note(self, *, is_active: bool) -> _Note:
        note = _Note.ACTIVE if is_active else _Note(0)
        if self._is_followed:
            note |= _Note.IS_FOLLOWED
        if self._open:
            note |= _Note.HAS_OPEN
        if self._has_refused:
            note |= _Note.HAS_REFUSED
            self._has_refused = False
        return note

    # ---- pulls that follow pushes ----

    def _advance(self, notes: Sequence[_Note]) -> None:
        """Before what an exchange has brought is handled: go on as its notes say."""
        active = [one for one in notes if _Note.ACTIVE in one]
        is_refused = any(_Note.HAS_REFUSED in one for one in notes)
        if self._stage is _Stage.ANSWERED or not active:
            self._stage = _Stage.NONE
            self._kept.clear()
            self._staged.clear()
        elif self._stage is _Stage.NONE:
            if all(_Note.IS_FOLLOWED in one for one in active) and not is_refused:
                self._stage = _Stage.KEPT
        elif is_refused:
            self._stage = _Stage.NONE
            self._refuse("a push was refused")
            self._answered.extend((rank, id, Reply()) for rank, id in self._staged)
            self._staged.clear()
        elif not any(_Note.HAS_OPEN in one for one in notes):
            self._stage = _Stage.ANSWERED
            self._staged.clear()
            for id in self._pushes:
                self._settle(id, Reply())
            kept, self._kept = self._kept, []
            for rank, request in kept:
                body = {name: value for name, value in request.body.items() if name != "after"}
                self._handle(rank, replace(request, body=body))

    def _refuse(self, reason: str) -> None:
        """Have the own pulls that are not answered made later."""
        self._kept.clear()
        for id in self._following:
            if self._pending.get(id, Reply()) is None:
                self._settle(id, Reply({"refused": reason}))

    # ---- messages ----

    def _send_answers(self) -> None:
        while self._answered:
            rank, id, answer = self._answered.popleft()
            if (rank, id) in self._open:
                self._open.remove((rank, id))
                self._has_refused |= isinstance(answer, TriremeError)
                if self._stage is _Stage.KEPT and isinstance(answer, Reply):
                    self._staged.append((rank, id))
                    continue
            if rank == self._rank:
                self._settle(id, answer)
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
            self._take_call(rank, id, method, body, arrays, time.monotonic() + seconds)
        elif header["t"] == frames.REPLY:
            self._settle(id, Reply(frames.map_field(header, "b"), arrays))
        else:
            self._settle(id, error_of(header))

    def _settle(self, id: int, answer: Answer) -> None:
        """Note the answer of an own call, unless its caller has given up."""
        if id in self._following and isinstance(answer, TriremeError):
            answer = Reply({"refused": f"{answer.name}: {answer}"})  # the push counts
        if id in self._pending:
            self._pending[id] = answer

    def _take_call(
        self, rank: int, id: int, method: str, body: Any, arrays: list[Any], deadline: float
    ) -> None:
        request = Request(id, method, body, arrays, f"worker {rank}", _PEER, "", deadline)
        if "after" not in body:
            self._handle(rank, request)
        elif rank == self._rank or self._stage is _Stage.KEPT:
            self._kept.append((rank, request))

    def _handle(self, rank: int, request: Request) -> None:
        if request.method == _PUSH:
            self._open.add((rank, request.id))
        answer = self._answer(request)
        if isinstance(answer, Deferred):
            answer.bind(lambda reply: self._answered.append((rank, request.id, reply)))
        else:
            self._answered.append((rank, request.id, answer))

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
            return as_error(error)


class IdleWorker:
    """Takes part in the exchanges of others, in a thread of its own, while this worker has no data
    and may evaluate, save or wait in a meeting.
    """

    def __init__(self, calls: CallsTogether) -> None:
        self.calls = calls
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def begin(self) -> None:
        thread = threading.Thread(target=self._run, name="trireme-exchange", daemon=True)
        start_thread(thread)
        self._thread = thread

    def _run(self) -> None:
        try:
            self.calls.idle()
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
