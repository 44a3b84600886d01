"""Meetings: barriers at which every worker gets what each one contributed, or worker 0 alone does.

A worker that starts again runs its script from the beginning, and so comes to meetings that have
ended: it gets the answers that its predecessor got. These are kept within bounds; those of old
passes are dropped first, of these the largest.
"""

from __future__ import annotations

import contextlib
import itertools
import zlib
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgpack
import numpy as np

from trireme.coordinator.kept_state import KeptState
from trireme.coordinator.workers import Workers
from trireme.errors import BadRequest, ResourceExhausted, TriremeError
from trireme.protocol.wire import ALL, FIRST, MEETING_ARRAYS, SUM, Array, need
from trireme.rpc import Deferred, HeldBytes, Reply, Request
from trireme.storage.document import Part

GATHER_BYTES_MAX = 64 << 20
NAME_MAX = 1024
KEPT_MAX = 4096
KEPT_BYTES_MAX = 64 << 20
KEPT_MIN = 4
"""The last answers are kept whatever their size, for repeated requests."""
DROPPED_MAX = 1 << 16


@dataclass(frozen=True)
class MeetingName:
    """Names a meeting in the scripts of all workers."""

    number: int  # of the pass, 0 before the first
    path: str  # within the pass; empty: the meeting that begins it

    def __str__(self) -> str:
        return f"meeting {self.path} of pass {self.number}" if self.path else f"pass {self.number}"

    def precedes(self, other: MeetingName) -> bool:
        """Whether a script comes to this meeting first. False where the names do not tell."""
        if self.number != other.number:
            return self.number < other.number
        pairs = zip(self.path.split("/"), other.path.split("/"), strict=False)
        one, two = next((pair for pair in pairs if pair[0] != pair[1]), ("", ""))
        return one.isdecimal() and two.isdecimal() and int(one) < int(two)


@dataclass(frozen=True)
class Contribution:
    """What a worker brings to a meeting. exchanges: how many the thread that waits here has made,
    by group of workers.
    """

    worker: int
    purpose: str
    body: Any = None
    arrays: Sequence[Array] = ()
    kind: str = ALL  # who gets the arrays
    exchanges: Mapping[str, int] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return _num_bytes([self.body, self.exchanges], self.arrays)


@dataclass
class Meeting:
    """A meeting that waits for workers. conclude: makes the answer."""

    purpose: str
    conclude: Callable[[Meeting], Reply]
    contributions: dict[int, Contribution] = field(default_factory=dict)
    waiting: dict[int, Deferred] = field(default_factory=dict)  # by worker: its last call


@dataclass(frozen=True)
class Outcome:
    """The answer of a meeting that has ended."""

    purpose: str
    reply: Reply
    num_bytes: int
    kept: Part  # the reply, in msgpack's types


class Meetings:
    def __init__(self, workers: Workers, kept: KeptState, held: HeldBytes) -> None:
        self._workers, self._kept, self._held = workers, kept, held
        self._open: dict[MeetingName, Meeting] = {}
        self._outcomes: dict[MeetingName, Outcome] = {}
        self._num_bytes = 0  # of the outcomes
        self._dropped: dict[MeetingName, None] = {}  # ended, and the outcome is not kept any more

    def on_gather(self, worker: int, request: Request) -> Reply | Deferred:
        """Answer with all contributions, in the order of the workers, when all have come, or as
        `MEETING_ARRAYS` says.

        Workers that name the same meeting must also name the same purpose, or workers that do
        different things would take each other's answers.
        """
        body = request.body
        if (num_bytes := sum(array.nbytes for array in request.arrays)) > GATHER_BYTES_MAX:
            raise BadRequest(
                f"coord.gather: expected at most {GATHER_BYTES_MAX} bytes per worker, found"
                f" {num_bytes}"
            )
        path, purpose = need(body, "name", str), need(body, "purpose", str)
        if not path or max(len(path), len(purpose)) > NAME_MAX:
            raise BadRequest(
                f"coord.gather: expected a name and a purpose of at most {NAME_MAX} characters,"
                f" found {path[:NAME_MAX]!r} and {purpose[:NAME_MAX]!r}"
            )
        kind = need({"arrays": ALL, **body}, "arrays", str)
        if kind not in MEETING_ARRAYS:
            raise BadRequest(f"coord.gather: expected one of {MEETING_ARRAYS}, found {kind[:80]!r}")
        name = MeetingName(need(body, "pass", int), path)
        is_old = name.number < self._workers.records[worker].passes
        if is_old and name not in self._open and name not in self._outcomes:
            raise _dropped_error(name, purpose)

        def conclude(meeting: Meeting) -> Reply:
            contributions = [one for _, one in sorted(meeting.contributions.items())]
            if len(kinds := {one.kind for one in contributions}) > 1:
                raise BadRequest(f"{name}: expected arrays of one kind, found {sorted(kinds)}")
            contributions = [_sum(str(name), contributions)] if kind == SUM else contributions
            bodies = [[one.body, len(one.arrays)] for one in contributions]
            arrays = [array for one in contributions for array in one.arrays]
            to = {} if kind == ALL else {"to": FIRST}
            reply = Reply({"bodies": bodies, **to}, arrays)
            self._keep_outcome(name, purpose, reply)
            self._kept.flush_change()
            return reply

        arrays = list(request.arrays)
        exchanges = need({"exchanges": {}, **body}, "exchanges", dict)
        if not all(isinstance(number, int) for number in exchanges.values()):
            raise BadRequest(
                f"coord.gather: expected numbers of exchanges, found {str(exchanges)[:80]}"
            )
        brought = Contribution(worker, purpose, need(body, "body", dict), arrays, kind, exchanges)
        return self.attend(name, brought, conclude)

    def attend(
        self, name: MeetingName, contribution: Contribution, conclude: Callable[[Meeting], Reply]
    ) -> Reply | Deferred:
        """Wait for all workers that take part, then answer all with the result of `conclude`, or
        with its error.

        A repeated request and a worker's successor get the same answer after the end; of what they
        bring, the first counts. A worker that does not take part gets the answer and contributes
        nothing.

        Raises BadRequest: others came for another purpose. ResourceExhausted: the meeting has
        ended, and its answer is not kept any more.
        """
        self._check_purpose(name, contribution)
        if name in self._outcomes:
            return _reply_to(contribution.worker, self._outcomes[name].reply)
        if name in self._dropped:
            raise _dropped_error(name, contribution.purpose)
        if name not in self._open:
            self._held.hold(("meeting", name), len(name.path))
        meeting = self._open.setdefault(name, Meeting(contribution.purpose, conclude))
        if contribution.worker in self._workers.participants:
            if contribution.worker not in meeting.contributions:
                self._held.hold(("meeting", name, contribution.worker), contribution.num_bytes)
            meeting.purpose, meeting.conclude = contribution.purpose, conclude
            meeting.contributions.setdefault(contribution.worker, contribution)
        if not meeting.contributions or self._missing(meeting):
            deferred = Deferred(describe=lambda: self._describe(name))
            meeting.waiting[contribution.worker] = deferred
            self._fail_passed(name)
            return deferred
        return _reply_to(contribution.worker, self._end(name, meeting))

    def _fail_passed(self, name: MeetingName) -> None:
        """Fail the meetings that wait for a worker which is at a later one, because a call before
        it has failed: it does not come any more. Fail two that wait for workers of each other:
        their scripts differ. name: of the meeting that a worker has come to.
        """
        pairs = [pair for other in self._open for pair in ((name, other), (other, name))]
        for early, late in pairs:
            meeting, later = self._open.get(early), self._open.get(late)
            if meeting is None or later is None or late.precedes(early):
                continue
            gone = self._missing(meeting) & later.contributions.keys()
            if gone and early.precedes(late):
                error = BadRequest(
                    f"{early} ({meeting.purpose}): expected all workers, found {sorted(gone)} at"
                    f" {late} ({later.purpose}) already: a call before it has failed there"
                )
                self._fail(early, error)
            elif gone and self._missing(later) & meeting.contributions.keys():
                error = _purposes_error(early, meeting, sorted(gone), later.purpose)
                self._fail(early, error)
                self._fail(late, error)

    def on_in_exchange(self, worker: int, request: Request) -> Reply:
        """Fail a meeting at which others wait for this worker, and it for them: in an exchange of a
        group of workers that they have not begun. Raises BadRequest: there was one.
        """
        group, ended = need(request.body, "group", str), need(request.body, "ended", int)
        for name, meeting in list(self._open.items()):
            waiting = [one.exchanges.get(group) for one in meeting.contributions.values()]
            is_late = any(number is not None and number <= ended for number in waiting)
            if is_late and worker in self._missing(meeting):
                error = _purposes_error(name, meeting, [worker], "the next step")
                self._fail(name, error)
                raise error
        return Reply()

    def fail_without(
        self, away: Set[int], make_error: Callable[[str, list[int]], TriremeError]
    ) -> None:
        """Fail the meetings that wait for workers who are `away` until others at the meeting come
        to them. make_error: of a meeting, as messages name it, and those that it lacks.
        """
        for name, meeting in list(self._open.items()):
            missing = sorted(self._missing(meeting) & away)
            if missing and meeting.contributions.keys() - away:
                self._fail(name, make_error(f"{name} ({meeting.purpose})", missing))

    def fail_without_ended(self) -> None:
        """Fail the meetings that wait for workers whose scripts have ended."""
        self.fail_without(self._workers.ended(), _ended_error)

    def _missing(self, meeting: Meeting) -> set[int]:
        return self._workers.participants - meeting.contributions.keys()

    def _describe(self, name: MeetingName) -> str:
        """Which workers a meeting waits for, for messages."""
        meeting = self._open.get(name)
        if meeting is None:
            return f"{name} has ended"
        return f"{name} ({meeting.purpose}) waits for workers {sorted(self._missing(meeting))}"

    def _end(self, name: MeetingName, meeting: Meeting) -> Reply:
        self._close(name)
        try:
            reply = meeting.conclude(meeting)
        except TriremeError as error:
            for deferred in meeting.waiting.values():
                deferred.fail(error)
            raise
        for worker, deferred in meeting.waiting.items():
            deferred.reply(_reply_to(worker, reply))
        return reply

    def _fail(self, name: MeetingName, error: TriremeError) -> None:
        for deferred in self._close(name).waiting.values():
            deferred.fail(error)

    def _close(self, name: MeetingName) -> Meeting:
        """The meeting, which is open no more."""
        meeting = self._open.pop(name)
        self._held.free(("meeting", name))
        for worker in meeting.contributions:
            self._held.free(("meeting", name, worker))
        return meeting

    def end_complete(self) -> None:
        """End the meetings that waited only for workers that do not take part any more. What these
        contributed before counts.
        """
        for name, meeting in list(self._open.items()):
            if meeting.contributions and not self._missing(meeting):
                with contextlib.suppress(TriremeError):  # those that wait get it
                    self._end(name, meeting)

    def _check_purpose(self, name: MeetingName, contribution: Contribution) -> None:
        worker, purpose = contribution.worker, contribution.purpose
        outcome = self._outcomes.get(name)
        if outcome is not None and outcome.purpose != purpose:
            raise BadRequest(
                f"{name}: it was for {outcome.purpose!r} and is over, worker {worker} comes for"
                f" {purpose!r}; a worker that starts again must do the same as before"
            )
        meeting = self._open.get(name)
        if meeting is None or meeting.purpose == purpose:
            return
        if worker not in self._workers.participants:
            raise BadRequest(
                f"{name}: it is for {meeting.purpose!r}, worker {worker}, which has come late,"
                f" comes for {purpose!r}; every worker must run the same script"
            )
        if not meeting.contributions:  # late workers alone do not fix the purpose
            return
        error = _purposes_error(name, meeting, [worker], purpose)
        self._fail(name, error)
        raise error

    # ---- meetings that have ended ----

    def _keep_outcome(self, name: MeetingName, purpose: str, reply: Reply) -> None:
        num_bytes = _num_bytes(reply.body, reply.arrays)
        self._held.note(("outcome", name), num_bytes + len(name.path))
        self._outcomes[name] = Outcome(purpose, reply, num_bytes, partial(_to_keep, reply))
        self._num_bytes += num_bytes
        while (self._num_bytes > KEPT_BYTES_MAX or len(self._outcomes) > KEPT_MAX) and len(
            self._outcomes
        ) > KEPT_MIN:
            self._drop_one(name.number)

    def _drop_one(self, current: int) -> None:
        older = itertools.islice(self._outcomes.items(), len(self._outcomes) - KEPT_MIN)
        oldest, _ = min(older, key=lambda item: (item[0].number >= current, -item[1].num_bytes))
        self._num_bytes -= self._outcomes.pop(oldest).num_bytes
        self._held.free(("outcome", oldest))
        self._held.note(("dropped", oldest), len(oldest.path))
        self._dropped[oldest] = None
        while len(self._dropped) > DROPPED_MAX:
            self._forget(next(iter(self._dropped)))

    def _forget(self, name: MeetingName) -> None:
        del self._dropped[name]
        self._held.free(("dropped", name))

    def forget_dropped(self, number: int) -> None:
        """Forget names of passes before this one, which no worker or successor enters any more."""
        for name in [name for name in self._dropped if name.number < number]:
            self._forget(name)

    def attended(self, worker: int, number: int) -> list[str]:
        """Paths of the meetings of a pass that the worker, or a predecessor, has come to."""
        names = [*self._outcomes, *self._dropped]
        names += [name for name, meeting in self._open.items() if worker in meeting.contributions]
        return [name.path for name in names if name.number == number]

    def state(self) -> dict[str, Any]:
        """In msgpack's types, without open meetings: workers that wait there ask again."""
        over = [[n.number, n.path, one.purpose, one.kept] for n, one in self._outcomes.items()]
        forgotten = [[name.number, name.path] for name in self._dropped]
        return {"over": over, "forgotten": forgotten}

    def install(self, state: Mapping[str, Any]) -> None:
        for number, path, purpose, *reply in state["over"]:
            body, forms, contents = reply if len(reply) == 3 else reply[0]  # older files have three
            arrays = [
                np.frombuffer(content, np.dtype(kind)).reshape(shape)
                for (kind, shape), content in zip(forms, contents, strict=True)
            ]
            self._keep_outcome(MeetingName(number, path), purpose, Reply(body, arrays))
        for number, path in state["forgotten"]:
            self._held.note(("dropped", MeetingName(number, path)), len(path))
            self._dropped[MeetingName(number, path)] = None


def _reply_to(worker: int, reply: Reply) -> Reply:
    """The answer as this worker gets it."""
    if worker == 0 or reply.body.get("to") != FIRST:
        return reply
    return Reply({**reply.body, "bodies": [[body, 0] for body, _ in reply.body["bodies"]]})


def _sum(subject: str, contributions: Sequence[Contribution]) -> Contribution:
    """The arrays of all, added element by element in the order of the workers. Raises BadRequest:
    they differ in number, dtype or shape, or the bodies do.
    """
    first = contributions[0]
    totals = [array.copy() for array in first.arrays]
    if other := {array.dtype.name for array in totals} - {"float64", "int64"}:
        raise BadRequest(f"{subject}: expected float64 or int64 to sum, found {sorted(other)}")
    forms = [(array.dtype.str, array.shape) for array in totals]
    for one in contributions[1:]:
        own = [(array.dtype.str, array.shape) for array in one.arrays]
        if one.body != first.body or own != forms:
            raise BadRequest(
                f"{subject}: expected alike arrays to sum, found {first.body} and {forms} of worker"
                f" {first.worker}, {one.body} and {own} of worker {one.worker}"
            )
        with np.errstate(over="ignore", invalid="ignore"):  # the sum shows it
            for total, array in zip(totals, one.arrays, strict=True):
                total += array
    workers = zlib.crc32(str([one.worker for one in contributions]).encode())  # who they were
    return Contribution(first.worker, "", {**first.body, "workers": workers}, totals)


def _to_keep(reply: Reply) -> list[Any]:
    forms = [[array.dtype.str, list(array.shape)] for array in reply.arrays]
    return [reply.body, forms, [array.tobytes() for array in reply.arrays]]


def _num_bytes(body: Any, arrays: Sequence[Array]) -> int:
    return sum(array.nbytes for array in arrays) + len(msgpack.packb(body))


def _purposes_error(
    name: MeetingName, meeting: Meeting, workers: list[int], purpose: str
) -> BadRequest:
    return BadRequest(
        f"{name}: workers {sorted(meeting.contributions)} came for {meeting.purpose!r}, workers"
        f" {workers} for {purpose!r}; every worker must do the same in the same order, also where"
        " worker 0 alone writes or shows what comes of it"
    )


def _ended_error(meeting: str, workers: list[int]) -> BadRequest:
    return BadRequest(
        f"{meeting}: expected all workers, found the scripts of {workers} at their ends: every"
        " worker makes this call, also where worker 0 alone writes or shows what comes of it"
    )


def _dropped_error(name: MeetingName, purpose: str) -> ResourceExhausted:
    return ResourceExhausted(
        f"{name}: it ({purpose}) is over, and of its answers the coordinator keeps at most"
        f" {KEPT_MAX} and {KEPT_BYTES_MAX >> 20} MiB; a restarted worker cannot continue from"
        " here: start the job again and load the newest checkpoint"
    )
