"""Streams that workers share out among themselves: who takes part, and who has which stream.

A pass has a fixed number of streams. A worker takes one that nobody has, trains on it to its end,
gives it back as done and takes the next. Whoever takes a stream that another has had goes on behind
its last applied sequence; each taking has a higher lease, the incarnation of its pushes, so that
the former owner is fenced.

Not thread-safe: the coordinator locks around it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trireme.errors import BadRequest, Fenced
from trireme.protocol.membership import Taken

NOBODY = -1


@dataclass
class Lease:
    """What is known of one stream in the pass.

    owner: a worker, or NOBODY. number: raised whenever it is taken. begun_at: the last sequence of
    its pushes before the pass. is_done: all of it has been applied.
    """

    owner: int = NOBODY
    number: int = 0
    begun_at: int = 0
    is_done: bool = True


class Sharing:
    """members: workers that take part; meetings wait for them, and for nobody else.

    Args:
        num_streams: that each pass is cut into.
        members: who takes part from the beginning.
        silence_s: a member that is not heard for so long is taken for dead.

    Attributes:
        number: of the pass under way. num_steps: that the worker that opened it had made.
    """

    def __init__(self, num_streams: int, members: Iterable[int], silence_s: float) -> None:
        self.members = set(members)
        self.silence_s = silence_s
        self.number = self.num_steps = 0
        self._leases = [Lease() for _ in range(num_streams)]
        self._heard: dict[int, float] = {}
        self._heard_any = -math.inf

    @property
    def is_over(self) -> bool:
        """Whether all streams of the pass are done."""
        return all(lease.is_done for lease in self._leases)

    # ---- passes ----

    def enter(self, worker: int, number: int, begun_at: Sequence[int], num_steps: int) -> bool:
        """A worker comes to a pass, and takes part from now on if there is something left of it;
        returns whether there is. Who comes first to a pass opens it.

        Args:
            begun_at: per stream, the last sequence that all servers have applied.
            num_steps: that the worker has made.
        """
        if len(begun_at) != len(self._leases):
            raise BadRequest(
                f"coord.enter: expected the sequences of {len(self._leases)} streams,"
                f" found {len(begun_at)}"
            )
        if number == self.number + 1 and self.is_over:
            self.number, self.num_steps = number, num_steps
            for lease, sequence in zip(self._leases, begun_at, strict=True):
                lease.owner, lease.begun_at, lease.is_done = NOBODY, sequence, False
        if number > self.number:
            raise BadRequest(
                f"coord.enter: expected pass {self.number} of worker {worker}, of which streams"
                f" {self.left()} are not done, found pass {number}"
            )
        if number < self.number or self.is_over:
            return False
        self.members.add(worker)
        return True

    def take(self, worker: int, number: int) -> Taken | None:
        """A stream of pass `number` that nobody has, or the one that the worker has already; None:
        there is none now, and none at all if the pass is over.
        """
        if number != self.number:
            return None
        for stream, lease in enumerate(self._leases):
            if lease.owner == worker:
                return Taken(stream, lease.number, lease.begun_at)
        for stream, lease in enumerate(self._leases):
            if lease.owner == NOBODY and not lease.is_done:
                lease.owner = worker
                lease.number += 1
                return Taken(stream, lease.number, lease.begun_at)
        return None

    def finish(self, worker: int, stream: int, number: int) -> bool:
        """All of a stream has been applied; returns whether that is new. Raises Fenced: another has
        taken it.
        """
        if not 0 <= stream < len(self._leases):
            raise BadRequest(
                f"coordinator: expected a stream below {len(self._leases)}, found {stream}"
            )
        lease = self._leases[stream]
        if number != lease.number:
            raise Fenced(
                f"stream {stream}: lease {lease.number} has taken over, worker {worker} had"
                f" {number}: it was not heard for {self.silence_s:g} s, or has been started again"
            )
        is_new = not lease.is_done
        lease.owner, lease.is_done = NOBODY, True
        return is_new

    def left(self) -> list[int]:
        """Streams that are not done."""
        return [stream for stream, lease in enumerate(self._leases) if not lease.is_done]

    def begun_at(self) -> list[int]:
        """Per stream, the last sequence of its pushes before the pass."""
        return [lease.begun_at for lease in self._leases]

    def waiting_for(self, worker: int) -> str:
        """Whom a worker waits for that finds no stream, for messages."""
        others = [
            f"{stream} (worker {lease.owner})"
            for stream, lease in enumerate(self._leases)
            if lease.owner not in (NOBODY, worker)
        ]
        return f"waits for streams {', '.join(others) or 'none any more'}"

    def owns(self, worker: int) -> bool:
        """Whether a worker has a stream."""
        return any(lease.owner == worker for lease in self._leases)

    def free(self, worker: int) -> None:
        """Whoever comes next may have what this worker has."""
        for lease in self._leases:
            if lease.owner == worker:
                lease.owner = NOBODY

    # ---- signs of life ----

    def hear(self, worker: int, now: float) -> None:
        """A worker gives a sign of life. The first one after a pause of all: it was this process
        that stood still, and nobody is judged by the time before.
        """
        if now - self._heard_any > self.silence_s / 2:
            self._heard = dict.fromkeys(self._heard, now)
        self._heard[worker] = self._heard_any = now

    def forget(self, worker: int) -> None:
        """No more signs are expected of it."""
        self._heard.pop(worker, None)

    def silent(self, now: float) -> list[int]:
        """Members that were heard once, and not for too long since."""
        return [
            worker
            for worker in sorted(self.members)
            if now - self._heard.get(worker, now) > self.silence_s
        ]

    # ---- what outlives the process ----

    def state(self) -> dict[str, Any]:
        """In msgpack's types."""
        return {
            "members": sorted(self.members),
            "silence_s": self.silence_s,
            "pass": [self.number, self.num_steps],
            "leases": [vars(lease) for lease in self._leases],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], now: float) -> Sharing:
        """The inverse of `state`. Members are given time to be heard."""
        made = cls(0, state["members"], state["silence_s"])
        made.number, made.num_steps = state["pass"]
        made._leases = [Lease(**lease) for lease in state["leases"]]
        made._heard, made._heard_any = dict.fromkeys(made.members, now), now
        return made
