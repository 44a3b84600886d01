"""Leases of streams, in jobs whose workers may come and go.

A pass has a fixed number of streams. A worker takes a free one, trains on it to its end, gives it
back as done and takes the next. Each taking has a higher lease number, which is the incarnation of
the stream's pushes: so servers fence the worker that had the stream before. The new owner continues
after the last sequence that has been applied.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from trireme.coordinator.kept_state import KeptState
from trireme.coordinator.meetings import Meetings
from trireme.coordinator.workers import Workers
from trireme.errors import BadRequest, Fenced
from trireme.protocol.wire import need, need_list
from trireme.rpc import Deferred, Reply, Request

log = logging.getLogger("trireme.coordinator")

NOBODY = -1
SAVER = 0
"""This worker saves and exports: it cannot be given up, but its stream can."""


@dataclass
class Lease:
    """One stream in the pass. The fields are those of the kept state.

    owner: a worker, or NOBODY. number: how often the stream has been taken.
    begun_at: the sequence of its last push before the pass.
    is_done: all its pushes of the pass have been applied.
    """

    owner: int = NOBODY
    number: int = 0
    begun_at: int = 0
    is_done: bool = True


class StreamLeases:
    """Who has which stream, and who waits for one. Empty in a job that leases no streams."""

    def __init__(self, workers: Workers, meetings: Meetings, kept: KeptState) -> None:
        self._workers, self._meetings, self._kept = workers, meetings, kept
        self.pass_number = 0
        self._num_steps = 0  # that the worker which opened the pass had made before
        self._leases: list[Lease] = []
        self._waiting: dict[int, Deferred] = {}  # by worker

    @property
    def is_in_use(self) -> bool:
        return bool(self._leases)

    def begin(self, num_streams: int) -> None:
        """Lease that many streams in each pass; 0: none."""
        self._leases = [Lease() for _ in range(num_streams)]

    def _check_in_use(self, method: str) -> None:
        if not self.is_in_use:
            raise BadRequest(
                f"{method}: expected a job with leased streams, found one whose workers have their"
                " own"
            )

    def _is_pass_over(self) -> bool:
        return all(lease.is_done for lease in self._leases)

    # ---- passes ----

    def enter(
        self, worker: int, number: int, sequences: Sequence[int], num_steps: int
    ) -> dict[str, Any]:
        """A worker enters a pass, and takes part if a stream of it is left. The first worker that
        comes to a pass opens it.

        sequences: per stream, the last one that all servers have applied.
        num_steps: steps that the worker has made.
        """
        self._check_in_use("coord.enter")
        if len(sequences) != len(self._leases):
            raise BadRequest(
                f"coord.enter: expected the sequences of {len(self._leases)} streams,"
                f" found {len(sequences)}"
            )
        if number == self.pass_number + 1 and self._is_pass_over():
            self.pass_number, self._num_steps = number, num_steps
            for lease, sequence in zip(self._leases, sequences, strict=True):
                lease.owner, lease.begun_at, lease.is_done = NOBODY, sequence, False
        if number > self.pass_number:
            left = [stream for stream, lease in enumerate(self._leases) if not lease.is_done]
            raise BadRequest(
                f"coord.enter: expected pass {self.pass_number} of worker {worker}, of which"
                f" streams {left} are not done, found pass {number}"
            )
        is_over = number < self.pass_number or self._is_pass_over()
        if not is_over:
            self._workers.take_part(worker)
        return {
            "is_over": is_over,
            "num_steps": self._num_steps,
            "begun_at": [lease.begun_at for lease in self._leases],
            "members": len(self._workers.participants),
        }

    # ---- streams ----

    def on_take(self, worker: int, request: Request) -> Reply | Deferred:
        """Give back a stream that is done, if any, and take another. Answers when there is one, or
        when all are done.
        """
        number = need(request.body, "pass", int)
        done = need_list(request.body, "done", int, 2)
        self._check_in_use("coord.take")
        had_stream = self._owns(worker)
        answer = self._take(worker, number, done)
        if self._owns(worker) != had_stream:
            self._kept.note_change()
        return answer

    def _take(self, worker: int, number: int, done: Sequence[int]) -> Reply | Deferred:
        if worker not in self._workers.participants:
            raise BadRequest(f"coord.take: expected worker {worker} in a pass, found it in none")
        if done:
            if len(done) != 2:
                raise BadRequest(f"coord.take: expected done [stream, lease], found {done}")
            # A repeated call may come when the next pass has begun: leases keep their numbers, but
            # nothing of its streams is done.
            if number == self.pass_number and self._finish(worker, *done):
                self._answer_waiting()
        if (reply := self._offer(worker, number)) is not None:
            self._waiting.pop(worker, None)  # an earlier call of this worker
            return reply
        self._waiting[worker] = call = Deferred(lambda: f"pass {number} {self._blockers(worker)}")
        return call

    def _offer(self, worker: int, number: int) -> Reply | None:
        """The answer for a worker that asks for a stream of this pass; None: it has to wait."""
        if number == self.pass_number:
            for owner in (worker, NOBODY):
                for stream, lease in enumerate(self._leases):
                    if lease.owner == owner and not lease.is_done:
                        if owner == NOBODY:
                            lease.owner, lease.number = worker, lease.number + 1
                        return _lease_reply(stream, lease.number, lease.begun_at)
            if not self._is_pass_over():
                return None
        return _lease_reply(None, 0, 0)

    def _finish(self, worker: int, stream: int, number: int) -> bool:
        """Mark a stream as done; returns whether it was not. Raises Fenced if another worker has
        taken it.
        """
        if not 0 <= stream < len(self._leases):
            raise BadRequest(
                f"coordinator: expected a stream below {len(self._leases)}, found {stream}"
            )
        lease = self._leases[stream]
        if number != lease.number:
            raise Fenced(
                f"stream {stream}: lease {lease.number} has taken over, worker {worker} had"
                f" {number}: it sent no heartbeat for {self._workers.silence_s:g} s, or has been"
                " restarted"
            )
        was_done, lease.owner, lease.is_done = lease.is_done, NOBODY, True
        return not was_done

    def on_give_back(self, worker: int, request: Request) -> Reply:
        """A worker stops in the middle of a stream. `parts`: the worker also leaves the job."""
        leaves_job = need(request.body, "parts", bool)
        self._check_in_use("coord.give_back")
        if leaves_job and worker == SAVER:
            raise BadRequest(f"coord.give_back: expected worker {worker}, which saves, to stay")
        self.free(worker)
        if leaves_job:
            self._workers.leave_job(worker)
            self._keep()
            self._meetings.end_complete()
        return Reply()

    def free(self, worker: int) -> None:
        """Let others take the stream of this worker, which waits for none any more."""
        self._waiting.pop(worker, None)
        if self._owns(worker):
            for lease in self._leases:
                if lease.owner == worker:
                    lease.owner = NOBODY
            self._answer_waiting()

    def _owns(self, worker: int) -> bool:
        return any(lease.owner == worker for lease in self._leases)

    def _blockers(self, worker: int) -> str:
        """Streams that a worker without one waits for, for messages."""
        others = [
            f"{stream} (worker {lease.owner})"
            for stream, lease in enumerate(self._leases)
            if lease.owner not in (NOBODY, worker)
        ]
        return f"waits for streams {', '.join(others) or 'none any more'}"

    def _answer_waiting(self) -> None:
        """Offer streams that have become free, or the end of the pass, to those who wait."""
        offers = ((worker, self._offer(worker, self.pass_number)) for worker in self._waiting)
        replies = dict(takewhile(lambda offer: offer[1] is not None, offers))  # or none is left
        self._keep()
        for worker, reply in replies.items():
            assert reply is not None
            self._waiting.pop(worker).reply(reply)

    def _keep(self) -> None:
        """Write the state now, and again when the handler returns: it may change more."""
        self._kept.flush_change()
        self._kept.note_change()

    # ---- workers that leave ----

    def end(self, worker: int) -> Reply:
        """The script of a worker has ended. The reply to one that takes part names all who do; from
        now on no worker joins.
        """
        if not self.is_in_use or worker not in self._workers.participants:
            return Reply()
        self.free(worker)
        self._workers.forget_heartbeats(worker)
        return Reply({"members": sorted(self._workers.participants)})

    def note_heartbeat(self, worker: int) -> None:
        """Record a heartbeat, and give up the workers that have been silent for too long."""
        if self.is_in_use:
            self._workers.note_heartbeat(worker)
            for silent in self._workers.silent():
                self._give_up(silent)

    def _give_up(self, worker: int) -> None:
        if worker == SAVER and not self._owns(worker):
            return
        log.warning(
            "worker %d sent no heartbeat for %g s: others take over its streams",
            *(worker, self._workers.silence_s),
        )
        if worker != SAVER:
            error = self._workers.give_up(worker)
            if waiting := self._waiting.pop(worker, None):
                waiting.fail(error)
        self.free(worker)
        self._keep()
        self._meetings.end_complete()

    def state(self) -> dict[str, Any] | None:
        """None if no streams are leased. Workers that wait ask again."""
        if not self.is_in_use:
            return None
        return {
            "members": sorted(self._workers.participants),
            "silence_s": self._workers.silence_s,
            "pass": [self.pass_number, self._num_steps],
            "leases": [vars(lease) for lease in self._leases],
        }

    def install(self, state: Mapping[str, Any] | None) -> None:
        if state is not None:
            self.pass_number, self._num_steps = state["pass"]
            self._leases = [Lease(**lease) for lease in state["leases"]]


def _lease_reply(stream: int | None, lease: int, begun_at: int) -> Reply:
    return Reply({"stream": stream, "lease": lease, "begun_at": begun_at})
