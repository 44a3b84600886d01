"""The coordinator: bucket map, members and their incarnations, group changes, barriers. Hosted by
server 0.

It never sees a key or a gradient. Every worker brings the same facts (servers, number of workers,
strategy, schemas of blocks); the first one fixes them and the others must agree.

Threads: any; one lock guards everything.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trireme.errors import (
    BadRequest,
    Corruption,
    Fenced,
    NotReady,
    SchemaMismatch,
    TriremeError,
)
from trireme.ps.exports import Exports
from trireme.ps.identity import lost_coordinator
from trireme.ps.routing import BucketMap
from trireme.ps.staging import Member
from trireme.ps.wire import Array, need, need_list
from trireme.rpc import Deferred, Reply, Request

WORKERS_MAX = 4096
FACTS_MAX = 64
TOKENS_MAX = 16
GATHER_BYTES_MAX = 64 << 20

READING = ("coord.map", "coord.chain")

Handler = Callable[[Request], "Reply | Deferred | None"]


@dataclass
class Worker:
    """`tokens`: of its last incarnations, by which a repeated join is known. `call`: the number of
    its last call: it makes one after the other, so one with a lower number comes late by the
    network.
    """

    incarnation: int = 0
    tokens: dict[str, int] = field(default_factory=dict)
    call: int = 0


@dataclass
class Meeting:
    """One barrier: what for, who has come with what, and who waits for the others."""

    purpose: str
    arrived: dict[int, list[np.ndarray[Any, Any]]] = field(default_factory=dict)
    bodies: dict[int, Any] = field(default_factory=dict)
    waiting: list[Deferred] = field(default_factory=list)


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
        self._meetings: dict[str, Meeting] = {}
        self._done: dict[str, Reply] = {}
        self._purposes: dict[str, str] = {}  # of what is done
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
        """All but the meetings that have begun: who waits there asks again."""
        return {
            "job": self._job,
            "states": self._states,
            "facts": self._facts,
            "map": None if self._map is None else self._map.to_wire(),
            "workers": [[w, o.incarnation, o.tokens, o.call] for w, o in self._workers.items()],
            "group_version": self._group_version,
            "pass": self._pass.number,
            "members": [[s, m.first, m.end] for s, m in self._pass.members.items()],
            "done": [
                [name, self._purposes[name], reply.body, *_packed(reply.arrays)]
                for name, reply in self._done.items()
            ],
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
        self._workers = {w: Worker(i, tokens, call) for w, i, tokens, call in state["workers"]}
        self._group_version = state["group_version"]
        members = {s: Member(first, end) for s, first, end in state["members"]}
        self._pass = Pass(state["pass"], members)
        for name, purpose, body, *arrays in state["done"]:
            self._done[name], self._purposes[name] = Reply(body, _unpacked(arrays)), purpose
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
            worker = self._workers.setdefault(index, Worker())
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
                }
            )

    def _on_states(self, request: Request) -> Reply:
        """What the servers hold, by names that change when it is lost: the first worker brings
        them, and finds what all others find.
        """
        states = need_list(request.body, "states", str)
        with self._lock:
            self._worker(request)
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
        ids = need(request.body, "blocks", list)
        with self._lock:
            self._worker(request)
            if self._map is None:
                raise NotReady("coordinator: no worker has joined yet")
            self._map = self._map.with_blocks([str(block_id) for block_id in ids])
            return Reply({"map": self._map.to_wire()})

    # ---- passes ----

    def _on_begin_pass(self, request: Request) -> Reply | Deferred:
        """Answers when every worker has come: their streams are members from the same step on.

        A successor whose stream is still a member gets the running pass at once.
        """
        with self._lock:
            index, _ = self._worker(request)
            member = self._pass.members.get(index)
            if member is not None and member.end is None:
                return self._pass_reply()
            name = f"pass {self._pass.number + 1}"
            return self._meet(name, "begin", index, None, [], self._open_pass)

    def _open_pass(self, meeting: Meeting) -> Reply:
        del meeting
        ends = [member.end for member in self._pass.members.values() if member.end is not None]
        first = max(ends, default=1)
        workers = range(self._facts["num_workers"])
        self._pass = Pass(self._pass.number + 1, {index: Member(first, None) for index in workers})
        self._group_version += 1
        return self._pass_reply()

    def _pass_reply(self) -> Reply:
        return Reply(
            {
                "pass": self._pass.number,
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

        `name` says which meeting; each worker counts its own, so the names agree. `purpose` must
        agree too: workers that do different things would otherwise take each other's answers.
        """
        body = need(request.body, "body", dict)
        if sum(array.nbytes for array in request.arrays) > GATHER_BYTES_MAX:
            raise BadRequest(f"coord.gather: expected at most {GATHER_BYTES_MAX} bytes per worker")
        with self._lock:
            index, _ = self._worker(request)
            name = f"meeting {need(request.body, 'name', str)}"
            purpose = need(request.body, "purpose", str)
            self._check_purpose(name, purpose, index)
            return self._meet(name, purpose, index, body, list(request.arrays), self._gathered)

    def _check_purpose(self, name: str, purpose: str, index: int) -> None:
        if (over := self._purposes.get(name, purpose)) != purpose:
            raise BadRequest(
                f"{name}: it was for {over!r} and is over, worker {index} comes for {purpose!r};"
                " a worker that starts again does not know how many meetings there have been"
            )
        meeting = self._meetings.get(name)
        if meeting is None or meeting.purpose == purpose:
            return
        error = BadRequest(
            f"{name}: workers {sorted(meeting.arrived)} came for {meeting.purpose!r}, worker"
            f" {index} for {purpose!r}; every worker must do the same in the same order"
        )
        for deferred in self._meetings.pop(name).waiting:
            deferred.fail(error)
        raise error

    def _gathered(self, meeting: Meeting) -> Reply:
        workers = sorted(meeting.arrived)
        bodies = [[meeting.bodies[index], len(meeting.arrived[index])] for index in workers]
        return Reply({"bodies": bodies}, [a for index in workers for a in meeting.arrived[index]])

    def _meet(
        self,
        name: str,
        purpose: str,
        index: int,
        body: Any,
        arrays: list[np.ndarray[Any, Any]],
        conclude: Callable[[Meeting], Reply],
    ) -> Reply | Deferred:
        """Wait for all workers, then answer all. A repeated request after the end gets the same
        answer.
        """
        if name in self._done:
            return self._done[name]
        meeting = self._meetings.setdefault(name, Meeting(purpose))
        meeting.arrived[index], meeting.bodies[index] = arrays, body
        if len(meeting.arrived) < self._facts["num_workers"]:
            deferred = Deferred(describe=lambda: self._describe(name))
            meeting.waiting.append(deferred)
            return deferred
        del self._meetings[name]
        reply = conclude(meeting)
        self._remember(name, purpose, reply)
        try:
            self._keep_now()
        except TriremeError as error:
            for deferred in meeting.waiting:
                deferred.fail(error)
            raise
        for deferred in meeting.waiting:
            deferred.reply(reply)
        return reply

    def _remember(self, name: str, purpose: str, reply: Reply) -> None:
        """Keep the last answers for requests whose reply was lost; a worker has one meeting open at
        a time.
        """
        self._done[name], self._purposes[name] = reply, purpose
        while len(self._done) > 4:
            oldest = next(iter(self._done))
            del self._done[oldest], self._purposes[oldest]

    def _describe(self, name: str) -> str:
        with self._lock:
            meeting = self._meetings.get(name)
            if meeting is None:
                return f"{name} has ended"
            expected = set(range(self._facts["num_workers"]))
            missing = sorted(expected - meeting.arrived.keys())
            return f"{name} ({meeting.purpose}) waits for workers {missing}"


def _packed(arrays: Sequence[Array]) -> tuple[Any, list[bytes]]:
    """Arrays in msgpack's types: [[dtype, shape]], bytes."""
    return [[a.dtype.str, list(a.shape)] for a in arrays], [a.tobytes() for a in arrays]


def _unpacked(packed: Sequence[Any]) -> list[Array]:
    specs, data = packed
    return [
        np.frombuffer(of, np.dtype(kind)).reshape(shape)
        for (kind, shape), of in zip(specs, data, strict=True)
    ]
