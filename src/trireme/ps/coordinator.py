"""The coordinator: bucket map, members and their incarnations, group changes, barriers. Hosted by
server 0.

It never sees a key or a gradient. Every worker brings the same facts (servers, number of workers,
strategy, schemas of blocks); the first one fixes them and the others must agree.

Threads: any; one lock guards everything.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trireme.errors import (
    BadRequest,
    Corruption,
    Fenced,
    NotReady,
    SchemaMismatch,
)
from trireme.ps.exports import Exports
from trireme.ps.identity import lost_coordinator
from trireme.ps.meetings import Arrival, Meeting, Meetings, Name, forgotten
from trireme.ps.routing import BucketMap
from trireme.ps.staging import Member
from trireme.ps.wire import need, need_list
from trireme.rpc import Deferred, Reply, Request

WORKERS_MAX = 4096
FACTS_MAX = 64
TOKENS_MAX = 16
GATHER_BYTES_MAX = 64 << 20
NAME_MAX = 1024
NOTE_MAX = 8

READING = ("coord.map", "coord.chain")

Handler = Callable[[Request], "Reply | Deferred | None"]


@dataclass
class Worker:
    """`tokens`: of its last incarnations, by which a repeated join is known. `call`: the number of
    its last call: it makes one after the other, so one with a lower number comes late by the
    network. `first`: its first incarnation in this run of the script. `passes`, `note`: the number
    of the last pass that it has begun, and what it has noted there for a successor. `has_ended`: it
    has come to the end of the script.
    """

    incarnation: int = 0
    tokens: dict[str, int] = field(default_factory=dict)
    call: int = 0
    first: int = 1
    passes: int = 0
    note: list[int] = field(default_factory=list)
    has_ended: bool = False


@dataclass
class Pass:
    """A group of streams that advance together; a stream's sequence n belongs to step n -
    first_sequence + first.
    """

    number: int = 0
    members: dict[int, Member] = field(default_factory=dict)


class Coordinator:
    def __init__(self) -> None:
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
        """Methods that only read keep nothing; what could not be kept before is tried again."""

        def handle(request: Request) -> Reply | Deferred | None:
            with self._lock:
                self._is_kept &= request.method in READING
                answer = handler(request)
                if not isinstance(answer, Deferred):
                    self._keep_now()
                return answer

        return handle

    def _keep_now(self) -> None:
        if self._keeper is not None and not self._is_kept:
            self._keeper(self._state())
        self._is_kept = True

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
        self._meetings.install(state["meetings"])
        self._exports.install(state["exports"])

    # ---- members ----

    def _on_join(self, request: Request) -> Reply:
        """A worker starts, or its successor does: it gets the next incarnation, which fences the
        one before. The same process has the same token, and gets the same incarnation again.
        """
        body = request.body
        servers = tuple(str(server) for server in need(body, "servers", list))
        num_workers = need(body, "num_workers", int)
        index, token = need(body, "worker", int), need(body, "token", str)
        if not servers:
            raise BadRequest("coord.join: expected at least one server, found none")
        if not 0 <= index < num_workers <= WORKERS_MAX:
            raise BadRequest(
                f"coord.join: expected 0 <= worker < num_workers <= {WORKERS_MAX},"
                f" found {index} and {num_workers}"
            )
        with self._lock:
            self._agree("servers", list(servers), index)
            self._agree("num_workers", num_workers, index)
            if self._map is None:
                self._map = BucketMap.even(servers)
            worker = self._workers.setdefault(index, Worker(passes=self._begun))
            if token not in worker.tokens:
                worker.incarnation += 1
                worker.tokens[token] = worker.incarnation
                while len(worker.tokens) > TOKENS_MAX:
                    del worker.tokens[next(iter(worker.tokens))]
                worker.call = 0
            return Reply(
                {
                    "incarnation": worker.tokens[token],
                    "map": self._map.to_wire(),
                    "job": self._job,
                    "states": self._states,
                    "script": self._script_of(index, worker, worker.tokens[token]),
                }
            )

    def _script_of(self, index: int, worker: Worker, incarnation: int) -> dict[str, Any]:
        """What a worker must know of its predecessors' way through the script, see Script."""
        return {
            "run": self._run,
            "begun": self._begun,
            "entered": worker.passes,
            "is_successor": incarnation > worker.first,
            "has_ended": worker.has_ended,
            "met": self._meetings.met_by(index, worker.passes),
        }

    def _on_end(self, request: Request) -> Reply:
        """A worker has come to the end of its script."""
        run = need(request.body, "run", int)
        with self._lock:
            _, worker = self._worker(request)
            worker.has_ended |= run == self._run
            return Reply()

    def hear_goodbye(self, index: int) -> None:
        """A worker has said goodbye, behind the end of its script. When all have, and this process
        goes on all the same, who joins begins the next script.
        """
        with self._lock:
            self._gone.add(index)
            ended = [of for w, of in self._workers.items() if w in self._gone and of.has_ended]
            if len(ended) != self._facts.get("num_workers"):
                return
            self._run, self._begun = self._run + 1, max(of.passes for of in ended)
            for of in ended:
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
            if f"job {fact}" not in self._facts and len(self._facts) >= FACTS_MAX:
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
        """Workers of the job; None until the first has joined."""
        return self._facts.get("num_workers")

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
                self._keep_now()
                return reply

            return self._come(name, arrival, conclude)

    def _come(
        self, name: Name, arrival: Arrival, conclude: Callable[[Meeting], Reply]
    ) -> Reply | Deferred:
        num_workers = self._facts["num_workers"]

        def describe() -> str:
            with self._lock:
                return self._meetings.missing(name, num_workers)

        return self._meetings.come(name, arrival, num_workers, conclude, describe)


def _gathered(meeting: Meeting) -> Reply:
    arrived = [meeting.arrived[index] for index in sorted(meeting.arrived)]
    bodies = [[arrival.body, len(arrival.arrays)] for arrival in arrived]
    return Reply({"bodies": bodies}, [array for arrival in arrived for array in arrival.arrays])
