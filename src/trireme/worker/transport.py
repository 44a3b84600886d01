"""How a client reaches servers: over the network (rpc.RpcClient), or in its own process when tables
are embedded.
"""

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

from trireme.errors import BadRequest, DeadlineExceeded, TriremeError, as_error
from trireme.rpc import Call, CallObserver, Deferred, Ended, Reply, Request
from trireme.threads import uninterrupted

LOCAL = "embedded"


class Transport(Protocol):
    """One thread's way to the servers."""

    def call_all(self, calls: Sequence[Call], *, timeout_s: float) -> list[Reply]: ...

    def close(self) -> None: ...


class LocalTransport:
    """Calls the handlers of a server in this process, without copying arrays. Threads: any."""

    def __init__(
        self,
        handlers: Mapping[str, Callable[[Request], Reply | Deferred | None]],
        observe: CallObserver | None = None,
    ) -> None:
        self._handlers, self._observe = handlers, observe

    def call_all(self, calls: Sequence[Call], *, timeout_s: float) -> list[Reply]:
        return [self._call_observed(call, timeout_s) for call in calls]

    def _call_observed(self, call: Call, timeout_s: float) -> Reply:
        """Report the call with no bytes and no repetitions: nothing is sent."""
        start, error = time.monotonic(), ""
        try:
            return self._call(call, timeout_s)
        except TriremeError as raised:
            error = raised.name
            raise
        finally:
            if self._observe is not None:
                seconds = time.monotonic() - start
                self._observe(Ended(call.method, seconds, error, 0, 0, 0))

    def _call(self, call: Call, timeout_s: float) -> Reply:
        handler = self._handlers.get(call.method)
        if handler is None:
            raise BadRequest(
                f"{LOCAL}: no method {call.method!r}, there are {sorted(self._handlers)}"
            )
        deadline = time.monotonic() + timeout_s
        request = Request(0, call.method, call.body, list(call.arrays), LOCAL, LOCAL, "", deadline)
        request.room = call.room
        try:
            answer = uninterrupted(partial(handler, request))
        except TriremeError:
            raise
        except (MemoryError, RuntimeError) as error:
            raise as_error(error) from error
        if isinstance(answer, Deferred):
            return self._wait(call.method, answer, timeout_s)
        return Reply() if answer is None else answer

    def _wait(self, method: str, deferred: Deferred, timeout_s: float) -> Reply:
        answers: queue.SimpleQueue[Reply | TriremeError] = queue.SimpleQueue()
        deferred.bind(answers.put)
        try:
            answer = answers.get(timeout=timeout_s)
        except queue.Empty:
            raise DeadlineExceeded(
                f"{method}: no answer within {timeout_s} s: {deferred.describe()}"
            ) from None
        if isinstance(answer, TriremeError):
            raise answer
        return answer

    def close(self) -> None:
        pass


class LockedTransport:
    """A transport that any thread may use, one at a time; a call within a call is BadRequest."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._lock = threading.RLock()  # knows its owner: Ctrl-C may come with it just acquired
        self._is_in_use = False

    def call_all(self, calls: Sequence[Call], timeout_s: float) -> list[Reply]:
        deadline = time.monotonic() + timeout_s
        is_outermost = False
        try:
            if not self._lock.acquire(timeout=timeout_s):
                raise DeadlineExceeded(f"client: its connection was busy for {timeout_s} s")
            if self._is_in_use:
                raise BadRequest(
                    "client: expected the call under way to end before the next one, found another"
                    " within it, as a signal handler would make it; let the handler set a flag, and"
                    " the loop act on it"
                )
            is_outermost = self._is_in_use = True
            left_s = max(0.0, deadline - time.monotonic())
            return self.transport.call_all(calls, timeout_s=left_s)
        finally:
            if is_outermost:
                self._is_in_use = False
            try:  # noqa: SIM105 Ctrl-C may come within suppress(), too
                self._lock.release()
            except RuntimeError:  # it was not acquired
                pass
