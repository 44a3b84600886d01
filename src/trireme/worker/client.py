"""A worker's view of the tables and blocks: create, pull, push, passes, meetings.

Exactly once: a push is named (stream, sequence). It is re-sent under the same name after a lost
answer or a change of the bucket map, and the servers' marks make the repetition harmless.

Threads: pull, push, what is asked aside, and the rest each use a connection of their own, so one
thread may pull while another pushes and a third waits for a save.
"""

from __future__ import annotations

import itertools
import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any, TypeVar

from trireme import _core
from trireme.errors import DeadlineExceeded, NotReady, TriremeError, WrongMap
from trireme.protocol.clipping import NormReply, norm_of_step
from trireme.protocol.dense_optimizers import GroupValues
from trireme.protocol.gradients import DenseGradient, Step, TableGradient
from trireme.protocol.membership import Pace, Stop
from trireme.protocol.routing import BucketMap, Floats, Keys, Split
from trireme.protocol.wire import Array, BlocksPush, Push, TablePush
from trireme.rpc import Call, Reply
from trireme.table import TableSchema, split_part
from trireme.worker.dense_parameters import DenseParameters
from trireme.worker.script import Entered, Script
from trireme.worker.transport import Channel, Transport

log = logging.getLogger("trireme.worker")

T = TypeVar("T")
RETRY_S = 0.02
PATIENCE = 30


@dataclass(frozen=True)
class Pulled:
    """Answer of a pull.

    Attributes:
        rows: per table (K, W) float32, row i for key i: the weights, or show, click and weights
            (`TableSchema.width_of`).
        blocks: per server the ids of its blocks and their flat weights; None if not asked for.
        versions: per server, its push counter when it answered.
        missing: per table, how many keys have no row yet.
        stop: behind which step of the pass all are to stop, if a server has applied it.
    """

    rows: dict[str, Floats]
    blocks: list[tuple[list[str], Floats]] | None
    versions: list[int]
    missing: dict[str, int]
    stop: Stop | None = None


@dataclass(frozen=True)
class StreamPosition:
    """What every server has applied of a stream: the next push is `sequence + 1`."""

    sequence: int = 0
    position: tuple[int, ...] = ()


class Client:
    """One worker's connection to the servers.

    Args:
        servers: endpoints; the first hosts the coordinator.
        connect: makes a transport for one thread's calls, given a name for it.
        worker: index of this worker; it is also its stream, unless streams are shared out.
        num_workers: workers that the job begins with.
        streams: that workers share out among themselves; 0: each worker has its own.
        late: join a job that shares out streams and runs; it says what worker this is, of how many,
            and how many streams there are.
        silence_s: of a worker, after which others take its streams over.
        pool: threads for the core's batch work.
        timeout_s: seconds that any call may take, the wait for other workers included.

    Raises:
        DeadlineExceeded, Unavailable: servers could not be reached in time.
    """

    def __init__(
        self,
        servers: Sequence[str],
        connect: Callable[[str], Transport],
        *,
        worker: int,
        num_workers: int,
        streams: int = 0,
        late: bool = False,
        silence_s: float = 0.0,
        pool: _core.Pool,
        timeout_s: float,
    ) -> None:
        self.worker, self.num_workers, self.num_streams = worker, num_workers, streams
        self.is_late = late
        self.timeout_s = timeout_s
        self._pool = pool
        self._servers = tuple(servers)
        self._pull = Channel(connect("pull"))
        self._push = Channel(connect("push"))
        self._control = Channel(connect("control"))
        self._aside = Channel(connect("aside"))
        self._dense: DenseParameters | None = None
        self._calls = itertools.count(1)
        self._tables: dict[str, TableSchema] = {}
        try:
            self._join(silence_s)
        except BaseException:
            self.close()
            raise

    def _join(self, silence_s: float) -> None:
        place = {"worker": self.worker, "num_workers": self.num_workers}
        shared = {"streams": self.num_streams, "silence_s": silence_s}
        known: dict[str, Any] = {"late": True} if self.is_late else {**place, **shared}
        token = uuid.uuid4().hex
        reply = self._coordinator(
            "coord.join", {"servers": list(self._servers), "token": token, **known}
        )
        self.worker, self.num_workers = int(reply.body["worker"]), int(reply.body["num_workers"])
        self.num_streams = int(reply.body["streams"])
        self.incarnation = int(reply.body["incarnation"])
        self.use_stream(self.worker, self.incarnation)
        self.script = Script.from_wire(reply.body["script"])
        self.job, states = str(reply.body["job"]), reply.body["states"]
        self._states = list(states) or [""] * len(self._servers)
        self._adopt(BucketMap.from_wire(reply.body["map"]))
        if not states:
            self._coordinator("coord.states", {"states": self._states, **self._me()})

    def use_stream(self, stream: int, incarnation: int) -> None:
        """Pushes are of this stream from now on, under this incarnation (or lease)."""
        self._stream, self._stream_incarnation = stream, incarnation

    # ---- tables and blocks ----

    def create_table(self, schema: TableSchema) -> None:
        """Make the table on all servers, or find it made. Raises SchemaMismatch for another
        schema.
        """
        if self._tables.get(schema.name) == schema:
            return
        self._everywhere("ps.create_table", {"schema": schema.to_wire()})
        self._tables[schema.name] = schema

    def create_blocks(
        self,
        optimizer: str,
        groups: list[GroupValues],
        dense: DenseParameters,
        owners: Callable[[int], list[int] | None] = lambda num_servers: None,
    ) -> None:
        """Make the blocks of these parameters with worker 0's weights, and take part in their
        updates.

        Every worker calls it; all return when the blocks exist. Where a predecessor has trained
        them they stay as they are.

        owners: number of servers -> the server of each block, or None: they are dealt in turn.
        """
        if self.script.is_behind:
            self._dense = dense
            self.script.next_meeting()
            return
        ids = [spec.id for spec in dense.specs]
        placed = {"blocks": ids, "owners": owners(len(self._servers))}
        reply = self._coordinator("coord.add_blocks", {**placed, **self._me()})
        self._adopt(BucketMap.from_wire(reply.body["map"]))
        self._dense = dense
        if self.worker == 0:
            for server, endpoint in enumerate(self._servers):
                block_ids = dense.blocks_of(self._map, server)
                body = {
                    "map": self._map.version,
                    "optimizer": optimizer,
                    "groups": groups,
                    "blocks": [spec.to_wire() for spec in dense.specs_of(block_ids)],
                }
                call = Call(endpoint, "ps.create_blocks", body, [dense.values(block_ids)])
                self._control.call_all([call], self.timeout_s)
        self.gather({}, [], purpose="create the dense parameters")

    # ---- pull and push ----

    def pull(
        self,
        keys: Mapping[str, Keys],
        *,
        blocks: bool = False,
        staged: int = 0,
        clipped: bool = False,
        pace: Pace | None = None,
        time: int = 0,
    ) -> Pulled:
        """Fetch the current weights of keys, and of all blocks if asked.

        Args:
            keys: per `Table.part` (K,) uint64, distinct, in bucket order (as `_core.unique` gives
                them).
            blocks: the dense weights too.
            staged: sync only: this stream has staged its pushes up to this step; the answer waits
                until the step has been applied everywhere.
            clipped: whether servers clip that step by its norm, which is found out first.
            pace: bounded only: the answer waits until no other stream is too far behind.
            time: data time in seconds that pulled shows and clicks are of; 0: of the row's last
                push.

        Raises:
            DeadlineExceeded, Unavailable: a server did not answer in time; calling again is safe.
            NotFinite: the gradient of the step is not; it has not been applied.
        """

        def attempt(left_s: float) -> Pulled:
            deadline = monotonic() + left_s
            bucket_map = self._map
            norm = self._norm_of(staged, left_s) if clipped and staged else None
            splits = {name: Split(keys_K, bucket_map, self._pool) for name, keys_K in keys.items()}
            parts = {name: splits[name].parts(keys_K) for name, keys_K in keys.items()}
            body = {
                "map": bucket_map.version,
                "stream": self._stream,
                "tables": [split_part(name)[0] for name in keys],
                "classes": [split_part(name)[1] for name in keys],
                "blocks": blocks,
                "staged": staged,
                "norm": norm,
                "pace": None if pace is None else pace.to_wire(),
                "time": time,
            }
            calls = [
                Call(endpoint, "ps.pull", body, [parts[name][server] for name in keys])
                for server, endpoint in enumerate(bucket_map.servers)
            ]
            replies = self._pull.call_all(calls, deadline - monotonic())
            rows = {
                name: splits[name].join([reply.arrays[table] for reply in replies])
                for table, name in enumerate(keys)
            }
            missing = {
                name: sum(int(reply.body["missing"][table]) for reply in replies)
                for table, name in enumerate(keys)
            }
            return Pulled(
                rows,
                self._pulled_blocks(replies, len(keys), bucket_map) if blocks else None,
                [int(reply.body["version"]) for reply in replies],
                missing,
                next(filter(None, (Stop.from_wire(of.body.get("stop")) for of in replies)), None),
            )

        return self._until_current("pull", attempt)

    def _norm_of(self, step: int, left_s: float) -> float | None:
        """The norm of a step's gradient over all servers; None: all have applied it."""
        body = {"map": self._map.version, "stream": self._stream, "staged": step}
        calls = [Call(endpoint, "ps.norm", body, []) for endpoint in self._map.servers]
        replies = self._pull.call_all(calls, left_s)
        return norm_of_step(step, [NormReply.from_wire(reply.body) for reply in replies])

    def _pulled_blocks(
        self, replies: list[Reply], num_tables: int, bucket_map: BucketMap
    ) -> list[tuple[list[str], Floats]]:
        """A server without blocks sends no array for them."""
        return [
            (bucket_map.blocks_of(server), reply.arrays[num_tables])
            for server, reply in enumerate(replies)
            if len(reply.arrays) > num_tables
        ]

    def push(
        self,
        step: Step,
        tables: Mapping[str, TableGradient],
        dense: DenseGradient | None = None,
        *,
        staged: bool = False,
        kind: str = "gradient",
    ) -> None:
        """Send one step's gradients to every server; returns when all have applied (or, in sync,
        staged) them.

        Args:
            kind: "delta": what stands for gradients are differences to add to the weights.

        Raises:
            Fenced: a successor of this worker has taken over.
            DeadlineExceeded, Unavailable: unknown whether it was applied; calling again with the
        same step is safe.
        """

        def attempt(left_s: float) -> None:
            bucket_map = self._map
            pieces = [self._split_table(name, part, bucket_map) for name, part in tables.items()]
            calls = []
            for server, endpoint in enumerate(bucket_map.servers):
                push = Push(
                    stream=self._stream,
                    sequence=step.sequence,
                    incarnation=self._stream_incarnation,
                    step=step.step,
                    staged=staged,
                    computed_at=step.versions[server] if server < len(step.versions) else 0,
                    examples=step.examples,
                    position=step.position,
                    time=step.time,
                    map_version=bucket_map.version,
                    export_version=0,
                    tables=[piece[server] for piece in pieces],
                    blocks=self._split_blocks(dense, bucket_map, server),
                    kind=kind,
                    clip=step.clip,
                    stops=step.stops,
                )
                body, arrays = push.to_wire()
                calls.append(Call(endpoint, "ps.push", body, arrays))
            self._push.call_all(calls, left_s)

        self._until_current("push", attempt)

    def _split_table(
        self, name: str, part: TableGradient, bucket_map: BucketMap
    ) -> list[TablePush]:
        split = Split(part.keys, bucket_map, self._pool)
        keys, gradients = split.parts(part.keys), split.parts(part.gradients)
        columns = {column: split.parts(values) for column, values in part.columns.items()}
        table, row_class = split_part(name)
        return [
            TablePush(
                table,
                keys[server],
                gradients[server],
                part.values,
                {column: parts[server] for column, parts in columns.items()},
                row_class,
            )
            for server in range(len(bucket_map.servers))
        ]

    def _split_blocks(
        self, dense: DenseGradient | None, bucket_map: BucketMap, server: int
    ) -> BlocksPush | None:
        if dense is None or self._dense is None:
            return None
        block_ids = self._dense.blocks_of(bucket_map, server)
        flat, absent = self._dense.flat_gradients(dense.gradients, block_ids)
        return BlocksPush(dense.groups, flat, absent)

    # ---- passes, meetings, end ----

    def stream_position(self) -> StreamPosition:
        """What every server has applied of this worker's stream; ask after joining and after
        loading.
        """
        return self.stream_positions([self._stream])[0]

    def stream_positions(self, streams: Sequence[int]) -> list[StreamPosition]:
        """What every server has applied of these streams."""
        applied = [
            {
                stream: StreamPosition(int(last), tuple(at))
                for stream, last, at in of.body["streams"]
            }
            for of in self._everywhere("ps.streams", {})
        ]
        return [
            min((at.get(s, StreamPosition()) for at in applied), key=lambda at: at.sequence)
            for s in streams
        ]

    def begin_pass(
        self, note: Sequence[int] = (), *, together: bool = True, staged: bool = True
    ) -> Entered:
        """Enter the next pass.

        Args:
            note: what a successor that enters it shall know.
            together: become a member of it, with all other workers; else nobody waits.
            staged: whether its pushes are (sync), or are applied on arrival (bounded).
        """
        number = self.script.number + 1
        if self.script.is_next_behind:
            self.script.number = number
            return Entered(is_over=True)
        body = {"pass": number, "together": together, "note": list(note), **self._me()}
        reply = self._coordinator("coord.begin_pass", body)
        self.script.number = number
        noted = reply.body["note"]
        entered = Entered(note=None if noted is None else tuple(noted))
        if not together:
            return entered
        group = reply.body["group"]
        self._everywhere("ps.group", {**group, "staged": staged})
        [(first, end)] = [member[1:] for member in group["members"] if member[0] == self._stream]
        return replace(entered, first_step=int(first), end=end)

    def coordinate(
        self, method: str, body: dict[str, Any], *, timeout_s: float | None = None
    ) -> dict[str, Any]:
        """Call a method of the coordinator as this worker; returns the reply's body."""
        reply = self._coordinator(method, {**body, **self._me()}, timeout_s=timeout_s)
        answered: dict[str, Any] = reply.body
        return answered

    def agree(self, fact: str, value: str) -> None:
        """Fix a fact of the job, or find it fixed. Raises SchemaMismatch if another worker said
        otherwise.
        """
        self._coordinator("coord.agree", {"fact": fact, "value": value, **self._me()})

    def leave(self, step: int, *, staged: bool = True) -> None:
        """Leave the pass: this stream contributes to the steps before `step` only."""
        reply = self._coordinator("coord.leave", {"step": step, **self._me()})
        self._everywhere("ps.group", {**reply.body["group"], "staged": staged})

    def gather(
        self,
        body: dict[str, Any],
        arrays: Sequence[Array],
        *,
        purpose: str = "barrier",
        timeout_s: float | None = None,
        patient: bool = False,
    ) -> list[tuple[dict[str, Any], list[Array]]]:
        """Meet all workers; returns what each of them brought, in the order of the workers.

        Args:
            timeout_s: how long to wait for the others; default the client's.
            patient: wait up to PATIENCE times as long while all workers are heard by their
                heartbeats: they may have more to do than this one.

        Raises:
            BadRequest: another worker came to this meeting for another purpose.
            DeadlineExceeded: workers did not come; the message says which.
            ResourceExhausted: a predecessor was there, and the answers are not kept any more.
        """
        place = {"pass": self.script.number, "name": self.script.next_meeting()}
        message = {**place, "purpose": purpose, "body": body, **self._me()}
        for patience in reversed(range(PATIENCE if patient else 1)):
            try:
                reply = self._coordinator("coord.gather", message, arrays, timeout_s=timeout_s)
                break
            except DeadlineExceeded as error:
                if patience == 0 or self.silent_workers():
                    raise
                log.warning("still waiting, all workers are alive: %s", error)
        rest = iter(reply.arrays)
        return [(of, [next(rest) for _ in range(count)]) for of, count in reply.body["bodies"]]

    def say_goodbye(self, body: dict[str, Any]) -> None:
        """This worker has come to the end of its script: a successor has nothing left to do.

        body: of `server.goodbye`.
        """
        end = self._coordinator("coord.end", {"run": self.script.run, **self._me()})
        body = {**body, "members": end.body.get("members")}
        goodbyes = [Call(server, "server.goodbye", body, []) for server in self._servers]
        self._control.call_all(goodbyes, self.timeout_s)

    def silent_workers(self) -> list[int]:
        """Those that server 0 has not heard for the client's timeout, or that have ended."""
        call = Call(self._servers[0], "server.attendance", {"within_s": float(self.timeout_s)}, [])
        silent: list[int] = self._control.call_all([call], self.timeout_s)[0].body["silent"]
        return silent

    def stats(self) -> list[dict[str, Any]]:
        """Each server's counts (`ServerState.stats`)."""
        return [reply.body for reply in self._everywhere("ps.stats", {})]

    def close(self) -> None:
        for channel in (self._pull, self._push, self._control, self._aside):
            channel.transport.close()

    # ---- calls ----

    def _me(self) -> dict[str, int]:
        """Who calls the coordinator, and its how manieth call this is: one thread makes them."""
        call = next(self._calls)
        return {"worker": self.worker, "incarnation": self.incarnation, "call": call}

    def _coordinator(
        self,
        method: str,
        body: dict[str, Any],
        arrays: Sequence[Array] = (),
        *,
        timeout_s: float | None = None,
    ) -> Reply:
        def attempt(left_s: float) -> Reply:
            call = Call(self._servers[0], method, body, list(arrays))
            return self._control.call_all([call], left_s)[0]

        return self._until_current(method, attempt, timeout_s)

    def call_all(self, calls: Sequence[Call], timeout_s: float) -> list[Reply]:
        """Make these calls, in parallel; replies in their order."""
        return self._control.call_all(calls, timeout_s)

    def everywhere(
        self,
        method: str,
        body: dict[str, Any],
        *,
        timeout_s: float | None = None,
        aside: bool = False,
    ) -> list[Reply]:
        """Call a method on every server, in parallel; replies in the order of the servers.

        Args:
            aside: over a connection of its own, because it takes long and other calls go on.
        """
        calls = [Call(endpoint, method, body, []) for endpoint in self._servers]
        channel = self._aside if aside else self._control
        return channel.call_all(calls, self.timeout_s if timeout_s is None else timeout_s)

    def ask_coordinator(self, method: str, body: dict[str, Any]) -> dict[str, Any]:
        """Call a method of the coordinator beside what other threads do; returns the reply's
        body.
        """
        call = Call(self._servers[0], method, body, [])
        answered: dict[str, Any] = self._aside.call_all([call], self.timeout_s)[0].body
        return answered

    def _everywhere(self, method: str, body: dict[str, Any]) -> list[Reply]:
        return self._until_current(
            method, lambda left_s: self.everywhere(method, body, timeout_s=left_s)
        )

    def _until_current(
        self, what: str, attempt: Callable[[float], T], timeout_s: float | None = None
    ) -> T:
        """Try until it succeeds or the deadline passes; refresh the map after WRONG_MAP, wait after
        NOT_READY.
        """
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        error: TriremeError | None = None
        while (left_s := deadline - time.monotonic()) > 0:
            try:
                return attempt(left_s)
            except WrongMap as wrong:
                error = wrong
                self._refresh_map()
            except NotReady as not_ready:
                error = not_ready
            time.sleep(min(RETRY_S, max(0.0, deadline - time.monotonic())))
        raise DeadlineExceeded(f"{what}: not possible within {timeout_s} s; last: {error}")

    def _refresh_map(self) -> None:
        call = Call(self._servers[0], "coord.map", {}, [])
        reply = self._control.call_all([call], self.timeout_s)[0]
        self._adopt(BucketMap.from_wire(reply.body["map"]))

    def _adopt(self, bucket_map: BucketMap) -> None:
        """Use this map and make sure that every server has it."""
        body = {"map": bucket_map.to_wire(), "job": self.job}
        calls = [
            Call(endpoint, "ps.map", {**body, "index": server, "state": self._states[server]}, [])
            for server, endpoint in enumerate(bucket_map.servers)
        ]
        replies = self._control.call_all(calls, self.timeout_s)
        self._states = [str(reply.body["state"]) for reply in replies]
        self._map = bucket_map
        self._servers = bucket_map.servers

    @property
    def map(self) -> BucketMap:
        return self._map
