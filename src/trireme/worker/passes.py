"""How a worker goes through a pass: with a stream of its own, or with leased streams.

A worker with a stream of its own begins the pass and leaves it. Where streams are leased, it enters
the pass, takes one stream after the other, and may give one back before its end.
"""

import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from trireme.errors import (
    DeadlineExceeded,
    NotAdmitted,
    ResourceExhausted,
    TriremeError,
    Unavailable,
)
from trireme.protocol.pass_lease import PassLease
from trireme.rpc.notices import Notices
from trireme.worker.client import StreamPosition, WorkerClient
from trireme.worker.coordinator_calls import PATIENCE
from trireme.worker.script import DataCut
from trireme.worker.servers import RETRY_S

POLL_S = 2.0
"""How long one call for a stream waits; between two, this worker may be asked to stop."""

log = logging.getLogger("trireme.worker")


@dataclass(frozen=True)
class PassNote:
    """Where a worker stood when it began a pass. The coordinator keeps it for a successor."""

    sequence: int = 0  # of its last push
    num_steps: int = 0  # that it had made
    job_steps_before: int | None = None  # in sync: made before step 1 of the passes

    def to_wire(self) -> list[int]:
        numbers = (self.sequence, self.num_steps, self.job_steps_before)
        return [number for number in numbers if number is not None]


@dataclass(frozen=True)
class EnteredPass:
    """A pass that this worker has begun."""

    note: PassNote = PassNote()  # of the first process of this worker that had begun it
    is_over: bool = False  # predecessors have finished it; nothing is left to do
    first_step: int = 0  # its number; 0 where streams do not advance together
    end: int | None = None  # the first step without this stream, which a predecessor has left
    num_steps: int = 0  # leased streams: about as many as a worker there from the start made


@dataclass(frozen=True)
class LeasedStream:
    """A stream that a worker may train on."""

    stream: int
    lease: int  # how often the stream has been taken: the incarnation of its pushes
    begun_at: int  # the sequence of its last push before the pass


def begin_pass(
    client: WorkerClient, note: PassNote, *, together: bool = True, staged: bool = True
) -> EnteredPass:
    """Enter the next pass. note: kept for a successor that enters it. together: become a member of
    the pass with all other workers; else no caller waits. staged: pushes are staged (sync); else
    they are applied on arrival (bounded).
    """
    if client.script.is_next_behind:
        client.script.number += 1
        return EnteredPass(note, is_over=True)
    number = client.script.begin_next()
    body = {"pass": number, "together": together, "note": note.to_wire(), **_data(client)}
    reply = client.coordinator.call("coord.begin_pass", body).body
    entered = EnteredPass(note if reply["note"] is None else PassNote(*reply["note"]))
    if together:
        group = reply["group"]
        client.servers.everywhere_current("ps.group", {**group, "staged": staged})
        [(first, end)] = [member[1:] for member in group["members"] if member[0] == client.stream]
        entered = replace(entered, first_step=int(first), end=end)
    client.script.has_entered = True
    return entered


def _data(client: WorkerClient) -> dict[str, Any]:
    data, client.script.data = client.script.data, DataCut()
    return {"data": data.text, "is_own": data.is_own}


def leave(client: WorkerClient, step: int, *, staged: bool = True) -> None:
    """Leave the pass: this stream contributes to the steps before `step` only."""
    group = client.coordinator.call("coord.leave", {"step": step}).body["group"]
    client.servers.everywhere_current("ps.group", {**group, "staged": staged})


def meet_in_pass(client: WorkerClient, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The bodies of the processes of all workers that have begun the same pass on devices, in their
    order. Waits while the others live. Raises BadRequest: they are in different passes.
    """
    place = {"pass": client.script.number, "token": uuid.uuid4().hex}
    reply = client.coordinator.patiently(
        lambda left_s: client.coordinator.call(
            "coord.meet_in_pass", {**place, "body": body}, timeout_s=left_s
        ),
        PATIENCE * client.timeout_s,
    )
    bodies: list[dict[str, Any]] = reply.body["bodies"]
    return bodies


def end_device_pass(
    client: WorkerClient, id: str, num_steps: int, *, together: bool = False
) -> bool:
    """Whether the import `id`, which all servers have prepared, ends the pass on a device that this
    worker is in: at most one import does. num_steps: made by now; a successor counts on from there.
    together: it is a pass of all workers, and ends for all if none of them has been restarted.
    Raises Fenced: a successor repeats the pass.
    """
    body = {"id": id, "pass": client.script.number, "num_steps": num_steps}
    body |= {"together": True} if together else {}
    return bool(client.coordinator.call("coord.end_device_pass", body).body["commit"])


def lease_of(client: WorkerClient) -> PassLease:
    """The name of the pass on a device that this worker is in."""
    return PassLease(client.worker, client.incarnation, client.script.number)


def take_lease(client: WorkerClient, lease: PassLease) -> None:
    """Have all servers refuse changes of rows and dense blocks, but those of this pass. Raises
    Leased: another worker has a pass. Fenced: a successor has. Some servers may have given it then.
    """
    client.servers.everywhere_current("ps.lease", lease.to_wire())


# ---- leased streams ----


def enter(client: WorkerClient, num_steps: int) -> EnteredPass:
    """Enter the next pass, and take part if work is left. num_steps: made so far."""
    if client.script.is_next_behind:
        client.script.number += 1
        return EnteredPass(is_over=True)
    positions = client.stream_positions(range(client.num_streams))
    sequences = [position.sequence for position in positions]
    number = client.script.begin_next()
    body = {"pass": number, "num_steps": num_steps, "sequences": sequences, **_data(client)}
    reply = client.coordinator.call("coord.enter", body).body
    client.script.has_entered = True
    begun_at, members = sum(reply["begun_at"]), max(1, int(reply["members"]))
    made = (sum(sequences) - begun_at) // members
    num_steps = int(reply["num_steps"]) + max(0, made)
    return EnteredPass(is_over=bool(reply["is_over"]), num_steps=num_steps)


def take(
    client: WorkerClient, done: LeasedStream | None, has_to_stop: Callable[[], bool]
) -> tuple[LeasedStream, StreamPosition] | None:
    """Give back a stream that is done, if any, and take another, with the position of its last
    push. Pushes belong to it from then on. Waits while others have all streams that are left; None:
    all are done, or this worker has to stop.

    Raises:
        Fenced: another worker has taken over the stream. DeadlineExceeded: others do not finish the
            streams that are left. Unavailable, ResourceExhausted: the coordinator could not be
            reached, or was full, for the client's timeout, or does not admit this worker.
    """
    body = {"pass": client.script.number, "done": [] if done is None else [done.stream, done.lease]}
    patience = _Patience(client.timeout_s)
    while not has_to_stop():
        try:
            timeout_s = min(client.timeout_s, POLL_S)
            reply = client.coordinator.call("coord.take", body, timeout_s=timeout_s).body
            break
        except (DeadlineExceeded, Unavailable, ResourceExhausted) as error:
            patience.wait(error)
    else:
        return None
    if reply["stream"] is None:
        return None
    taken = LeasedStream(int(reply["stream"]), int(reply["lease"]), int(reply["begun_at"]))
    client.use_stream(taken.stream, taken.lease)
    return taken, client.stream_position()


class _Patience:
    """Decides how long to keep asking for a stream: PATIENCE timeouts while the coordinator
    answers, one timeout while it does not.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._start = self._reached = now = time.monotonic()
        self._waiting, self._silent = Notices(now), Notices(now)  # for others; it does not answer

    def wait(self, error: TriremeError) -> None:
        """A call has failed. Wait before the next one, or raise the error if it was the last."""
        now = time.monotonic()
        is_reached = isinstance(error, DeadlineExceeded)
        if is_reached:
            self._reached, self._silent = now, Notices(now)
        is_lost = now - self._reached >= self._timeout_s
        is_long = now - self._start > PATIENCE * self._timeout_s
        if is_lost or is_long or isinstance(error, NotAdmitted):
            raise error
        if (self._waiting if is_reached else self._silent).take_due(now):
            log.warning("still waiting after %.0f s: %s", now - self._start, error)
        if not is_reached:  # the error may have come at once
            time.sleep(RETRY_S)


def give_back(client: WorkerClient, *, leaves_job: bool) -> None:
    """Stop in the middle of a pass, after all pushes have been applied; other workers take the
    stream. leaves_job: this worker leaves the job alone; meetings do not wait for it.
    """
    client.coordinator.call("coord.give_back", {"parts": leaves_job})
