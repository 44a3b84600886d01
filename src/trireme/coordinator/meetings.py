"""Meetings of all workers: who has come with what, who waits, and what came of those that are over.

A worker that starts again runs its script from the beginning, and so comes to meetings that are
over: it gets the answers that its predecessor got. These are kept within bounds; those of passes
that are over go first, of these the largest.

Not thread-safe: the coordinator locks around it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack
import numpy as np

from trireme.errors import BadRequest, ResourceExhausted, TriremeError
from trireme.protocol.wire import Array
from trireme.rpc import Deferred, Reply

KEPT_MAX = 4096
KEPT_BYTES_MAX = 64 << 20
KEPT_MIN = 4
"""The last ones stay whatever their size, for requests whose answer was lost."""
FORGOTTEN_MAX = 1 << 16


@dataclass(frozen=True)
class Name:
    """Which meeting. number: of the pass that the workers are in, 0 before the first. path: of the
    meeting in their script, which is the same for all; empty: that in which the pass begins.
    """

    number: int
    path: str

    def __str__(self) -> str:
        return f"meeting {self.path} of pass {self.number}" if self.path else f"pass {self.number}"


@dataclass(frozen=True)
class Arrival:
    """What a worker brings to a meeting."""

    worker: int
    purpose: str
    body: Any = None
    arrays: Sequence[Array] = ()


@dataclass
class Meeting:
    """One that waits for workers: what each of those that are there has brought. conclude: makes
    the answer.
    """

    purpose: str
    conclude: Callable[[Meeting], Reply]
    arrived: dict[int, Arrival] = field(default_factory=dict)
    waiting: list[Deferred] = field(default_factory=list)


@dataclass(frozen=True)
class Over:
    """What came of a meeting."""

    purpose: str
    reply: Reply
    num_bytes: int


class Meetings:
    def __init__(self) -> None:
        self._open: dict[Name, Meeting] = {}
        self._over: dict[Name, Over] = {}
        self._num_bytes = 0
        self._forgotten: dict[Name, None] = {}

    def come(
        self,
        name: Name,
        arrival: Arrival,
        members: Collection[int],
        conclude: Callable[[Meeting], Reply],
        describe: Callable[[], str],
    ) -> Reply | Deferred:
        """Wait for all members, then answer all. A repeated request after the end gets the same
        answer, as does a worker's successor; of what the two bring, the first counts. Who is no
        member brings nothing, and gets the answer.

        Args:
            members: workers that take part.
            conclude: makes the answer. If it raises, nobody is answered anything else.
            describe: see Deferred.

        Raises:
            BadRequest: others came for another purpose. ResourceExhausted: the meeting is over, and
                its answer is not kept any more.
        """
        self._check_purpose(name, arrival, members)
        if name in self._over:
            return self._over[name].reply
        if name in self._forgotten:
            raise forgotten(name, arrival.purpose)
        meeting = self._open.setdefault(name, Meeting(arrival.purpose, conclude))
        if arrival.worker in members:
            meeting.purpose, meeting.conclude = arrival.purpose, conclude
            meeting.arrived.setdefault(arrival.worker, arrival)
        if not meeting.arrived or set(members) - meeting.arrived.keys():
            deferred = Deferred(describe=describe)
            meeting.waiting.append(deferred)
            return deferred
        return self._end(name, meeting)

    def _end(self, name: Name, meeting: Meeting) -> Reply:
        del self._open[name]
        try:
            reply = meeting.conclude(meeting)
        except TriremeError as error:
            for deferred in meeting.waiting:
                deferred.fail(error)
            raise
        for deferred in meeting.waiting:
            deferred.reply(reply)
        return reply

    def wait_no_longer(self, members: Collection[int]) -> None:
        """End the meetings that waited for a worker that is no member any more. What it had brought
        counts.
        """
        for name, meeting in list(self._open.items()):
            if meeting.arrived and not set(members) - meeting.arrived.keys():
                with contextlib.suppress(TriremeError):  # all that wait have been told
                    self._end(name, meeting)

    def _check_purpose(self, name: Name, arrival: Arrival, members: Collection[int]) -> None:
        index, purpose = arrival.worker, arrival.purpose
        over = self._over.get(name)
        if over is not None and over.purpose != purpose:
            raise BadRequest(
                f"{name}: it was for {over.purpose!r} and is over, worker {index} comes for"
                f" {purpose!r}; a worker that starts again must do the same as before"
            )
        meeting = self._open.get(name)
        if meeting is None or meeting.purpose == purpose:
            return
        if index not in members:
            raise BadRequest(
                f"{name}: it is for {meeting.purpose!r}, worker {index}, which has come late, comes"
                f" for {purpose!r}; every worker must run the same script"
            )
        if not meeting.arrived:  # those who have come late do not say what it is for
            return
        error = BadRequest(
            f"{name}: workers {sorted(meeting.arrived)} came for {meeting.purpose!r}, worker"
            f" {index} for {purpose!r}; every worker must do the same in the same order"
        )
        for deferred in self._open.pop(name).waiting:
            deferred.fail(error)
        raise error

    def keep(self, name: Name, purpose: str, reply: Reply) -> None:
        """Keep the answer of a meeting that is over, at the cost of older ones."""
        num_bytes = sum(a.nbytes for a in reply.arrays) + len(msgpack.packb(reply.body))
        self._over[name] = Over(purpose, reply, num_bytes)
        self._num_bytes += num_bytes
        while (self._num_bytes > KEPT_BYTES_MAX or len(self._over) > KEPT_MAX) and len(
            self._over
        ) > KEPT_MIN:
            self._forget_one(name.number)

    def _forget_one(self, current: int) -> None:
        older = itertools.islice(self._over.items(), len(self._over) - KEPT_MIN)
        oldest, _ = min(older, key=lambda item: (item[0].number >= current, -item[1].num_bytes))
        self._num_bytes -= self._over.pop(oldest).num_bytes
        self._forgotten[oldest] = None
        while len(self._forgotten) > FORGOTTEN_MAX:
            del self._forgotten[next(iter(self._forgotten))]

    def is_open_or_kept(self, name: Name) -> bool:
        return name in self._open or name in self._over

    def forget_names(self, number: int) -> None:
        """No worker, and no successor of one, is in a pass before this one any more."""
        old = [name for name in self._forgotten if name.number < number]
        for name in old:
            del self._forgotten[name]

    def met_by(self, worker: int, number: int) -> list[str]:
        """Paths of the meetings of a pass that the worker, or a predecessor, has come to."""
        names = [*self._over, *self._forgotten]
        names += [name for name, meeting in self._open.items() if worker in meeting.arrived]
        return [name.path for name in names if name.number == number]

    def missing(self, name: Name, members: Collection[int]) -> str:
        """Whom an open meeting waits for, for messages."""
        meeting = self._open.get(name)
        if meeting is None:
            return f"{name} has ended"
        missing = sorted(set(members) - meeting.arrived.keys())
        return f"{name} ({meeting.purpose}) waits for workers {missing}"

    # ---- what outlives the process ----

    def state(self) -> dict[str, Any]:
        """All but those that are open, in msgpack's types: who waits there asks again."""
        return {
            "over": [
                [name.number, name.path, of.purpose, of.reply.body, *_packed(of.reply.arrays)]
                for name, of in self._over.items()
            ],
            "forgotten": [[name.number, name.path] for name in self._forgotten],
        }

    def install(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state`."""
        for number, path, purpose, body, *arrays in state["over"]:
            self.keep(Name(number, path), purpose, Reply(body, _unpacked(arrays)))
        self._forgotten |= {Name(number, path): None for number, path in state["forgotten"]}


def forgotten(name: Name, purpose: str) -> ResourceExhausted:
    """The error of a worker that comes to a meeting of which nothing is kept."""
    return ResourceExhausted(
        f"{name}: it ({purpose}) is over, and of its answers the coordinator keeps at most"
        f" {KEPT_MAX} and {KEPT_BYTES_MAX >> 20} MiB; a worker that starts again cannot go on from"
        " here: start the job again and load the newest checkpoint"
    )


def _packed(arrays: Sequence[Array]) -> tuple[Any, list[bytes]]:
    """Arrays in msgpack's types: [[dtype, shape]], bytes."""
    return [[a.dtype.str, list(a.shape)] for a in arrays], [a.tobytes() for a in arrays]


def _unpacked(packed: Sequence[Any]) -> list[Array]:
    specs, data = packed
    return [
        np.frombuffer(of, np.dtype(kind)).reshape(shape)
        for (kind, shape), of in zip(specs, data, strict=True)
    ]
