"""The streams of a pass: members, how far each may be ahead, and where all stop."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trireme.errors import BadRequest
from trireme.protocol.job_limits import STREAMS_MAX
from trireme.protocol.wire import need, need_list


@dataclass(frozen=True)
class Stop:
    """The step after which all members stop, and why."""

    step: int
    reason: str

    def to_wire(self) -> list[Any]:
        return [self.step, self.reason]

    @staticmethod
    def from_wire(body: Any) -> Stop | None:
        """None for nil. Raises BadRequest."""
        match body:
            case None:
                return None
            case [int(step), str(reason)]:
                return Stop(step, reason)
        raise BadRequest(f"pull: expected stop nil or [step, reason], found {body!r}")


@dataclass(frozen=True)
class Member:
    """A stream that contributes to the steps first <= t < end; end None: it has not ended."""

    first: int
    end: int | None

    def includes(self, step: int) -> bool:
        return self.first <= step and (self.end is None or step < self.end)


Members = Mapping[int, Member]


@dataclass(frozen=True)
class PassMembers:
    """The members of the running pass, from the coordinator."""

    version: int  # replaces those of a lower version
    members: Members
    staged: bool  # pushes are staged (sync); else applied on arrival (bounded)

    @staticmethod
    def from_wire(body: Mapping[str, Any]) -> PassMembers:
        """Raises BadRequest."""
        staged = need({"staged": True, **body}, "staged", bool)
        members = members_from_wire(need_list(body, "members", list, STREAMS_MAX))
        if members and not 0 <= min(members) <= max(members) < STREAMS_MAX:
            raise BadRequest(
                f"ps.group: expected members from 0 to {STREAMS_MAX - 1}, found"
                f" {min(members)} to {max(members)}"
            )
        return PassMembers(need(body, "version", int), members, staged)


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


@dataclass(frozen=True)
class Pace:
    """The progress of a stream in a pull of mode bounded."""

    step: int  # that the rows are for
    done: int  # all servers have applied the stream's steps up to this one
    bound: int  # how many steps it may be ahead of the slowest stream

    def to_wire(self) -> dict[str, int]:
        return {"step": self.step, "done": self.done, "bound": self.bound}

    @staticmethod
    def from_wire(body: Any) -> Pace | None:
        """None for nil. Raises BadRequest."""
        if body is None:
            return None
        pace = Pace(*(need(body, name, int) for name in ("step", "done", "bound")))
        if not (0 <= pace.done < pace.step and pace.bound >= 1):
            raise BadRequest(f"pull: expected 0 <= done < step and bound >= 1, found {body!r}")
        return pace
