"""What handlers tell of the changes they make, so that a server that is killed has them again.

Two rules for whoever changes tables, blocks or what is known of streams:
- `record` what is about to change before changing it, inside `pushing` or `changing`, and answer
  with what `answered` gives: nothing is acknowledged that is not in the log.
- A change that replay cannot repeat from its request, as a load, happens inside `replacing`.

This class keeps nothing, durability "none"; `trireme.server.log` has the one that does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from trireme.errors import DeadlineExceeded
from trireme.rpc import Deferred, Reply
from trireme.rpc.frames import Array

KEPT_TIMEOUT_S = 60.0
_NOTHING = nullcontext()


class Behind(NamedTuple):
    """What a recovery would replay beside the last snapshot: `num_bytes` of the log, and how long
    ago that snapshot was begun, or the log where there is none.
    """

    num_bytes: int
    age_s: float


class Journal:
    """Durability "none". Threads: any."""

    where = ""
    """The folder of the state, for messages; empty where none is kept."""

    def behind(self) -> Behind | None:
        """How far the last snapshot is behind; None: nothing is kept."""
        return None

    def pushing(self) -> AbstractContextManager[None]:
        """A change that others may make at the same time. Not to be nested, in either of these."""
        return _NOTHING

    def changing(self) -> AbstractContextManager[None]:
        """A change that nobody else may make anything beside. Repeating it over what came later
        must be harmless.
        """
        return _NOTHING

    def judging(self) -> AbstractContextManager[None]:
        """As `changing`, of a change that must not be repeated over what came later: it waits for a
        snapshot that is being written.
        """
        return _NOTHING

    def replacing(self) -> AbstractContextManager[None]:
        """A change that is not recorded, while nobody pushes. What is there when the block ends
        well is kept before it returns. The others but `judging` may be inside.
        """
        return _NOTHING

    def record(self, method: str, body: dict[str, Any], arrays: Sequence[Array] = ()) -> None:
        """Note a request that is about to be obeyed. It has been checked: it will not be refused.

        Raises:
            ResourceExhausted: the disk is full. Nothing may change then.
        """

    def answered(self, reply: Reply) -> Reply | Deferred:
        """The reply, to be given when everything that is recorded is kept."""
        return reply

    def when_kept(self, action: Callable[[Exception | None], None]) -> None:
        """Call `action` when everything that is recorded by now is kept, at once if it is; with the
        error if it never will be.
        """
        action(None)

    def wait_kept(self) -> None:
        """Return when everything that is recorded is kept. Raises what keeping it raised;
        DeadlineExceeded: the disk takes longer than a minute.
        """
        done = threading.Event()
        errors: list[Exception | None] = []

        def finish(error: Exception | None) -> None:
            errors.append(error)
            done.set()

        self.when_kept(finish)
        if not done.wait(KEPT_TIMEOUT_S):
            raise DeadlineExceeded(
                f"log: expected {self.where} to keep what is recorded within"
                f" {KEPT_TIMEOUT_S:.0f} s, found that it does not answer: is the disk well?"
            )
        if errors[0] is not None:
            raise errors[0]
