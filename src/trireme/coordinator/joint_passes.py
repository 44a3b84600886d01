"""Passes on devices that all workers make together: where their processes meet, and whether they
are still the same at the end.

A worker that was restarted comes to the meeting again, and so do all others, whose process group
it has broken. So unlike other meetings this one keeps no answer for successors. Others that were
not in an exchange when it died, but at a meeting within the pass, learn of it there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trireme.coordinator.kept_state import KeptState
from trireme.coordinator.meetings import Meetings
from trireme.coordinator.workers import Workers
from trireme.errors import BadRequest, Fenced, TriremeError, Unavailable
from trireme.protocol.wire import need
from trireme.rpc import Deferred, Reply, Request

NO_PASS: dict[str, Any] = {"number": 0, "incarnations": {}}
_CHARS_MAX = 4096


@dataclass(frozen=True)
class _Attendant:
    """A process of a worker at the meeting."""

    number: int  # of the pass
    token: str
    incarnation: int
    body: dict[str, Any]
    waiting: Deferred


class JointPasses:
    """The processes that make the last such pass together: incarnations by worker."""

    def __init__(self, workers: Workers, meetings: Meetings, kept: KeptState) -> None:
        self._workers, self._meetings, self._kept = workers, meetings, kept
        self._number = 0
        self._incarnations: dict[int, int] = {}
        self._attendants: dict[int, _Attendant] = {}
        self._answered: dict[int, tuple[str, Reply]] = {}  # by worker: token, answer

    def on_meet(self, worker: int, request: Request) -> Reply | Deferred:
        """Answer with the bodies of all workers, in their order, when the living process of each
        has come. The same token gets the same answer. Raises BadRequest: workers are in different
        passes.
        """
        number, token = need(request.body, "pass", int), need(request.body, "token", str)
        if (num_chars := len(repr(request.body))) > _CHARS_MAX:
            raise BadRequest(
                f"coord.meet_in_pass: expected at most {_CHARS_MAX} characters, found {num_chars}"
            )
        record = self._workers.records[worker]
        if number != record.passes:
            raise BadRequest(
                f"coord.meet_in_pass: expected pass {record.passes} of worker {worker}, found"
                f" {number}"
            )
        answered_token, answer = self._answered.get(worker, ("", Reply()))
        if token == answered_token:
            return answer
        self._forget_predecessors()
        waiting = Deferred(
            describe=lambda: f"pass {number} on devices waits for workers {sorted(self._missing())}"
        )
        self._attendants[worker] = _Attendant(
            number, token, record.incarnation, need(request.body, "body", dict), waiting
        )
        self._fail_if_apart()
        if worker in self._attendants and not self._missing():
            self._begin(number)
        return waiting

    def note_call(self, worker: int) -> None:
        """A worker calls the coordinator: it does not wait here any more, unless by this call."""
        self._forget_predecessors()
        self._attendants.pop(worker, None)

    def fail_meetings(self) -> None:
        """Fail the meetings that wait for a worker which waits here for one that is there: neither
        would end.
        """
        self._meetings.fail_without(self._attendants.keys(), self._apart_error)

    def _apart_error(self, meeting: str, workers: list[int]) -> TriremeError:
        number = self._attendants[workers[0]].number
        if number == self._number:
            return Unavailable(
                f"{meeting}: workers {workers} have been restarted and begin pass {number} on"
                " devices again, as all others have to: start this worker again, too"
            )
        return BadRequest(
            f"{meeting}: expected all workers, found {workers} at the beginning of pass {number} on"
            " devices: every worker must do the same in the same order"
        )

    def _forget_predecessors(self) -> None:
        for worker, one in list(self._attendants.items()):
            if one.incarnation != self._workers.records[worker].incarnation:
                del self._attendants[worker]
                one.waiting.fail(Fenced(f"worker {worker}: a newer process has taken over"))

    def _missing(self) -> set[int]:
        return self._workers.participants - self._attendants.keys()

    def _fail_if_apart(self) -> None:
        numbers = {worker: one.number for worker, one in self._attendants.items()}
        if len(set(numbers.values())) <= 1:
            return
        error = BadRequest(
            "coord.meet_in_pass: expected all workers in the same pass, found (worker: pass)"
            f" {numbers}: every worker must do the same in the same order"
        )
        attendants, self._attendants = self._attendants, {}
        for one in attendants.values():
            one.waiting.fail(error)

    def _begin(self, number: int) -> None:
        attendants, self._attendants = sorted(self._attendants.items()), {}
        self._number = number
        self._incarnations = {worker: one.incarnation for worker, one in attendants}
        reply = Reply({"bodies": [one.body for _, one in attendants]})
        self._answered = {worker: (one.token, reply) for worker, one in attendants}
        self._kept.flush_change()
        for _, one in attendants:
            one.waiting.reply(reply)

    def members(self, number: int) -> list[int]:
        """The workers whose processes make this pass together; empty: some of them are gone, or it
        is not this one.
        """
        records = self._workers.records
        are_same = all(records[w].incarnation == i for w, i in self._incarnations.items())
        return sorted(self._incarnations) if number == self._number and are_same else []

    def state(self) -> dict[str, Any]:
        return {"number": self._number, "incarnations": dict(self._incarnations)}

    def install(self, state: Mapping[str, Any]) -> None:
        self._number = int(state["number"])
        self._incarnations = dict(state["incarnations"])
