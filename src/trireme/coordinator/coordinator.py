"""The coordinator: bucket map, members and their incarnations, group changes, barriers. Hosted by
server 0.

It never sees a key or a gradient. Every worker brings the same facts (servers, number of workers,
strategy, schemas of blocks); the first one fixes them and the others must agree. Where workers
share out streams (`Sharing`), they may come late and be given up.

Threads: any; one lock guards everything.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from trireme.coordinator.exports import Exports
from trireme.coordinator.meetings import Arrival, Meeting, Meetings, Name, forgotten
from trireme.coordinator.members import Worker
from trireme.coordinator.shared_streams import SharedStreams
from trireme.errors import (
    BadRequest,
    Corruption,
    Fenced,
    NotReady,
    ResourceExhausted,
    SchemaMismatch,
)
from trireme.protocol.identity import lost_coordinator
from trireme.protocol.membership import WORKERS_MAX, Member
from trireme.protocol.routing import BucketMap
from trireme.protocol.wire import STREAMS_MAX, need, need_list
from trireme.rpc import Deferred, Reply, Request

FACTS_MAX = 64
TOKENS_MAX = 16
GATHER_BYTES_MAX = 64 << 20
NAME_MAX = 1024
NOTE_MAX = 8

READING = ("coord.map", "coord.chain")
ASKING = ("coord.take",)
"""Asked again and again by who waits: they say themselves whether they have changed anything."""

Handler = Callable[[Request], "Reply | Deferred | None"]


@dataclass
class Pass:
    """A group of streams that advance together; a stream's sequence n belongs to step n -
    first_sequence + first.
    """

    number: int = 0
    members: dict[int, Member] = field(default_factory=dict)


class Coordinator:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._lock = threading.RLock()
        self._exports = Exports()
        self._facts: dict[str, Any] = {}
        self._map: BucketMap | None = None
        self._workers: dict[int, Worker] = {}
        self._meetings = Meetings()
        self._run = 0  # how often all workers have ended their scripts
        self._begun = 0  # the pass that they had ended with
        self._gone: set[int] = set()  # who has said goodbye to this process
        self._pass = Pass()
        self._shared = SharedStreams(self._meetings, self._keep_amid, clock)
        self._group_version = 0
        self._job = uuid.uuid4().hex
        self._states: list[str] = []  # of the servers, as workers have found them
        self._keeper: Callable[[dict[str, Any]], None] | None = None
        self._is_kept = True
        self._hint = ""  # to errors, after a recovery

    def handlers(self) -> dict[str, Handler]:
        """Methods by their names on the wire."""
        handlers = {
            "coord.join": self._on_join,
            "coord.states": self._on_states,
            "coord.map": self._on_map,
            "coord.add_blocks": self._on_add_blocks,
            "coord.agree": self._on_agree,
            "coord.begin_pass": self._on_begin_pass,
            "coord.leave": self._on_leave,
            "coord.enter": self._on_enter,
            "coord.take": self._on_take,
            "coord.give_back": self._on_give_back,
            "coord.gather": self._on_gather,
            "coord.end": self._on_end,
            **self._exports.handlers(),
        }
        return {name: self._keeping(handler) for name, handler in handlers.items()}

    # ---- what outlives the process ----

    def keep(self, keep: Callable[[dict[str, Any]], None]) -> None:
        """From now on `keep` gets the whole state before anything is answered that relies on it;
        it raises where it cannot keep it.
        """
        self._keeper = keep

    def _keeping(self, handler: Handler) -> Handler:
        """Methods that only read keep nothing, those that ask what they change; what could not be
        kept before is tried again.
        """

        def handle(request: Request) -> Reply | Deferred | None:
            with self._lock:
                self._is_kept &= request.method in READING + ASKING
                answer = handler(request)
                if not isinstance(answer, Deferred):
                    self._keep_now()
                return answer

        return handle

    def _keep_now(self) -> None:
        if self._keeper is not None and not self._is_kept:
            self._keeper(self._state())
        self._is_kept = True

    def _keep_changed(self) -> None:
        self._is_kept = False
        self._keep_now()

    def _keep_amid(self) -> None:
        """What a handler changes afterwards is kept at its end."""
        self._keep_changed()
        self._is_kept = False

    def _state(self) -> dict[str, Any]:
        """All but the meetings that are open."""
        return {
            "job": self._job,
            "states": self._states,
            "facts": self._facts,
            "map": None if self._map is None else self._map.to_wire(),
            "workers": {index: vars(worker) for index, worker in self._workers.items()},
            "run": [self._run, self._begun],
            "group_version": self._group_version,
            "pass": self._pass.number,
            "members": [[s, m.first, m.end] for s, m in self._pass.members.items()],
            "shared": self._shared.state(),
            "meetings": self._meetings.state(),
            "exports": self._exports.state(),
        }

    def install(self, state: Mapping[str, Any]) -> None:
        """Begin with a state that was kept."""
        self._hint = (
            "; this server goes on from its --state_dir: start the job as it was (--servers), or"
            " another one with another folder"
        )
        self._job, self._states, self._facts = state["job"], state["states"], state["facts"]
        self._map = None if state["map"] is None else BucketMap.from_wire(state["map"])
        self._workers = {index: Worker(**worker) for index, worker in state["workers"].items()}
        self._run, self._begun = state["run"]
        self._group_version = state["group_version"]
        members = {s: Member(first, end) for s, first, end in state["members"]}
        self._pass = Pass(state["pass"], members)
        self._shared.install(state["shared"])
        self._meetings.install(state["meetings"])
        self._exports.install(state["exports"])

    # ---- members ----

    def _on_join(self, request: Request) -> Reply:
        """A worker starts, or its successor does: it gets the next incarnation, which fences the
        one before. The same process has the same token, and gets the same incarnation again.
        """
        body = request.body
        servers = tuple(str(server) for server in need(body, "servers", list))
        token, is_late = need(body, "token", str), need({"late": False, **body}, "late", bool)
        if not servers:
            raise BadRequest("coord.join: expected at least one server, found none")
        with self._lock:
            index = self._late_index(servers, token) if is_late else self._index(body)
            self._agree("servers", list(servers), index)
            if self._map is None:
                self._map = BucketMap.even(servers)
            worker = self._workers.setdefault(index, Worker(passes=self._begun))
            if token not in worker.tokens:
                worker.incarnation += 1
                worker.tokens[token] = worker.incarnation
                while len(worker.tokens) > TOKENS_MAX:
                    del worker.tokens[next(iter(worker.tokens))]
                worker.call = 0
                if not self._shared.begin_again(index):
                    # It runs its script as if it had been there up to the pass under way.
                    worker.passes = max(self._shared.number, self._begun)
                    worker.has_ended, worker.first = False, 0
            return Reply(
                {
                    "worker": index,
                    "num_workers": self._facts["num_workers"],
                    "streams": self._facts["streams"],
                    "incarnation": worker.tokens[token],
                    "map": self._map.to_wire(),
                    "job": self._job,
                    "states": self._states,
                    "script": self._script_of(index, worker, token),
                }
            )

    def _index(self, body: Mapping[str, Any]) -> int:
        """Of a worker that knows its place."""
        index, num_workers = need(body, "worker", int), need(body, "num_workers", int)
        if not 0 <= index < num_workers <= WORKERS_MAX:
            raise BadRequest(
                f"coord.join: expected 0 <= worker < num_workers <= {WORKERS_MAX},"
                f" found {index} and {num_workers}"
            )
        sharing = {"streams": 0, "silence_s": 0.0, **body}
        num_streams, silence_s = need(sharing, "streams", int), need(sharing, "silence_s", float)
        if not (0 <= num_streams <= STREAMS_MAX and silence_s >= 0):
            raise BadRequest(
                f"coord.join: expected 0 <= streams <= {STREAMS_MAX} and silence_s >= 0,"
                f" found {num_streams} and {silence_s}"
            )
        self._agree("servers", [str(server) for server in body["servers"]], index)
        self._agree("num_workers", num_workers, index)
        self._agree("streams", num_streams, index)
        self._shared.begin(num_streams, num_workers, silence_s)
        return index

    def _late_index(self, servers: tuple[str, ...], token: str) -> int:
        """Of a worker that comes to a job that runs: the next one."""
        for index, worker in self._workers.items():
            if token in worker.tokens:  # its answer was lost
                return index
        if self._map is None:
            raise NotReady("coordinator: no worker has joined yet that others may join later")
        if not self._shared.is_in_use:
            raise BadRequest(
                "coord.join: expected a job whose workers share out streams (--streams,"
                " TRIREME_STREAMS), which others may join later, found one in which each worker has"
                f" one of {self._facts['num_workers']}"
            )
        self._check_not_ending("coord.join")
        self._agree("servers", list(servers), index := max(self._workers) + 1)
        index = max(index, self._facts["num_workers"])
        self._check_room("coord.join", index)
        return int(index)

    def _check_room(self, method: str, index: int) -> None:
        """Raises ResourceExhausted: a worker that comes late would have no stream. Others have
        their places.
        """
        num_workers = int(self._facts["num_workers"])
        at_a_time = max(num_workers, int(self._facts["streams"]))
        if index >= num_workers and (index >= WORKERS_MAX or len(self._members()) >= at_a_time):
            raise ResourceExhausted(
                f"{method}: expected at most {at_a_time} workers at a time, one for each stream,"
                f" and {WORKERS_MAX} in all, found worker {index} beside {len(self._members())}"
            )

    def _check_not_ending(self, method: str) -> None:
        members = [self._workers[index] for index in self._members() if index in self._workers]
        if any(worker.has_ended for worker in members):
            raise BadRequest(
                f"{method}: expected a job that goes on, found one whose workers come to the end of"
                " their scripts"
            )

    def _script_of(self, index: int, worker: Worker, token: str) -> dict[str, Any]:
        met = self._meetings.met_by(index, worker.passes)
        return {"run": self._run, "begun": self._begun, "met": met, **worker.way(token)}

    def _on_end(self, request: Request) -> Reply:
        """A worker has come to the end of its script."""
        run = need(request.body, "run", int)
        with self._lock:
            index, worker = self._worker(request)
            worker.has_ended |= run == self._run
            return self._shared.end(index)

    def hear_goodbye(self, index: int) -> None:
        """A worker has said goodbye, behind the end of its script. When all have, and this process
        goes on all the same, who joins begins the next script.
        """
        with self._lock:
            self._gone.add(index)
            ended = {w: of for w, of in self._workers.items() if w in self._gone and of.has_ended}
            if not ended or set(self._members()) - ended.keys():
                return
            self._run, self._begun = self._run + 1, max(of.passes for of in ended.values())
            self._shared.begin_run(self._facts["num_workers"])
            for of in ended.values():
                of.has_ended, of.passes, of.first = False, self._begun, of.incarnation + 1
            self._gone.clear()

    def _on_states(self, request: Request) -> Reply:
        """What the servers hold, by names that change when it is lost: the first worker brings
        them, and finds what all others find.
        """
        states = need_list(request.body, "states", str)
        with self._lock:
            self._worker(request)
            num_servers = len(self._facts["servers"])
            if len(states) != num_servers:
                raise BadRequest(
                    f"coord.states: expected those of {num_servers} servers, found {len(states)}"
                )
            if not self._states:
                self._states = states
            for index, (known, found) in enumerate(zip(self._states, states, strict=True)):
                if known != found:
                    raise Corruption(f"coordinator: server {index} has lost what it held")
            return Reply()

    def _agree(self, fact: str, value: Any, worker: int) -> None:
        known = self._facts.setdefault(fact, value)
        if known != value:
            raise SchemaMismatch(
                f"coordinator: {fact} is {known!r} for this job, worker {worker} says {value!r}"
                f"{self._hint}"
            )

    def _on_agree(self, request: Request) -> Reply:
        """Every worker must say the same of a fact of the job, such as its strategy."""
        with self._lock:
            index, _ = self._worker(request)
            fact, value = need(request.body, "fact", str), need(request.body, "value", str)
            is_new = f"job {fact}" not in self._facts
            if is_new and index not in self._members():
                raise NotReady(f"coordinator: no worker that takes part has said its {fact} yet")
            if is_new and len(self._facts) >= FACTS_MAX:
                raise BadRequest(f"coord.agree: expected at most {FACTS_MAX} facts")
            self._agree(f"job {fact}", value, index)
            return Reply({})

    def _worker(self, request: Request) -> tuple[int, Worker]:
        index = need(request.body, "worker", int)
        incarnation = need(request.body, "incarnation", int)
        worker = self._workers.get(index)
        if worker is None:  # who has not joined has no incarnation
            raise lost_coordinator(index)
        if incarnation < worker.incarnation:
            raise Fenced(
                f"worker {index}: incarnation {worker.incarnation} has taken over,"
                f" found {incarnation}"
            )
        self._shared.check(index)
        call = need(request.body, "call", int)
        if call < worker.call:
            raise BadRequest(
                f"{request.method}: expected call {worker.call} or later of worker {index},"
                f" found {call}: the network delivered it twice"
            )
        worker.call = call
        return index, worker

    @property
    def num_workers(self) -> int | None:
        """Workers that the job begins with; None until the first has joined."""
        return self._facts.get("num_workers")

    def _members(self) -> Collection[int]:
        """Workers that meetings wait for."""
        return self._shared.members(self._facts.get("num_workers", 0))

    def hear_alive(self, index: int, incarnation: int) -> None:
        """A worker has given a sign of life. Who has given none for too long is given up, where
        others can go on with its streams.
        """
        with self._lock:
            worker = self._workers.get(index)
            if worker is not None and incarnation == worker.incarnation:
                self._shared.hear(index)

    def whom_to_expect(self, workers: Collection[int]) -> list[int]:
        """Those of these workers that take part."""
        with self._lock:
            members = self._members()
            return [worker for worker in workers if worker in members]

    # ---- map ----

    def _on_map(self, request: Request) -> Reply:
        del request
        with self._lock:
            if self._map is None:
                raise NotReady("coordinator: no worker has joined yet")
            return Reply({"map": self._map.to_wire()})

    def set_map(self, bucket_map: BucketMap) -> None:
        """Publish a newer map, after buckets have been moved."""
        with self._lock:
            if self._map is not None and bucket_map.version <= self._map.version:
                raise BadRequest(
                    f"coordinator: expected a map newer than {self._map.version},"
                    f" found {bucket_map.version}"
                )
            self._map = bucket_map

    def _on_add_blocks(self, request: Request) -> Reply:
        """Every worker says the same; who places blocks by its own rule says their owners."""
        ids = need_list(request.body, "blocks", str)
        given = request.body.get("owners")
        owners = None if given is None else need_list(request.body, "owners", int)
        with self._lock:
            self._worker(request)
            if self._map is None:
                raise NotReady("coordinator: no worker has joined yet")
            if owners is not None:
                self._check_owners(ids, owners)
            self._map = self._map.with_blocks(ids, owners)
            return Reply({"map": self._map.to_wire()})

    def _check_owners(self, ids: list[str], owners: list[int]) -> None:
        assert self._map is not None
        num_servers = len(self._map.servers)
        if len(owners) != len(ids) or not all(0 <= owner < num_servers for owner in owners):
            raise BadRequest(
                f"coord.add_blocks: expected {len(ids)} owners below {num_servers}, found"
                f" {len(owners)}, from {min(owners, default=0)} to {max(owners, default=0)}"
            )
        for block_id, owner in zip(ids, owners, strict=True):
            known = self._map.blocks.get(block_id, owner)
            if known != owner:
                raise SchemaMismatch(
                    f"coordinator: block {block_id} is on server {known}, found {owner}: workers"
                    f" must place blocks alike{self._hint}"
                )

    # ---- passes ----

    def _on_begin_pass(self, request: Request) -> Reply | Deferred:
        """If workers go together, answers when every worker has come: their streams are members
        from the same step on.

        A successor that comes to the pass that its predecessor had begun enters it at once, and
        gets what the predecessor had noted.
        """
        body = request.body
        number, together = need(body, "pass", int), need(body, "together", bool)
        note = need_list(body, "note", int, NOTE_MAX)
        with self._lock:
            index, worker = self._worker(request)
            if self._shared.is_in_use:
                raise BadRequest(
                    "coord.begin_pass: expected coord.enter in a job whose workers share out"
                    f" streams, found worker {index} with a pass of its own"
                )
            if number == worker.passes:
                return self._pass_reply(worker.note)
            if number != worker.passes + 1:
                raise BadRequest(
                    f"coord.begin_pass: expected pass {worker.passes} or the next one of worker"
                    f" {index}, found {number}"
                )
            if not together:
                self._begin(index, number, note)
                return self._pass_reply()
            name, arrival = Name(number, ""), Arrival(index, "begin", note)
            return self._come(name, arrival, lambda meeting: self._open_pass(number, meeting))

    def _begin(self, index: int, number: int, note: list[int]) -> None:
        worker = self._workers[index]
        worker.passes, worker.note = number, note
        self._meetings.forget_names(min(of.passes for of in self._workers.values()))

    def _open_pass(self, number: int, meeting: Meeting) -> Reply:
        ends = [member.end for member in self._pass.members.values() if member.end is not None]
        first = max(ends, default=1)
        workers = range(self._facts["num_workers"])
        for index in workers:
            self._begin(index, number, meeting.arrived[index].body)
        self._pass = Pass(number, {index: Member(first, None) for index in workers})
        self._group_version += 1
        self._keep_now()
        return self._pass_reply()

    def _pass_reply(self, note: list[int] | None = None) -> Reply:
        return Reply(
            {
                "note": note,
                "group": {
                    "version": self._group_version,
                    "members": [
                        [stream, member.first, member.end]
                        for stream, member in self._pass.members.items()
                    ],
                },
            }
        )

    def _on_leave(self, request: Request) -> Reply:
        """A stream contributes to the steps before `step` only. Leaving twice is leaving once."""
        step = need(request.body, "step", int)
        with self._lock:
            index, _ = self._worker(request)
            member = self._pass.members.get(index)
            if member is None:
                raise BadRequest(f"coord.leave: stream {index} is not in a pass")
            if member.end is None:
                if step < member.first:
                    raise BadRequest(
                        f"coord.leave: stream {index} began at step {member.first},"
                        f" found step {step}"
                    )
                self._pass.members[index] = Member(member.first, step)
                self._group_version += 1
            return self._pass_reply()

    # ---- streams that are shared out ----

    def _on_enter(self, request: Request) -> Reply:
        """A worker comes to a pass whose streams are shared out. It takes part from then on if
        there is something left to do in it.
        """
        number, num_steps = need(request.body, "pass", int), need(request.body, "num_steps", int)
        sequences = need_list(request.body, "sequences", int, STREAMS_MAX)
        with self._lock:
            index, worker = self._worker(request)
            if index not in self._members():
                self._check_not_ending("coord.enter")
                self._check_room("coord.enter", index)  # others may have come since it joined
            reply = self._shared.enter(index, number, sequences, num_steps)
            self._begin(index, max(number, worker.passes), [])
            return reply

    def _on_take(self, request: Request) -> Reply | Deferred:
        """Give a stream back that is done, if any, and take another: answers when there is one, or
        when all are done.
        """
        number = need(request.body, "pass", int)
        done = need_list(request.body, "done", int, 2)
        with self._lock:
            index, _ = self._worker(request)
            had_one = self._shared.owns(index)
            answer = self._shared.take(index, number, done)
            self._is_kept &= self._shared.owns(index) == had_one
            return answer

    def _on_give_back(self, request: Request) -> Reply:
        """A worker stops amid a stream, to leave alone (`parts`), or because all stop."""
        parts = need(request.body, "parts", bool)
        with self._lock:
            index, _ = self._worker(request)
            return self._shared.give_back(index, parts=parts)

    # ---- meetings ----

    def _on_gather(self, request: Request) -> Reply | Deferred:
        """A barrier that hands every worker what each one brought, in the order of the workers.

        `pass` and `name` say which meeting: all workers run the same script, in which it has one
        name. `purpose` must agree too: workers that do different things would otherwise take each
        other's answers.
        """
        body = request.body
        if sum(array.nbytes for array in request.arrays) > GATHER_BYTES_MAX:
            raise BadRequest(f"coord.gather: expected at most {GATHER_BYTES_MAX} bytes per worker")
        path, purpose = need(body, "name", str), need(body, "purpose", str)
        if not path or max(len(path), len(purpose)) > NAME_MAX:
            raise BadRequest(
                f"coord.gather: expected a name and a purpose of at most {NAME_MAX} characters,"
                f" found {path[:NAME_MAX]!r} and {purpose[:NAME_MAX]!r}"
            )
        arrays = list(request.arrays)
        with self._lock:
            index, worker = self._worker(request)
            name = Name(need(body, "pass", int), path)
            if name.number < worker.passes and not self._meetings.is_open_or_kept(name):
                raise forgotten(name, purpose)
            arrival = Arrival(index, purpose, need(body, "body", dict), arrays)

            def conclude(meeting: Meeting) -> Reply:
                reply = _gathered(meeting)
                self._meetings.keep(name, purpose, reply)
                self._keep_changed()
                return reply

            return self._come(name, arrival, conclude)

    def _come(
        self, name: Name, arrival: Arrival, conclude: Callable[[Meeting], Reply]
    ) -> Reply | Deferred:
        def describe() -> str:
            with self._lock:
                return self._meetings.missing(name, self._members())

        return self._meetings.come(name, arrival, self._members(), conclude, describe)


def _gathered(meeting: Meeting) -> Reply:
    arrived = [meeting.arrived[index] for index in sorted(meeting.arrived)]
    bodies = [[arrival.body, len(arrival.arrays)] for arrival in arrived]
    return Reply({"bodies": bodies}, [array for arrival in arrived for array in arrival.arrays])
