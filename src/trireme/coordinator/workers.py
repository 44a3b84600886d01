"""The workers that have joined, and which of them take part.

Meetings wait for the workers that take part. These are the ones that the job begins with; where
streams are leased, workers may also join late, leave early, or be given up after a silence.
"""

import math
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from trireme.errors import BadRequest, Corruption, Fenced
from trireme.protocol.wire import need
from trireme.rpc import Request

TOKENS_MAX = 16


@dataclass
class WorkerRecord:
    """One worker, changed by `Workers` alone. The fields are those of the kept state.

    tokens: incarnation by token, of the last processes; a repeated join has a known token.
    call: number of the last call. Calls are sequential: a lower number was delayed.
    first: incarnation that began this run of the script.
    passes: the last pass begun. note: what the worker noted there for a successor.
    trained: the last pass on a device that it has ended. trained_steps: its steps until then.
    """

    incarnation: int = 0
    tokens: dict[str, int] = field(default_factory=dict)
    call: int = 0
    first: int = 1
    passes: int = 0
    note: list[int] = field(default_factory=list)
    trained: int = 0
    trained_steps: int = 0
    has_ended: bool = False

    def begin_incarnation(self, token: str) -> None:
        self.incarnation += 1
        self.tokens[token] = self.incarnation
        while len(self.tokens) > TOKENS_MAX:
            del self.tokens[next(iter(self.tokens))]
        self.call = 0


class Workers:
    """All workers by index. Other parts read the fields and call methods to change them.

    participants: those that take part. given_up: those that were given up. silence_s: a participant
    that sends no heartbeat for so long may be given up.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.records: dict[int, WorkerRecord] = {}
        self.participants: set[int] = set()
        self.silence_s = 0.0
        self.given_up: set[int] = set()
        self._clock = clock
        self._heartbeats: dict[int, float] = {}
        self._last_heartbeat = -math.inf

    def caller(self, request: Request) -> int:
        """Index of the worker that calls. Raises Corruption: it has not joined this coordinator.
        Fenced: it has a successor, or was given up. BadRequest: a later call of it has arrived
        before this one.
        """
        index = need(request.body, "worker", int)
        incarnation = need(request.body, "incarnation", int)
        record = self.records.get(index)
        if record is None:
            raise Corruption(
                f"coordinator: expected worker {index} to have joined, found a coordinator that has"
                " begun anew without what it knew. Start the job again and load the newest"
                " checkpoint; --durability process keeps the state of server 0 when it is killed"
            )
        if incarnation < record.incarnation:
            raise Fenced(
                f"worker {index}: incarnation {record.incarnation} has taken over,"
                f" found {incarnation}"
            )
        if index in self.given_up:
            raise self._given_up_error(index)
        call = need(request.body, "call", int)
        if call < record.call:
            raise BadRequest(
                f"{request.method}: expected call {record.call} or later of worker {index},"
                f" found {call}: the network delivered it twice"
            )
        record.call = call
        return index

    # ---- the run of the script ----

    def begin_job(self, num_workers: int, silence_s: float) -> None:
        self.silence_s = silence_s
        self._begin_run(num_workers)

    def _begin_run(self, num_workers: int) -> None:
        """Only the workers that the job begins with take part, until others join late."""
        self.participants = set(range(num_workers))
        self.given_up.clear()

    def restart(self, index: int, token: str, begun: int, pass_number: int) -> bool:
        """Admit a process of this worker; returns whether it is a new one, not a repeated join.

        begun: the pass with which the last run of the script ended. pass_number: the pass that
        leased streams are in.
        """
        record = self.records.setdefault(index, WorkerRecord(passes=begun))
        if token in record.tokens:
            return False
        record.begin_incarnation(token)
        self.given_up.discard(index)
        self.note_heartbeat(index)
        if index not in self.participants:
            # It runs its script as if it had been there up to the pass under way.
            record.passes = max(pass_number, begun)
            record.has_ended, record.first = False, 0
        return True

    def begin_pass(self, index: int, number: int, note: list[int]) -> int:
        """A worker begins a pass; returns the lowest that any worker is in."""
        self.records[index].passes, self.records[index].note = number, note
        return min(record.passes for record in self.records.values())

    def end_device_pass(self, index: int, number: int, num_steps: int) -> None:
        self.records[index].trained, self.records[index].trained_steps = number, num_steps

    def end_script(self, index: int) -> None:
        self.records[index].has_ended = True

    def ended(self) -> set[int]:
        return {index for index, record in self.records.items() if record.has_ended}

    def end_run(self, gone: Set[int], num_workers: int) -> int | None:
        """If all that take part have ended their scripts and are among `gone`, workers that join
        begin the next run. Returns the pass with which this run ended; None: it has not.
        """
        ended = {w: self.records[w] for w in gone & self.ended()}
        if not ended or self.participants - ended.keys():
            return None
        begun = max(record.passes for record in ended.values())
        self._begin_run(num_workers)
        for record in ended.values():
            record.has_ended, record.passes = False, begun
            record.first = record.incarnation + 1
        return begun

    # ---- taking part ----

    def take_part(self, index: int) -> None:
        self.participants.add(index)

    def leave_job(self, index: int) -> None:
        """A worker does not take part any more, and sends no heartbeats."""
        self.participants.discard(index)
        self.forget_heartbeats(index)

    def give_up(self, index: int) -> Fenced:
        """A silent worker does not take part any more; returns the error for its calls."""
        self.participants.discard(index)
        self.given_up.add(index)
        return self._given_up_error(index)

    def _given_up_error(self, index: int) -> Fenced:
        return Fenced(
            f"worker {index}: it sent no heartbeat for {self.silence_s:g} s, and others take over"
            " its streams: start it again"
        )

    def note_heartbeat(self, index: int) -> None:
        """Record a heartbeat. After a pause of all heartbeats this process itself had stopped, so
        the time before does not count as silence of anybody.
        """
        now = self._clock()
        if now - self._last_heartbeat > self.silence_s / 2:
            self._heartbeats = dict.fromkeys(self._heartbeats, now)
        self._heartbeats[index] = self._last_heartbeat = now

    def forget_heartbeats(self, index: int) -> None:
        self._heartbeats.pop(index, None)

    def silent(self) -> list[int]:
        """Participants that have sent heartbeats, but none for `silence_s`."""
        now = self._clock()
        return [
            index
            for index in sorted(self.participants)
            if now - self._heartbeats.get(index, now) > self.silence_s
        ]

    def state(self) -> dict[int, Any]:
        return {index: vars(record) for index, record in self.records.items()}

    def install(
        self, records: Mapping[int, Any], shared: Mapping[str, Any], num_workers: int
    ) -> None:
        """Participants get `silence_s` to send a heartbeat."""
        leases = shared["sharing"] or {"members": range(num_workers), "silence_s": 0.0}
        self.records = {index: WorkerRecord(**record) for index, record in records.items()}
        self.participants, self.given_up = set(leases["members"]), set(shared["given_up"])
        self.silence_s, self._last_heartbeat = leases["silence_s"], self._clock()
        self._heartbeats = dict.fromkeys(self.participants, self._last_heartbeat)
