"""Sync training on one server: hold the pushes of a step until every member has staged its own,
then apply them at once.

A step t is applied when every member of step t has said "my pushes up to t are staged everywhere",
which it says with its next pull (or by leaving). A worker that dies between two servers therefore
never splits a step: no server has applied it. Not thread-safe: the shard locks around it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trireme.errors import BadRequest
from trireme.ps.wire import Push, need, need_list

Waiter = Callable[[], None]


@dataclass(frozen=True)
class Member:
    """A stream contributes to the steps first <= t < end; end None: it has not ended."""

    first: int
    end: int | None


Members = Mapping[int, Member]


@dataclass(frozen=True)
class Group:
    """Which streams advance together, as the coordinator has it.

    Attributes:
        version: a newer group takes the place of an older one.
        staged: whether their pushes are staged (sync), or applied on arrival (bounded).
    """

    version: int
    members: Members
    staged: bool

    @staticmethod
    def from_wire(body: Mapping[str, Any]) -> Group:
        """Raises BadRequest."""
        staged = need({"staged": True, **body}, "staged", bool)
        members = members_from_wire(need_list(body, "members", list))
        return Group(need(body, "version", int), members, staged)


def members_from_wire(body: Iterable[Any]) -> Members:
    """Raises BadRequest."""
    members = {}
    for member in body:
        match member:
            case [int(stream), int(first), int() | None as end]:
                members[stream] = Member(first, end)
            case _:
                raise BadRequest(
                    f"ps.group: expected members [stream, first step, end or nil], found {member!r}"
                )
    return members


def members_to_wire(members: Members) -> list[list[int | None]]:
    """The inverse of `members_from_wire`."""
    return [[stream, member.first, member.end] for stream, member in members.items()]


class Staging:
    def __init__(self, apply: Callable[[list[Push]], None]) -> None:
        self.applied = 0
        self._apply = apply
        self._version = 0
        self._members: dict[int, Member] = {}
        self._declared: dict[int, int] = {}
        self._staged: dict[int, dict[int, Push]] = {}
        self._waiters: list[tuple[int, Waiter]] = []

    def set_group(self, version: int, members: Members) -> None:
        """Adopt the coordinator's group if it is newer, and apply what waited for that; a stream
        that has left has staged everything.
        """
        if version > self._version:
            self.adopt_group(version, members)
            self.advance()

    def adopt_group(self, version: int, members: Members) -> None:
        """Adopt a group, and apply nothing."""
        self._version = version
        self._members = dict(members)
        firsts = [member.first for member in members.values()]
        if firsts and not self._staged:
            self.applied = max(self.applied, min(firsts) - 1)

    def check(self, push: Push) -> None:
        """Raises BadRequest where `stage` may not be: the push's stream is no member of the step,
        or the members push different rates.
        """
        if push.step <= self.applied:
            return
        member = self._members.get(push.stream)
        if member is None or not self._includes(member, push.step) or push.step > self.applied + 1:
            raise BadRequest(
                f"push: step {self.applied + 1} is being staged and stream {push.stream} is"
                f" {member}, found step {push.step}"
            )
        for other in self._staged.get(push.step, {}).values():
            _check_same_rates(push, other)

    def stage(self, push: Push) -> None:
        """Hold a push. Staging it again, or after its step was applied, changes nothing.

        Raises: as `check`.
        """
        self.check(push)
        if push.step <= self.applied:
            return
        staged = self._staged.setdefault(push.step, {})
        held = staged.get(push.stream)
        if held is None or push.map_version > held.map_version:  # re-sent after buckets moved here
            staged[push.stream] = push

    def declare(self, stream: int, step: int) -> None:
        """`stream` has staged its pushes up to `step` on every server."""
        member = self._members.get(stream)
        unknown = member is not None and self._includes(member, step) and step > self.applied
        if unknown and stream not in self._staged.get(step, {}):
            raise BadRequest(
                f"pull: stream {stream} says that step {step} is staged, it is not here"
            )
        self._declared[stream] = max(self._declared.get(stream, 0), step)
        self.advance()

    def when_applied(self, step: int, waiter: Waiter) -> bool:
        """True if `step` is applied already; else calls `waiter` once when it is."""
        if step <= self.applied:
            return True
        self._waiters.append((step, waiter))
        return False

    def num_held(self) -> dict[str, int]:
        """How many pushes are staged, and how many pulls wait."""
        staged = sum(len(pushes) for pushes in self._staged.values())
        return {"staged": staged, "waiting": len(self._waiters)}

    def waiting_for(self) -> str:
        """Which streams the next step waits for, for messages."""
        step = self.applied + 1
        missing = [
            stream
            for stream, member in self._members.items()
            if self._includes(member, step) and not self._has_declared(stream, member, step)
        ]
        return f"step {step} waits for streams {missing}"

    @staticmethod
    def _includes(member: Member, step: int) -> bool:
        return member.first <= step and (member.end is None or step < member.end)

    def _has_declared(self, stream: int, member: Member, step: int) -> bool:
        return self._declared.get(stream, 0) >= step or member.end is not None

    def advance(self) -> None:
        """Apply the steps that wait for nobody any more."""
        while True:
            step = self.applied + 1
            members = {
                stream: member
                for stream, member in self._members.items()
                if self._includes(member, step)
            }
            if not members or not all(
                self._has_declared(stream, member, step) for stream, member in members.items()
            ):
                break
            missing = members.keys() - self._staged.get(step, {}).keys()
            if missing:
                raise BadRequest(f"step {step}: streams {sorted(missing)} left without staging it")
            self.apply_step(step)
        ready = [waiter for step, waiter in self._waiters if step <= self.applied]
        self._waiters = [(step, waiter) for step, waiter in self._waiters if step > self.applied]
        for waiter in ready:
            waiter()

    def apply_step(self, step: int) -> None:
        """Apply what is staged of the next step."""
        staged = self._staged[step]
        # Marks make this safe to repeat, should it fail half-way (a full bucket, say).
        self._apply([staged[stream] for stream in sorted(staged)])
        del self._staged[step]
        self.applied = step

    # ---- the log ----

    def state(self) -> dict[str, Any]:
        """All but the staged pushes, in msgpack's types. What streams have declared they say again
        after a restart: their pulls have not been answered.
        """
        members = members_to_wire(self._members)
        return {"applied": self.applied, "version": self._version, "members": members}

    def install(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state`."""
        self.applied, self._version = int(state["applied"]), int(state["version"])
        self._members = dict(members_from_wire(state["members"]))

    def staged(self) -> Iterator[Push]:
        """The pushes that are held."""
        for of_step in self._staged.values():
            yield from of_step.values()


def _check_same_rates(push: Push, other: Push) -> None:
    mine = {part.table: part.values for part in push.tables}  # one for all row classes
    for part in other.tables:
        if mine.get(part.table, part.values) != part.values:
            raise BadRequest(
                f"push: step {push.step} of table {part.table!r}: stream {other.stream} pushed"
                f" {part.values}, stream {push.stream} {mine[part.table]}; schedulers must agree"
            )
    if push.blocks and other.blocks and push.blocks.groups != other.blocks.groups:
        raise BadRequest(
            f"push: step {push.step}: stream {other.stream} pushed groups {other.blocks.groups},"
            f" stream {push.stream} {push.blocks.groups}; schedulers must agree"
        )
