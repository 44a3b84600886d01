"""The coordinator's part in jobs whose workers share out streams: who waits for one, and who is
given up. In other jobs nothing.

Not thread-safe: the coordinator locks around it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from trireme.coordinator.leases import Sharing
from trireme.coordinator.meetings import Meetings
from trireme.errors import BadRequest, Fenced
from trireme.rpc import Deferred, Reply

log = logging.getLogger("trireme.coordinator")

FIRST = 0
"""Saves and exports are this worker's: it is always waited for."""


class SharedStreams:
    """meetings: of the workers. keep: called before anybody is answered what relies on a change.

    Attributes:
        number: of the pass under way.
    """

    def __init__(
        self, meetings: Meetings, keep: Callable[[], None], clock: Callable[[], float]
    ) -> None:
        self._meetings, self._keep, self._clock = meetings, keep, clock
        self._sharing: Sharing | None = None
        self._takers: dict[int, Deferred] = {}  # who waits for a stream, each once
        self._given_up: set[int] = set()

    @property
    def is_in_use(self) -> bool:
        return self._sharing is not None

    @property
    def number(self) -> int:
        return self._of_job("coord.join").number

    def begin(self, num_streams: int, num_workers: int, silence_s: float) -> None:
        """What the first worker says; 0 streams: none are shared out."""
        if num_streams and self._sharing is None:
            self._sharing = Sharing(num_streams, range(num_workers), silence_s)

    def begin_run(self, num_workers: int) -> None:
        """All have come to the end of their scripts, and others may begin: those who came late
        come late again.
        """
        if self._sharing is not None:
            self._sharing.members = set(range(num_workers))
            self._given_up.clear()

    def _of_job(self, method: str) -> Sharing:
        if self._sharing is None:
            raise BadRequest(f"{method}: expected a job whose workers share out streams")
        return self._sharing

    # ---- members ----

    def members(self, num_workers: int) -> Collection[int]:
        """Who takes part, in a job that began with so many."""
        return range(num_workers) if self._sharing is None else self._sharing.members

    def begin_again(self, index: int) -> bool:
        """A process is this worker now: others may have what its predecessor has had. Returns
        whether it takes part already.
        """
        if self._sharing is None:
            return True
        self._given_up.discard(index)
        self._sharing.hear(index, self._clock())
        self._free(self._sharing, index)
        return index in self._sharing.members

    def check(self, index: int) -> None:
        """Raises Fenced: the worker was given up."""
        if index in self._given_up:
            raise self._fenced(index)

    def _fenced(self, index: int) -> Fenced:
        silence_s = self._of_job("coordinator").silence_s
        return Fenced(
            f"worker {index}: it was not heard for {silence_s:g} s, and others go on with its"
            " streams: start it again"
        )

    def end(self, index: int) -> Reply:
        """A worker has come to the end of its script, maybe of a loop that it has left early. One
        that takes part hears who else does: from now on nobody joins.
        """
        if self._sharing is None or index not in self._sharing.members:
            return Reply()
        self._free(self._sharing, index)
        self._sharing.forget(index)
        return Reply({"members": sorted(self._sharing.members)})

    def hear(self, index: int) -> None:
        """A worker has given a sign of life."""
        sharing = self._sharing
        if sharing is None:
            return
        now = self._clock()
        sharing.hear(index, now)
        for silent in sharing.silent(now):
            self._give_up(sharing, silent)

    def _give_up(self, sharing: Sharing, index: int) -> None:
        if index == FIRST and not sharing.owns(index):
            return
        log.warning(
            "worker %d was not heard for %g s: others go on with its streams",
            *(index, sharing.silence_s),
        )
        if index != FIRST:
            sharing.members.discard(index)
            self._given_up.add(index)
            if waiting := self._takers.pop(index, None):
                waiting.fail(self._fenced(index))
        self._free(sharing, index)
        self._keep()
        self._meetings.wait_no_longer(sharing.members)

    # ---- streams ----

    def enter(self, index: int, number: int, sequences: Sequence[int], num_steps: int) -> Reply:
        """A worker comes to a pass."""
        sharing = self._of_job("coord.enter")
        is_left = sharing.enter(index, number, sequences, num_steps)
        return Reply(
            {
                "is_over": not is_left,
                "num_steps": sharing.num_steps,
                "begun_at": sharing.begun_at(),
                "members": len(sharing.members),
            }
        )

    def take(self, index: int, number: int, done: Sequence[int]) -> Reply | Deferred:
        """Give a stream back that is done [stream, lease], if any, and take another."""
        sharing = self._of_job("coord.take")
        if index not in sharing.members:
            raise BadRequest(f"coord.take: expected worker {index} in a pass, found it in none")
        if done:
            if len(done) != 2:
                raise BadRequest(f"coord.take: expected done [stream, lease], found {done}")
            # Repeated when all were done, and another has begun the next pass: that keeps the
            # leases, and nothing of its streams is done.
            if number == sharing.number and sharing.finish(index, *done):
                self._serve(sharing)
        reply = _taken(sharing, index, number)
        if reply is not None:
            self._takers.pop(index, None)  # of a question that waited before
            return reply
        deferred = Deferred(describe=lambda: f"pass {number} {sharing.waiting_for(index)}")
        self._takers[index] = deferred
        return deferred

    def owns(self, index: int) -> bool:
        """Whether a worker has a stream."""
        return self._sharing is not None and self._sharing.owns(index)

    def give_back(self, index: int, *, parts: bool) -> Reply:
        """A worker stops amid the pass; if it parts, it takes part no more."""
        sharing = self._of_job("coord.give_back")
        if parts and index == FIRST:
            raise BadRequest("coord.give_back: expected worker 0, which saves, to stay")
        self._free(sharing, index)
        if parts:
            sharing.members.discard(index)
            sharing.forget(index)
            self._keep()
            self._meetings.wait_no_longer(sharing.members)
        return Reply()

    def _free(self, sharing: Sharing, index: int) -> None:
        self._takers.pop(index, None)  # it asks no more, or asks again
        if sharing.owns(index):
            sharing.free(index)
            self._serve(sharing)

    def _serve(self, sharing: Sharing) -> None:
        """Streams have become free, or are done: answer those who wait."""
        answers = {index: _taken(sharing, index, sharing.number) for index in self._takers}
        self._keep()
        for index, reply in answers.items():
            if reply is not None:
                self._takers.pop(index).reply(reply)

    # ---- what outlives the process ----

    def state(self) -> dict[str, Any]:
        """All but who waits: they ask again."""
        sharing = self._sharing
        return {
            "sharing": None if sharing is None else sharing.state(),
            "given_up": sorted(self._given_up),
        }

    def install(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state`."""
        if state["sharing"] is not None:
            self._sharing = Sharing.from_state(state["sharing"], self._clock())
        self._given_up = set(state["given_up"])


def _taken(sharing: Sharing, index: int, number: int) -> Reply | None:
    """The answer to who asks for a stream; None: not yet."""
    taken = sharing.take(index, number)
    if taken is not None:
        return Reply({"stream": taken.stream, "lease": taken.lease, "begun_at": taken.begun_at})
    if number != sharing.number or sharing.is_over:
        return Reply({"stream": None, "lease": 0, "begun_at": 0})
    return None
