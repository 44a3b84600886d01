"""Sync training on one server: hold the pushes of a step until every member has staged its own,
then apply them as one update.

Step t is applied when every member of it has declared that its pushes up to t are staged on all
servers. A stream declares this with its next pull, or by leaving. So a worker that dies between
two servers never splits a step: no server has applied it.

A push may ask all members to stop after its step. The pull that waits for the step returns this
request, so all stop after the same one. If a step's gradient is clipped by its norm, the step also
waits for the norm: workers ask all servers for their shares (`norm_of`) and send the norm with the
pull.

Threads: whoever calls holds the server's lock, except for `apply_complete`, which takes it, but not
while it applies a step: that may wait for a disk, and requests of all workers need the lock.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from threading import RLock
from typing import Any

from trireme.errors import BadRequest
from trireme.protocol.clipping import NormReply
from trireme.protocol.job_limits import STREAMS_MAX
from trireme.protocol.membership import Member, Members, Stop, members_from_wire, members_to_wire
from trireme.protocol.wire import Push
from trireme.rpc import HeldBytes

Waiter = Callable[..., None]
"""Is called with the error of a step that cannot be applied, or with nothing."""


class Staging:
    """The staged pushes, and the pulls that wait for a step.

    applied: the last step applied.
    stop: the step after which all stop in the running pass, once it is applied.
    apply: applies the pushes of a step, given its norm if it is clipped by norm.
    square_sum: the exact sum of squares of a step's gradient here; None: not finite.
    held: counts the staged pushes.
    lock: the server's.
    """

    def __init__(
        self,
        apply: Callable[[list[Push], float | None], None],
        square_sum: Callable[[list[Push]], int | None],
        held: HeldBytes | None = None,
        lock: AbstractContextManager[Any] | None = None,
    ) -> None:
        self.applied = 0
        self.stop: Stop | None = None
        self._apply, self._square_sum = apply, square_sum
        self._held = held or HeldBytes()
        self._lock = lock or RLock()
        self._is_applying = False  # then that thread goes on with what becomes complete
        self._norm: float | None = None  # of the last step applied
        self._norms: dict[int, float] = {}  # of later steps
        self._sums: dict[int, int | None] = {}
        self._norm_waiters: dict[int, tuple[int, Waiter]] = {}  # by stream
        self._version = 0
        self._members: dict[int, Member] = {}
        self._declared: dict[int, int] = {}
        # Of the next step: its members, those that have not declared it, and for each thing that
        # pushes must agree on (see `_agreed`) the first push that has it.
        self._expected: set[int] = set()
        self._undeclared: set[int] = set()
        self._first: dict[str, Push] = {}
        self._staged: dict[int, dict[int, Push]] = {}
        self._waiters: dict[int, tuple[int, Waiter]] = {}  # by stream

    def set_members(self, version: int, members: Members) -> None:
        """Adopt the coordinator's members if they are newer. A stream that has left has staged all
        its pushes.
        """
        if version <= self._version:
            return
        self._version = version
        self._members = dict(members)
        firsts = [member.first for member in members.values()]
        if firsts and self.stop is not None and self.stop.step < min(firsts):
            self.stop = None  # of an earlier pass
        if firsts and not self._staged:
            self.applied = max(self.applied, min(firsts) - 1)
        self._expect()
        self._wake()

    def _expect(self) -> None:
        """Note which streams the next step waits for."""
        step = self.applied + 1
        members = {s: member for s, member in self._members.items() if member.includes(step)}
        self._expected = set(members)
        self._undeclared = {
            s for s, m in members.items() if m.end is None and self._declared.get(s, 0) < step
        }

    def check(self, push: Push) -> None:
        """Raises BadRequest if the push may not be staged: its stream is no member of the step, or
        its rates differ from those of other members.
        """
        if push.step <= self.applied:
            return
        member = self._members.get(push.stream)
        if member is None or not member.includes(push.step) or push.step > self.applied + 1:
            raise BadRequest(
                f"push: step {self.applied + 1} is being staged and stream {push.stream} is"
                f" {member}, found step {push.step}"
            )
        firsts = [self._first[what] for what in _agreed(push) if what in self._first]
        for other in {other.stream: other for other in firsts}.values():
            _check_same_rates(push, other)

    def admit(self, push: Push) -> None:
        """Check a push that `stage` will hold next, and take its bytes. Raises as `check`, and
        ResourceExhausted.
        """
        self.check(push)
        if self._is_new(push):
            self._held.hold(("push", push.stream), push.num_bytes)

    def stage(self, push: Push) -> bool:
        """Hold a push. Staging it again, or after its step has been applied, changes nothing, and
        returns False.
        """
        self.check(push)
        if is_new := self._is_new(push):
            self._staged.setdefault(push.step, {})[push.stream] = push
            self._held.note(("push", push.stream), push.num_bytes)
            for what in _agreed(push):
                self._first.setdefault(what, push)
        return is_new

    def _is_new(self, push: Push) -> bool:
        """Whether it is to be held: not applied and not staged, or re-sent after buckets moved."""
        before = self._staged.get(push.step, {}).get(push.stream)
        is_newer = before is None or push.map_version > before.map_version
        return push.step > self.applied and is_newer

    def declare(self, stream: int, step: int) -> None:
        """`stream` has staged its pushes up to `step` on every server."""
        member = self._members.get(stream)
        is_expected = member is not None and member.includes(step) and step > self.applied
        if is_expected and stream not in self._staged.get(step, {}):
            raise BadRequest(
                f"pull: stream {stream} says that step {step} is staged, it is not here"
            )
        if not 0 <= stream < STREAMS_MAX:
            raise BadRequest(f"pull: expected 0 <= stream < {STREAMS_MAX}, found {stream}")
        self._declared[stream] = max(self._declared.get(stream, 0), step)
        if step > self.applied:
            self._undeclared.discard(stream)

    def when_applied(self, stream: int, step: int, waiter: Waiter) -> bool:
        """True if `step` has been applied. Otherwise `waiter` is called once when it has, instead
        of an earlier one of the stream. Raises BadRequest: it will not be, since the stream is no
        member of the pass.
        """
        if step <= self.applied:
            return True
        if stream not in self._members:
            raise BadRequest(f"pull: expected a member of the pass, found stream {stream}")
        self._waiters[stream] = (step, waiter)
        return False

    def set_norm(self, step: int, norm: float | None) -> None:
        """Set the norm of the next step's gradient over all servers, if a worker sent it."""
        if norm is not None and step == self.applied + 1:
            self._norms[step] = norm

    def when_complete(self, stream: int, step: int, waiter: Waiter) -> bool:
        """True if all members have staged `step` everywhere, or it has been applied. Otherwise
        `waiter` is called once when that is so; it replaces an earlier waiter of the stream.
        """
        if stream not in self._members:
            raise BadRequest(f"norm: expected a member of the pass, found stream {stream}")
        if step <= self.applied or (step == self.applied + 1 and self._is_complete()):
            return True
        self._norm_waiters[stream] = (step, waiter)
        return False

    def norm_of(self, step: int) -> NormReply:
        """This server's share of the norm of a step. Requires: `when_complete` is true."""
        if step <= self.applied:
            return NormReply(None, self._norm if step == self.applied else None, True)
        if step not in self._sums:
            self._sums[step] = self._square_sum(self.pushes_of(step))
        return NormReply(self._sums[step], None, False)

    def num_held(self) -> dict[str, int]:
        """How many pushes are staged, and how many pulls wait."""
        return {"staged": len(self.staged()), "waiting": len(self._waiters)}

    def waiting_for(self) -> str:
        """What the next step waits for, as text for errors."""
        step = self.applied + 1
        missing = sorted(self._undeclared)
        return f"step {step} waits for {f'streams {missing}' if missing else 'its norm'}"

    def apply_complete(self) -> None:
        """Apply the steps that have all they need, and wake who waits for them, also with an error:
        else they wait until their deadline. Raises what applying a step raises; a later call
        applies it again.
        """
        try:
            while step := self._begin_step():
                try:
                    self.apply_step(step, self._norms.get(step))
                finally:
                    self._is_applying = False
                with self._lock:
                    self._wake()
        except Exception as error:
            with self._lock:
                waiting, self._waiters = self._waiters, {}
                for _, waiter in waiting.values():
                    waiter(error)
            raise

    def _begin_step(self) -> int:
        """The next step, if this thread is to apply it; else 0."""
        with self._lock:
            step = self.applied + 1
            if self._is_applying or not self._is_complete():
                return 0
            missing = self._expected - self._staged.get(step, {}).keys()
            if missing:
                raise BadRequest(f"step {step}: streams {sorted(missing)} left without staging it")
            clips = (push.clip for push in self._staged[step].values())
            needs_norm = any(clip is not None and clip.kind == "norm" for clip in clips)
            if needs_norm and step not in self._norms:
                self._wake()
                return 0
            self._is_applying = True
            return step

    def _is_complete(self) -> bool:
        """Whether all members of the next step have declared it staged everywhere."""
        return bool(self._expected) and not self._undeclared

    def pushes_of(self, step: int) -> list[Push]:
        """The staged pushes of a step, by stream."""
        return [self._staged[step][stream] for stream in sorted(self._staged[step])]

    def _wake(self) -> None:
        complete = self.applied + self._is_complete()
        streams = [s for s, (step, _) in self._norm_waiters.items() if step <= complete]
        answered = [s for s, (step, _) in self._waiters.items() if step <= self.applied]
        ready = [self._waiters.pop(stream)[1] for stream in answered]
        for waiter in [self._norm_waiters.pop(stream)[1] for stream in streams] + ready:
            waiter()

    def forget(self) -> None:
        """Pass over what is staged: a load has replaced what it would have changed, and all workers
        have left the pass.
        """
        for push in self.staged():
            self._held.free(("push", push.stream))
        self.applied = max([self.applied, *self._staged])
        self._staged, self._first, self._norms, self._sums = {}, {}, {}, {}
        self._expect()

    def apply_step(self, step: int, norm: float | None) -> None:
        """Apply the staged pushes of the next step, without the lock."""
        # Marks make this safe to repeat if it fails halfway (for example, in a full bucket).
        self._apply(self.pushes_of(step), norm)
        with self._lock:
            self.finish_step(step, norm)

    def finish_step(self, step: int, norm: float | None) -> None:
        """Note that the next step is over."""
        if reasons := [push.stops for push in self.pushes_of(step) if push.stops]:
            self.stop = Stop(step, reasons[0])
        for stream in self._staged.pop(step).keys() | self._expected:
            self._held.free(("push", stream))
        self._norms.pop(step, None)
        self._sums.pop(step, None)
        self.applied, self._norm = step, norm
        self._first = {}
        self._expect()

    def state(self) -> dict[str, Any]:
        """All but the staged pushes, in msgpack's types. Streams repeat what they have declared
        after a restart, because their pulls have not been answered.
        """
        return {
            "applied": self.applied,
            "norm": self._norm,
            "stop": None if self.stop is None else self.stop.to_wire(),
            "version": self._version,
            "members": members_to_wire(self._members),
        }

    def install(self, state: Mapping[str, Any]) -> None:
        self.applied, self._version = int(state["applied"]), int(state["version"])
        self._norm = state.get("norm")
        self.stop = Stop.from_wire(state.get("stop"))
        self._members = dict(members_from_wire(state["members"]))
        self._expect()

    def staged(self) -> list[Push]:
        """The pushes that are held."""
        return [push for pushes in self._staged.values() for push in pushes.values()]


def _agreed(push: Push) -> list[str]:
    """What a push must agree on with any other of its step that has it: the values of each table,
    the groups of the blocks, the clipping.
    """
    blocks = [] if push.blocks is None else ["blocks"]
    return [*(f"table {part.table}" for part in push.tables), *blocks, "clip"]


def _check_same_rates(push: Push, other: Push) -> None:
    values = {part.table: part.values for part in push.tables}  # the same for all row classes
    for part in other.tables:
        if values.get(part.table, part.values) != part.values:
            raise BadRequest(
                f"push: step {push.step} of table {part.table!r}: stream {other.stream} pushed"
                f" {part.values}, stream {push.stream} {values[part.table]}; schedulers must agree"
            )
    if push.blocks and other.blocks and push.blocks.groups != other.blocks.groups:
        raise BadRequest(
            f"push: step {push.step}: stream {other.stream} pushed groups {other.blocks.groups},"
            f" stream {push.stream} {push.blocks.groups}; schedulers must agree"
        )
    if push.clip != other.clip:
        raise BadRequest(
            f"push: step {push.step}: stream {other.stream} clips by {other.clip}, stream"
            f" {push.stream} by {push.clip}; they must agree"
        )
