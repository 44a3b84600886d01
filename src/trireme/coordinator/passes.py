"""The passes of a job: in which one each worker is, and the streams that advance together."""

from collections.abc import Mapping
from typing import Any

from trireme.coordinator.decisions import Decisions
from trireme.coordinator.joining import Joining
from trireme.coordinator.joint_passes import JointPasses
from trireme.coordinator.kept_state import KeptState
from trireme.coordinator.leases import StreamLeases
from trireme.coordinator.meetings import Contribution, Meeting, MeetingName, Meetings
from trireme.coordinator.workers import Workers
from trireme.errors import BadRequest
from trireme.protocol.job_limits import STREAMS_MAX
from trireme.protocol.membership import Member, members_from_wire, members_to_wire
from trireme.protocol.wire import need, need_list, need_name
from trireme.rpc import Deferred, Reply, Request

NOTE_MAX = 8
DATA_CHARS_MAX = 8192
ALL = -1


class Passes:
    """The passes that workers are in, and the streams that take part in steps. Every change of
    these members raises the version.
    """

    def __init__(
        self,
        workers: Workers,
        meetings: Meetings,
        leases: StreamLeases,
        joining: Joining,
        decisions: Decisions,
        joint: JointPasses,
        kept: KeptState,
    ) -> None:
        self._workers, self._meetings, self._leases = workers, meetings, leases
        self._joining, self._decisions, self._kept = joining, decisions, kept
        self._joint = joint
        self._number = self._version = 0
        self._members: dict[int, Member] = {}
        self._data: dict[tuple[int, int], str] = {}  # by pass and worker; ALL: all divide it

    def on_begin_pass(self, worker: int, request: Request) -> Reply | Deferred:
        """Enter a pass. `together`: answer when all workers have come; their streams are members
        from the same step on. A successor enters the pass of its predecessor at once, and gets the
        predecessor's note.
        """
        body = request.body
        number, together = need(body, "pass", int), need(body, "together", bool)
        note = need_list(body, "note", int, NOTE_MAX)
        self._agree_on_data(worker, number, body)
        record = self._workers.records[worker]
        if self._leases.is_in_use:
            raise BadRequest(
                "coord.begin_pass: expected coord.enter in a job with leased streams,"
                f" found worker {worker} with a pass of its own"
            )
        if number == record.passes:
            return self._reply(record.note)
        if number != record.passes + 1:
            raise BadRequest(
                f"coord.begin_pass: expected pass {record.passes} or the next one of worker"
                f" {worker}, found {number}"
            )
        if not together:
            self._begin(worker, number, note)
            return self._reply()
        return self._meetings.attend(
            MeetingName(number, ""),
            Contribution(worker, "begin", note),
            lambda meeting: self._open(number, meeting),
        )

    def _agree_on_data(self, worker: int, number: int, body: Mapping[str, Any]) -> None:
        """Raises BadRequest: other workers, or a predecessor, have begun the pass with other data,
        of which streams and positions are other examples.
        """
        data = need_name({"data": "", **body}, "data", DATA_CHARS_MAX)
        place = number, worker if need({"is_own": False, **body}, "is_own", bool) else ALL
        oldest = min(record.passes for record in self._workers.records.values())
        if not data or not oldest <= number <= self._workers.records[worker].passes + 1:
            return
        self._data = {place: text for place, text in self._data.items() if place[0] >= oldest}
        if (known := self._data.setdefault(place, data)) != data:
            raise BadRequest(
                f"pass {number}: expected the data with which it was begun, {known}, found {data}"
                f" at worker {worker}: examples would be lost or repeated; all need the same data"
                " in one order, or files of their own by own_files=True; one that is restarted the"
                " former data, or a new job with the newest checkpoint"
            )

    def _open(self, number: int, meeting: Meeting) -> Reply:
        first = max((m.end for m in self._members.values() if m.end is not None), default=1)
        workers = sorted(self._workers.participants)
        for worker in workers:
            self._begin(worker, number, meeting.contributions[worker].body)
        self._number, self._version = number, self._version + 1
        self._members = {worker: Member(first, None) for worker in workers}
        self._kept.flush()
        return self._reply()

    def on_enter(self, worker: int, request: Request) -> Reply:
        """Enter a pass whose streams are leased."""
        number, num_steps = need(request.body, "pass", int), need(request.body, "num_steps", int)
        sequences = need_list(request.body, "sequences", int, STREAMS_MAX)
        if worker not in self._workers.participants:
            self._joining.check_late("coord.enter", worker)  # others may have come since it joined
        self._agree_on_data(worker, number, request.body)
        entered = self._leases.enter(worker, number, sequences, num_steps)
        self._begin(worker, max(number, self._workers.records[worker].passes), [])
        return Reply(entered)

    def _begin(self, worker: int, number: int, note: list[int]) -> None:
        self._meetings.forget_dropped(self._workers.begin_pass(worker, number, note))

    def on_end_device_pass(self, worker: int, request: Request) -> Reply:
        """Decide that the import takes place which ends a pass on a device, once for each pass.
        `together`: it is a pass of all workers, which ends for all or none.
        """
        body = {"together": False, **request.body}
        together = need(body, "together", bool)
        number, num_steps = need(body, "pass", int), need(body, "num_steps", int)
        record = self._workers.records[worker]
        if number != record.passes:
            raise BadRequest(
                f"coord.end_device_pass: expected pass {record.passes} of worker {worker}, found"
                f" {number}"
            )
        members = self._joint.members(number) if together else [worker]
        is_first = bool(members) and record.trained < number
        commit = self._decisions.decide(need(body, "id", str), commit=is_first)
        for member in members if commit else ():
            self._workers.end_device_pass(member, number, num_steps)
        return Reply({"commit": commit})

    def on_leave(self, worker: int, request: Request) -> Reply:
        """End a stream: it contributes to the steps before `step` only. A repetition is ignored."""
        step = need(request.body, "step", int)
        member = self._members.get(worker)
        if member is None:
            raise BadRequest(f"coord.leave: stream {worker} is not in a pass")
        if member.end is None:
            if step < member.first:
                raise BadRequest(
                    f"coord.leave: stream {worker} began at step {member.first}, found step {step}"
                )
            self._members[worker] = Member(member.first, step)
            self._version += 1
        return self._reply()

    def _reply(self, note: list[int] | None = None) -> Reply:
        group = {"version": self._version, "members": members_to_wire(self._members)}
        return Reply({"note": note, "group": group})

    def state(self) -> dict[str, Any]:
        return {
            "group_version": self._version,
            "pass": self._number,
            "members": members_to_wire(self._members),
            "data": [[*place, text] for place, text in self._data.items()],
        }

    def install(self, state: Mapping[str, Any]) -> None:
        self._version, self._number = state["group_version"], state["pass"]
        self._members = dict(members_from_wire(state["members"]))
        self._data = {(number, worker): text for number, worker, text in state.get("data", [])}
