"""The journal of a server: what makes its changes durable.

Two rules for code that changes tables, blocks or streams:
- Inside `pushing` or `changing`, `record` a change before making it, and answer with `answered`:
  nothing is acknowledged that is not in the log. `change_once` does both for a request.
- Make a change that replay cannot repeat from its request, such as a load, inside `replacing`.

`Journal` keeps nothing (durability "none"); `trireme.server.log` has the one that writes a log.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from trireme.errors import DeadlineExceeded, TriremeError, as_error
from trireme.rpc import Deferred, Reply
from trireme.rpc.frames import Array

log = logging.getLogger("trireme.server")

KEPT_TIMEOUT_S = 60.0
_NOTHING = nullcontext()


class LogLag(NamedTuple):
    """What a recovery would replay after the last snapshot: bytes of the log, and seconds since the
    snapshot (or the log, if there is none) was begun.
    """

    num_bytes: int
    age_s: float


class Journal:
    """Durability "none". Threads: any."""

    keeps = False
    """Whether records go anywhere."""

    where = ""
    """The state folder, for messages; empty: there is none."""

    def lag(self) -> LogLag | None:
        """How much has been logged since the last snapshot; None: there is no log."""
        return None

    def pushing(self) -> AbstractContextManager[None]:
        """Guards a change that may run beside others of its kind. Guards may be nested in
        `replacing` only.
        """
        return _NOTHING

    def in_order(self) -> AbstractContextManager[Any]:
        """Guards a change from its record until it is made, within `pushing`: replay makes changes
        in the order of their records, and sums, admission and eviction depend on the order.
        """
        return _NOTHING

    def changing(self) -> AbstractContextManager[None]:
        """Guards a change that runs alone, and that replay may repeat after later changes."""
        return _NOTHING

    def changing_once(self) -> AbstractContextManager[None]:
        """Guards a change that runs alone, and that replay must not repeat after later changes: it
        waits until no snapshot is being written.
        """
        return _NOTHING

    def change_once(self, change: Callable[[], Reply]) -> Reply | Deferred:
        """Make a change within `changing_once`, which waits on another thread. The reply
        is `answered`. Raises what `change` raises; ResourceExhausted: too many wait.
        """
        return self.answered(change())

    def replacing(self) -> AbstractContextManager[None]:
        """Guards a change that is not recorded, while nobody pushes. The contents are durable when
        the block has ended without an error.
        """
        return _NOTHING

    def record(self, method: str, body: dict[str, Any], arrays: Sequence[Array] = ()) -> None:
        """Log a request that has been checked and is about to be executed. Raises
        ResourceExhausted: the disk is full; the caller must change nothing.
        """

    def answered(self, reply: Reply) -> Reply | Deferred:
        """The reply, which is sent when everything recorded so far is durable."""
        return reply

    def answer_when_kept(self, deferred: Deferred, make_reply: Callable[[], Reply]) -> None:
        """Make and send a deferred reply, or its error, when everything recorded is durable. No
        error is raised here: others may wait for the same step.
        """

        def make(error: Exception | None) -> Reply:
            if error is not None:
                raise error
            return make_reply()

        def answer(error: Exception | None) -> None:
            made = answer_of(partial(make, error))
            if isinstance(made, Reply):
                deferred.reply(made)
            else:
                deferred.fail(made)

        self.when_kept(answer)

    def when_kept(self, action: Callable[[Exception | None], None]) -> None:
        """Call `action` when everything recorded is durable, with the error if that fails."""
        action(None)

    def wait_kept(self) -> None:
        """Return when everything recorded so far is durable. Raises the error of writing, or
        DeadlineExceeded if the disk needs more than a minute.
        """
        outcome: SimpleQueue[Exception | None] = SimpleQueue()
        self.when_kept(outcome.put)
        try:
            error = outcome.get(timeout=KEPT_TIMEOUT_S)
        except Empty:
            raise DeadlineExceeded(
                f"log: expected what is recorded in {self.where} to be written within"
                f" {KEPT_TIMEOUT_S:.0f} s, found that it is not: check the disk"
            ) from None
        if error is not None:
            raise error


def answer_of(make_reply: Callable[[], Reply]) -> Reply | TriremeError:
    """A reply that is made on a thread without a caller, or its error."""
    try:
        return make_reply()
    except TriremeError as failure:
        return failure
    except Exception as failure:
        log.exception("a deferred reply failed")
        return as_error(failure)
