"""Mode bounded on one server: how far each stream is, and which pulls wait for slower streams.

Steps are those of the running pass, as in sync. A pull for step n of a stream waits until step
n - bound of every other member that has not left has been applied here. So no push is applied more
than `bound` steps ahead of the slowest. Not thread-safe: the server locks around it.

Streams are counted by their last step, since few steps have any: so a push or pull costs as much
with 1,000 streams as with two.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from trireme.errors import BadRequest, ResourceExhausted
from trireme.protocol.membership import Member, Members, Pace, members_from_wire, members_to_wire

Waiter = Callable[[], None]
WAITERS_MAX = 1 << 14


class Pacing:
    """The last step applied of each stream, and the pulls that wait.

    ahead: number of pushes by how many steps they were ahead of the slowest member.
    """

    def __init__(self) -> None:
        self.ahead: Counter[int] = Counter()
        self._version = 0
        self._members: dict[int, Member] = {}
        self._applied: dict[int, int] = {}
        self._num_at: Counter[int] = Counter()  # members that have not left, by last step applied
        # By the step that all others must have reached: the last pull of each stream and step. A
        # repeated pull replaces the earlier one.
        self._waiters: defaultdict[int, dict[tuple[int, int], Waiter]] = defaultdict(dict)

    def set_members(self, version: int, members: Members) -> None:
        """Adopt the coordinator's members if they are newer."""
        if self.is_newer(version):
            self._version, self._members = version, dict(members)
            self._count_steps()
            for reached in list(self._waiters):
                self._release(reached)

    def is_newer(self, version: int) -> bool:
        return version > self._version

    def record(self, stream: int, step: int) -> None:
        if stream in self._members:
            own = self._last(stream) if self._runs(stream) else None
            others = [at for at, number in self._num_at.items() if number > (at == own)]
            self.ahead[max(0, step - min(others, default=step))] += 1
        self._advance(stream, step)

    def when_within(self, stream: int, pace: Pace, waiter: Waiter) -> bool:
        """True if no other member is too far behind. Otherwise `waiter` is called once when that
        is so.
        """
        if stream not in self._members:
            raise BadRequest(f"pull: expected a member of the pass, found stream {stream}")
        self._advance(stream, pace.done)  # a restarted server may not know it
        reached = pace.step - pace.bound
        if self._have_reached(reached, stream):
            return True
        if sum(map(len, self._waiters.values())) >= WAITERS_MAX:
            raise ResourceExhausted(
                f"pull: expected at most {WAITERS_MAX} that wait for other streams, found one more"
            )
        self._waiters[reached][stream, pace.step] = waiter
        return False

    def waiting_for(self, stream: int, pace: Pace) -> str:
        """The streams that a pull waits for, as text for errors."""
        reached = pace.step - pace.bound
        behind = [s for s in self._members if s != stream and self._runs(s)]
        streams = ", ".join(
            f"{s} (at step {self._last(s)})" for s in behind if self._last(s) < reached
        )
        return (
            f"step {pace.step} of stream {stream} may be {pace.bound} ahead, it waits for streams"
            f" {streams or 'none any more'}"
        )

    def state(self) -> dict[str, Any]:
        """All but the waiting pulls, which are repeated, in msgpack's types."""
        return {
            "version": self._version,
            "members": members_to_wire(self._members),
            "applied": list(self._applied.items()),
            "ahead": list(self.ahead.items()),
        }

    def install(self, state: Mapping[str, Any]) -> None:
        self._version = int(state["version"])
        self._members = dict(members_from_wire(state["members"]))
        self._applied = dict(state["applied"])
        self.ahead = Counter(dict(state["ahead"]))
        self._count_steps()

    # ---- progress of streams ----

    def _runs(self, stream: int) -> bool:
        """Whether it is a member that has not left: others wait for it."""
        member = self._members.get(stream)
        return member is not None and member.end is None

    def _last(self, stream: int) -> int:
        """The last step applied of a member; before its first one, that before it."""
        return max(self._applied.get(stream, 0), self._members[stream].first - 1)

    def _count_steps(self) -> None:
        self._num_at = Counter(self._last(stream) for stream in filter(self._runs, self._members))

    def _num_behind(self, step: int) -> int:
        return sum(number for at, number in self._num_at.items() if at < step)

    def _have_reached(self, step: int, stream: int) -> bool:
        """Whether all members but this one, and those that have left, are at a step or beyond."""
        is_behind = self._runs(stream) and self._last(stream) < step
        return self._num_behind(step) == is_behind

    def _advance(self, stream: int, step: int) -> None:
        before = self._applied.get(stream, 0)
        if step <= before:
            return
        if not self._runs(stream):
            self._applied[stream] = step
            return
        before = self._last(stream)
        self._num_at[before] -= 1
        self._num_at += Counter()  # without the steps that no stream is at
        self._applied[stream] = step
        self._num_at[self._last(stream)] += 1
        for reached in [r for r in self._waiters if before < r <= step]:
            self._release(reached)

    def _release(self, reached: int) -> None:
        """Call the waiters for a step that all others have reached."""
        if self._num_behind(reached) > 1:  # of whom a waiter's own stream may be one
            return
        waiters = self._waiters[reached]
        for stream, step in [key for key in waiters if self._have_reached(reached, key[0])]:
            waiters.pop((stream, step))()
        if not waiters:
            del self._waiters[reached]
