"""Which pass on a device has a server's rows and blocks, so that nothing else may change them.

A lease covers all of a server: a pass trains all tables of its model and all dense blocks. It ends
with the import that ends the pass, or when its worker gives it up. A worker that has left, or is
silent, keeps its lease until something else is to change; whoever changes it then ends the lease,
so that the pass cannot overwrite the change. Begin and end of leases are recorded in the journal.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeAlias

from trireme.errors import Fenced, Leased
from trireme.protocol.pass_lease import PassLease
from trireme.protocol.wire import Push
from trireme.server.streams import Streams

Record: TypeAlias = Callable[[str, dict[str, Any]], None]
HasLeft: TypeAlias = Callable[[PassLease, float], bool]
"""Whether the worker of a lease has left, or was not heard for too long, since a moment."""


def _stays(lease: PassLease, since: float) -> bool:
    """In a job of one process, where a worker cannot die alone."""
    del lease, since
    return False


class PassLeases:
    """The newest lease. Needs the server's lock, and what records a guard of the journal.

    record: as `Journal.record`. newest: None: there was none. is_held: whether it has not ended.
    has_left: see HasLeft.
    """

    def __init__(self, record: Record) -> None:
        self.newest: PassLease | None = None
        self.is_held = False
        self.has_left: HasLeft = _stays
        self._record, self._since = record, 0.0

    # ---- what is recorded ----

    def take(self, lease: PassLease) -> None:
        """Begin a lease, unless it is held: a repetition. Raises Leased: another worker has one.
        Fenced: the worker has begun a later pass, or ended this one.
        """
        if self._is_new(lease):
            self.give_up()
            self._record("ps.lease", lease.to_wire())
            self.begin(lease)

    def release(self, last: PassLease) -> None:
        """End the lease of a pass of this worker, `last` or one before."""
        if self.is_held and self._held().worker == last.worker and self._held()[1:] <= last[1:]:
            self.give_up()

    def claim(self, lease: PassLease | None = None) -> None:
        """Check a change of rows or blocks, which is made next. lease: of the pass that makes it;
        None: of others: then a lease whose worker has left ends. Raises as `check`.
        """
        self.check(lease)
        if lease is None:
            self.give_up()

    def give_up(self) -> None:
        """End the lease, if one is held, without an import."""
        if self.is_held:
            self._record("ps.release", self._held().to_wire())
            self.end()

    # ---- what is not: an import that ends a pass is recorded as that ----

    def begin(self, lease: PassLease) -> None:
        self.newest, self.is_held, self._since = lease, True, time.monotonic()

    def end(self) -> None:
        self.is_held = False

    # ---- checks ----

    @property
    def is_live(self) -> bool:
        """Whether there is a lease that others have to respect."""
        return self.is_held and not self.has_left(self._held(), self._since)

    def check(self, lease: PassLease | None = None) -> None:
        """Check a change of rows or blocks. lease: of the pass that makes it.

        Raises Leased: a pass has them. Fenced: this pass does not have them any more.
        """
        if lease is not None:
            if not self.is_held or lease != self.newest:
                raise Fenced(
                    f"{lease}: expected its lease of the rows, found that it has ended: a newer"
                    " process is this worker, or it was silent and others have changed rows. Call"
                    " abandon_pass, and train on its data again"
                )
        elif self.is_live:
            error = Leased(
                f"expected rows that no pass has leased, found {self._held()}: wait for its"
                " end_pass or abandon_pass; a worker that is silent loses its lease"
            )
            error.details = self._held().to_wire()
            raise error

    def check_push(self, push: Push, streams: Streams) -> None:
        """Check a push. Raises as `check`."""
        last = streams[push.stream].last if push.stream in streams else 0
        if not self._is_over_by(push, last):
            self.check()

    def _is_over_by(self, push: Push, last: int) -> bool:
        """Whether the worker of the lease itself makes this push, which it does not within a pass:
        it has given up without reaching this server. last: sequence of the stream.
        """
        if not self.is_held or push.sequence <= last:
            return False
        held = self._held()
        return push.stream == held.worker and push.incarnation >= held.incarnation

    def _is_new(self, lease: PassLease) -> bool:
        """Whether a lease begins; else it is a repetition. Raises as `take`."""
        newest = self.newest
        if newest is not None and newest.worker == lease.worker:
            if newest == lease and self.is_held:
                return False
            if newest[1:] >= lease[1:]:
                raise Fenced(f"ps.lease: expected a pass after {newest}, found {lease}")
        else:
            self.check()
        return True

    def _held(self) -> PassLease:
        assert self.newest is not None
        return self.newest

    # ---- snapshots ----

    def state(self) -> list[Any] | None:
        return None if self.newest is None else [*self.newest, self.is_held]

    def install(self, state: list[Any] | None) -> None:
        if state is not None:
            *lease, is_held = state
            self.begin(PassLease(*lease))
            self.is_held = bool(is_held)
