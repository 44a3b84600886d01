"""The compute workers of a label, as one worker sees them.

A batch goes to the one that has the least of this worker's batches in flight. When that one cannot
be reached, has no room or does not answer within half of the deadline, the batch goes to another,
and the one that failed rests. Then a short call finds out whether it is back, so that a batch never
waits long for one that is gone while others compute. An error is raised only when all have failed
for as long as a deadline.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from trireme.errors import DeadlineExceeded, ResourceExhausted, TriremeError, Unavailable
from trireme.job.cluster import Cluster
from trireme.protocol.label_use import LabelUse
from trireme.protocol.wire import need
from trireme.rpc import Call, Reply, RpcClient
from trireme.rpc.notices import Notices
from trireme.train.compute.tensors import Array

log = logging.getLogger("trireme.compute")

READY = "compute.ready"
COMPUTED_S = "computed_s"  # in answers: the seconds that the batch took
READY_S = 1.0  # of the call that finds out whether one is back
# How long one rests after its first failure, and at most; each further failure doubles it. When all
# rest, each is asked again after a shorter while.
_REST_S, _REST_S_MAX, _SHORT_REST_S_MAX = 0.05, 10.0, 0.2


@dataclass(eq=False)
class _ComputeWorker:
    """One of them, changed by ComputeWorkers alone."""

    address: str
    rank: int  # in the order in which this worker prefers them
    in_flight: int = 0
    num_failures: int = 0  # since its last answer
    rests_until: float = 0.0  # while others do not rest
    rests_shortly_until: float = 0.0
    error: TriremeError | None = None  # the last one, since its last answer

    @property
    def is_gone(self) -> bool:
        """Whether it could not be reached; a full one could."""
        return self.error is not None and not isinstance(self.error, ResourceExhausted)

    def fail(self, error: TriremeError) -> None:
        pause_s = _REST_S * 2 ** min(self.num_failures, 16)
        now = time.monotonic()
        self.rests_shortly_until = now + min(pause_s, _SHORT_REST_S_MAX)
        longest_s = _REST_S_MAX if not isinstance(error, ResourceExhausted) else _SHORT_REST_S_MAX
        self.rests_until = now + min(pause_s, longest_s)
        self.num_failures, self.error = self.num_failures + 1, error

    def recover(self) -> None:
        self.num_failures, self.error = 0, None
        self.rests_until = self.rests_shortly_until = 0.0


class ComputeWorkers:
    """Calls the compute workers of a label.

    Args:
        addresses: "host:port" of each, in the order of the job.
        first: which one this worker prefers, so that few workers do not all begin with the same.
        connect: makes a client for one thread's calls.
        timeout_s: of one attempt, half of it while another is left; and of waiting while all of
            them fail.

    Threads: any may call; `close` once they have ended.
    """

    def __init__(
        self,
        label: str,
        addresses: Sequence[str],
        *,
        first: int,
        connect: Callable[[], RpcClient],
        timeout_s: float,
    ) -> None:
        self.label = label
        num = len(addresses)
        self._all = [_ComputeWorker(a, (i - first) % num) for i, a in enumerate(addresses)]
        self._connect, self._timeout_s = connect, timeout_s
        self._changed = threading.Condition()
        self._idle: list[RpcClient] = []
        self._notices: Notices | None = None  # while none answers
        self._num_batches = self._num_failovers = 0
        self._waited_s = self._computed_s = 0.0
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._all)

    def use(self, credits: int) -> LabelUse:
        """How this worker has used them so far. credits: how many batches it may have in flight."""
        with self._changed:
            return LabelUse(
                compute_workers=len(self._all),
                reachable=sum(not one.is_gone for one in self._all),
                credits=credits,
                in_flight=sum(one.in_flight for one in self._all),
                batches=self._num_batches,
                failovers=self._num_failovers,
                waited_s=self._waited_s,
                computed_s=self._computed_s,
            )

    def call(self, method: str, body: dict[str, Any], arrays: Sequence[Array]) -> tuple[Reply, str]:
        """The reply of one of them, and its address; the method must be safe to repeat at another.

        Raises DeadlineExceeded: all have failed, for at least `timeout_s`; it names the label and
        each address with its last error. Others: what the method raised, which is not repeated.
        """
        started, failed = time.monotonic(), set[_ComputeWorker]()
        while True:
            is_late = time.monotonic() - started >= self._timeout_s
            chosen = self._take(failed if is_late else set())
            if chosen is None:
                if is_late:
                    raise self._none_left(time.monotonic() - started)
                self._rest(started)
                continue
            try:
                with self._given_back(chosen):
                    if chosen.is_gone:
                        self._call(Call(chosen.address, READY, once=True), READY_S)
                    call = Call(chosen.address, method, body, arrays, once=True)
                    return self._call(call, self._patience_s(failed - {chosen})), chosen.address
            except TriremeError as error:
                if not _asks_another(error):
                    raise
                failed.add(chosen)

    def call_at(
        self,
        address: str,
        method: str,
        body: dict[str, Any],
        arrays: Sequence[Array],
        *,
        timeout_s: float | None = None,
    ) -> Reply | None:
        """The reply of this one; None: it cannot be reached, has no room or does not answer. Raises
        what the method raised.
        """
        with self._changed:
            chosen = next(one for one in self._all if one.address == address)
            if chosen.is_gone:
                return None
            chosen.in_flight += 1
        call = Call(address, method, body, arrays, once=True)
        try:
            with self._given_back(chosen):
                return self._call(call, timeout_s or self._patience_s(set()))
        except TriremeError as error:
            if not _asks_another(error):
                raise
            return None

    def close(self) -> None:
        """Close the connections that no call uses; a call that runs closes its own."""
        with self._changed:
            self._is_closed = True
            clients, self._idle = self._idle, []
            self._changed.notify_all()
        for client in clients:
            client.close()

    def _take(self, without: set[_ComputeWorker]) -> _ComputeWorker | None:
        """The one to ask now; None: those that are left rest."""
        with self._changed:
            now = time.monotonic()
            left = [one for one in self._all if one not in without]
            ready = [one for one in left if one.rests_until <= now]
            if all(one.rests_until > now for one in self._all):
                ready = [one for one in left if one.rests_shortly_until <= now]
            if not ready:
                return None
            chosen = min(ready, key=lambda one: (one.in_flight, one.rank))
            chosen.in_flight += 1
            if chosen.is_gone:  # one call at a time finds out whether it is back
                chosen.rests_until = chosen.rests_shortly_until = now + READY_S
            return chosen

    def _patience_s(self, failed: set[_ComputeWorker]) -> float:
        """How long to wait for one. In sync the other workers wait for this batch, with the same
        deadline: another has to compute it before they give up.
        """
        is_another_left = len(self._all) > len(failed) + 1
        return self._timeout_s / 2 if is_another_left else self._timeout_s

    @contextmanager
    def _given_back(self, one: _ComputeWorker) -> Iterator[None]:
        """Ask the one that was taken; afterwards it has a batch less, and rests if it failed."""
        error: TriremeError | None = None
        try:
            yield
        except TriremeError as raised:
            error = raised
            raise
        finally:
            self._give_back(one, error)

    def _give_back(self, one: _ComputeWorker, error: TriremeError | None) -> None:
        with self._changed:
            one.in_flight -= 1
            if error is None or not _asks_another(error):
                one.recover()
                self._notices = None
                return
            self._num_failovers += 1
            is_new = not one.is_gone
            one.fail(error)
            is_new &= one.is_gone
        if is_new:
            log.warning("compute worker %s (%s): %s", one.address, self.label, error)

    def _rest(self, started: float) -> None:
        """Wait until the first one may be asked again."""
        with self._changed:
            now = time.monotonic()
            until = min(one.rests_shortly_until for one in self._all)
            self._changed.wait(max(0.0, min(until, started + self._timeout_s) - now))
            self._waited_s += time.monotonic() - now
            if self._is_closed:
                raise Unavailable(f"compute workers of label {self.label}: the cluster is closed")
            self._notices = self._notices or Notices(now)
            is_due = self._notices.take_due(now)
        if is_due:
            log.warning("waiting for %s for %.0f s", self._described(), now - started)

    def _call(self, call: Call, timeout_s: float) -> Reply:
        with self._changed:
            client = self._idle.pop() if self._idle else None
        client = client or self._connect()
        start = time.monotonic()
        try:
            [reply] = client.call_all([call], timeout_s=timeout_s)
            if COMPUTED_S in reply.body:
                computed_s = need(reply.body, COMPUTED_S, float)
                with self._changed:
                    self._num_batches += 1
                    self._computed_s += computed_s
            return reply
        finally:
            with self._changed:
                self._waited_s += time.monotonic() - start
                is_kept = not self._is_closed
                if is_kept:
                    self._idle.append(client)
            if not is_kept:
                client.close()

    def _none_left(self, waited_s: float) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"expected an answer of a compute worker within {waited_s:.0f} s, found none:"
            f" {self._described()}"
        )

    def _described(self) -> str:
        with self._changed:
            errors = "; ".join(f"{one.address}: {one.error}" for one in self._all)
        return f"compute workers of label {self.label}: {errors}"


def workers_of_label(cluster: Cluster, label: str) -> ComputeWorkers:
    """Those of a label in this worker's job, until the cluster closes."""
    workers = ComputeWorkers(
        label,
        [address for other, address in cluster.heter if other == label],
        first=cluster.worker,
        connect=cluster.compute_client,
        timeout_s=cluster.client.timeout_s,
    )
    cluster.add_running(workers.close)
    cluster.metrics.watch_label(label, workers.use)
    return workers


def _asks_another(error: TriremeError) -> bool:
    """Whether another compute worker may answer where this one did not."""
    details = error.details or {}
    if "raised" in details or not error.retry:
        return False
    return isinstance(error, Unavailable | DeadlineExceeded) or "full" in details
