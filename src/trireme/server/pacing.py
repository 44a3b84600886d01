"""Mode bounded on one server: how far each stream is, and which pulls wait for slower streams.

Steps are those of the running pass, as in sync. A pull for step n of a stream waits until step
n - bound of every other member that has not left has been applied here. So no push is applied more
than `bound` steps ahead of the slowest. Not thread-safe: the server locks around it.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
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
        # The last pull of each stream and step: a repeated pull replaces the earlier one.
        self._waiters: dict[tuple[int, int], tuple[int, Waiter]] = {}

    def set_members(self, version: int, members: Members) -> None:
        """Adopt the coordinator's members if they are newer."""
        if self.is_newer(version):
            self._version, self._members = version, dict(members)
            self._release()

    def is_newer(self, version: int) -> bool:
        return version > self._version

    def record(self, stream: int, step: int) -> None:
        if stream in self._members:
            others = [applied for _, applied in self._others(stream)]
            self.ahead[max(0, step - min(others, default=step))] += 1
        self._advance(stream, step)

    def when_within(self, stream: int, pace: Pace, waiter: Waiter) -> bool:
        """True if no other member is too far behind. Otherwise `waiter` is called once when that
        is so.
        """
        if stream not in self._members:
            raise BadRequest(f"pull: expected a member of the pass, found stream {stream}")
        self._advance(stream, pace.done)  # a restarted server may not know it
        if not self._behind(stream, pace.step - pace.bound):
            return True
        if len(self._waiters) >= WAITERS_MAX:
            raise ResourceExhausted(
                f"pull: expected at most {WAITERS_MAX} that wait for other streams, found one more"
            )
        self._waiters[stream, pace.step] = (pace.bound, waiter)
        return False

    def waiting_for(self, stream: int, pace: Pace) -> str:
        """The streams that a pull waits for, as text for errors."""
        behind = self._behind(stream, pace.step - pace.bound)
        streams = ", ".join(f"{other} (at step {applied})" for other, applied in behind)
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

    # ---- progress of streams ----

    def _others(self, stream: int) -> Iterator[tuple[int, int]]:
        """The other members that have not left, each with its last step applied."""
        for other, member in self._members.items():
            if other != stream and member.end is None:
                yield other, max(self._applied.get(other, 0), member.first - 1)

    def _behind(self, stream: int, step: int) -> list[tuple[int, int]]:
        return [(other, applied) for other, applied in self._others(stream) if applied < step]

    def _advance(self, stream: int, step: int) -> None:
        if step > self._applied.get(stream, 0):
            self._applied[stream] = step
            self._release()

    def _release(self) -> None:
        for (stream, step), (bound, waiter) in list(self._waiters.items()):
            if not self._behind(stream, step - bound):
                del self._waiters[stream, step]
                waiter()
