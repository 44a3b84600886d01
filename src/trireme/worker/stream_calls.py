"""A worker's calls for streams that workers share out among themselves."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from trireme.errors import (
    DeadlineExceeded,
    NotAdmitted,
    ResourceExhausted,
    TriremeError,
    Unavailable,
)
from trireme.protocol.membership import LeasedStream
from trireme.rpc.client import NOTICE_S
from trireme.worker.client import PATIENCE, RETRY_S, Client, StreamPosition

ASK_S = 2.0
"""How long one question for a stream waits; between two, this worker may be told to stop."""

log = logging.getLogger("trireme.worker")


@dataclass(frozen=True)
class EnteredShared:
    """A pass whose streams are shared out, as a worker comes to it.

    is_over: nothing is left to do in it. num_steps: that a worker has made that was there from the
    beginning, about.
    """

    is_over: bool
    num_steps: int


def enter(client: Client, num_steps: int) -> EnteredShared:
    """Come to the next pass, with so many steps made; from then on this worker takes part, if
    anything is left to do.
    """
    number = client.script.number + 1
    if client.script.is_next_behind:
        client.script.number = number
        return EnteredShared(is_over=True, num_steps=0)
    at = client.stream_positions(range(client.num_streams))
    sequences = [position.sequence for position in at]
    body = {"pass": number, "num_steps": num_steps, "sequences": sequences}
    reply = client.coordinate("coord.enter", body)
    client.script.number = number
    begun_at, members = sum(reply["begun_at"]), max(1, int(reply["members"]))
    made = (sum(sequences) - begun_at) // members
    return EnteredShared(bool(reply["is_over"]), int(reply["num_steps"]) + max(0, made))


def take(
    client: Client, done: LeasedStream | None, has_to_stop: Callable[[], bool]
) -> tuple[LeasedStream, StreamPosition] | None:
    """Give back a stream that is done, if any, and take another, which pushes are of from then on;
    with the place of its last push. Waits while others have all that are left; None: all are done,
    or this worker has to stop.

    Raises:
        Fenced: others have taken over what this worker had. DeadlineExceeded: others have all that
            is left, and do not come to its end. Unavailable: the coordinator was not there for the
            client's timeout, or does not admit this worker. ResourceExhausted: it was full for so
            long.
    """
    body = {"pass": client.script.number, "done": [] if done is None else [done.stream, done.lease]}
    patience = _Patience(client.timeout_s)
    while not has_to_stop():
        try:
            reply = client.coordinate("coord.take", body, timeout_s=min(client.timeout_s, ASK_S))
            break
        except (DeadlineExceeded, Unavailable, ResourceExhausted) as error:
            patience.bear(error)
    else:
        return None
    if reply["stream"] is None:
        return None
    taken = LeasedStream(int(reply["stream"]), int(reply["lease"]), int(reply["begun_at"]))
    client.use_stream(taken.stream, taken.lease)
    return taken, client.stream_position()


class _Patience:
    """How long a worker waits for a stream: for other workers long, as long as the coordinator is
    there to say so; for the coordinator as long as for any server.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._start = self._said = self._reached = time.monotonic()

    def bear(self, error: TriremeError) -> None:
        """A question has ended with an error; raises it if it was the last one."""
        now = time.monotonic()
        is_there = isinstance(error, DeadlineExceeded)
        if is_there:
            self._reached = now
        has_gone = now - self._reached >= self._timeout_s
        is_long = now - self._start > PATIENCE * self._timeout_s
        if has_gone or is_long or isinstance(error, NotAdmitted):
            raise error
        if now - self._said > (self._timeout_s if is_there else NOTICE_S):
            log.warning("still waiting after %.0f s: %s", now - self._start, error)
            self._said = now
        if not is_there:  # it may say so at once
            time.sleep(RETRY_S)


def give_back(client: Client, *, parts: bool) -> None:
    """Stop amid a pass, all pushes so far having been applied; others go on with its stream.

    parts: this worker leaves the job alone, and others meet without it.
    """
    client.coordinate("coord.give_back", {"parts": parts})
