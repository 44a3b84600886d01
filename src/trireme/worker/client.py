"""What a worker calls at the servers: it makes tables and blocks, pulls and pushes.

Exactly once: a push is named (stream, sequence). It is re-sent under the same name after a lost
answer or a change of the bucket map, and the servers' marks make the repetition harmless.

Threads: one may pull while another pushes, a third waits for a save, and one does the rest.
"""

import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

import numpy as np

from trireme import _core
from trireme.dense.optimizers import GroupValues
from trireme.errors import TriremeError
from trireme.protocol.block_messages import ids_to_wire, specs_to_wire
from trireme.protocol.clipping import NormReply, norm_of_step
from trireme.protocol.compute_addresses import addresses_from_wire, addresses_to_wire
from trireme.protocol.membership import Pace
from trireme.protocol.pass_lease import PassLease
from trireme.protocol.routing import BucketMap
from trireme.protocol.wire import GRADIENT, Push
from trireme.rpc import Call
from trireme.table import RowClassId, TableSchema
from trireme.worker.coordinator_calls import CoordinatorCalls
from trireme.worker.dense_parameters import DenseParameters
from trireme.worker.gradients import DenseGradient, KeysByClass, PushHeader, TableGradient
from trireme.worker.pull import FollowingPull, Pulled, PullPlan
from trireme.worker.push import split_blocks, split_tables
from trireme.worker.script import Script
from trireme.worker.servers import Servers
from trireme.worker.transport import LockedTransport, Transport

log = logging.getLogger("trireme.worker")


@dataclass(frozen=True)
class StreamPosition:
    """What every server has applied of a stream: the next push is `sequence + 1`."""

    sequence: int = 0
    position: tuple[int, ...] = ()


class WorkerClient:
    """One worker's connection to the servers.

    Args:
        endpoints: of the servers; the first hosts the coordinator.
        connect: makes a transport for one thread's calls, given a name for it.
        worker: index of this worker; it is also its stream, unless streams are leased.
        num_workers: workers that the job begins with.
        streams: leased streams of each pass; 0: each worker has a stream of its own.
        late: join a running job with leased streams, which determines the index of this worker and
            the numbers of workers and streams, and the compute workers.
        heter: (label, address) of each compute worker of the job.
        silence_s: other workers take the streams of one that is silent for so long.
        pool: threads for the core's batch work.
        timeout_s: seconds that any call may take, the wait for other workers included.
        states: as for Servers; this fills it.

    Attributes:
        servers: makes the calls. coordinator: makes those to the coordinator.
        script: where the worker is in its script. stream: whose pushes it sends.
        incarnation: number of processes that have been this worker.

    Raises:
        DeadlineExceeded, Unavailable: servers could not be reached in time.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        connect: Callable[[str], Transport],
        *,
        worker: int,
        num_workers: int,
        streams: int = 0,
        late: bool = False,
        heter: Sequence[tuple[str, str]] = (),
        silence_s: float = 0.0,
        pool: _core.Pool,
        timeout_s: float,
        states: dict[str, str] | None = None,
    ) -> None:
        self.worker, self.num_workers, self.num_streams = worker, num_workers, streams
        self.is_late, self.timeout_s = late, timeout_s
        self.heter = tuple(heter)
        self.servers = Servers(endpoints, connect, timeout_s, {} if states is None else states)
        self._pool = pool
        self._dense: DenseParameters | None = None
        self._tables: dict[str, TableSchema] = {}
        self._tiered: set[str] = set()  # tables with rows on SSD, of which servers want to know
        try:
            self._join(silence_s)
        except BaseException:
            self.close()
            raise

    def _join(self, silence_s: float) -> None:
        body: dict[str, Any] = {"servers": list(self.servers.endpoints), "token": uuid.uuid4().hex}
        if self.is_late:
            body["late"] = True
        else:
            body |= {"worker": self.worker, "num_workers": self.num_workers}
            body |= {"streams": self.num_streams, "silence_s": silence_s}
            body["compute_workers"] = addresses_to_wire(self.heter)
        answer = self.servers.coordinator("coord.join", body)
        joined = answer.body
        self.worker, self.num_workers = int(joined["worker"]), int(joined["num_workers"])
        self.num_streams, self.incarnation = int(joined["streams"]), int(joined["incarnation"])
        if self.is_late:
            self.heter = addresses_from_wire(joined)
        self.use_stream(self.worker, self.incarnation)
        self.script = Script.from_wire(joined["script"])
        self.coordinator = CoordinatorCalls(
            self.servers, self.script, self.worker, self.incarnation
        )
        self.servers.job, states = str(joined["job"]), list(joined["states"])
        endpoints = self.servers.endpoints
        self.servers.states.update(zip(endpoints, states, strict=False))  # none in a new job
        self.servers.adopt(answer)
        if not states:
            reported = [self.servers.states[endpoint] for endpoint in endpoints]
            self.coordinator.call("coord.states", {"states": reported})
        if self.incarnation > 1:  # a pass on a device of a process before will not end
            self.release(PassLease(self.worker, self.incarnation, 0))

    @property
    def is_only_worker(self) -> bool:
        """Whether the job has no other worker, and none can join it."""
        return self.num_workers == 1 and not self.num_streams

    def release(self, last: PassLease) -> None:
        """Let others change what a pass on a device of this worker has had, `last` or an earlier
        one.
        """
        self.servers.everywhere_current("ps.release", last.to_wire())

    def use_stream(self, stream: int, incarnation: int) -> None:
        """Send pushes as this stream from now on, under this incarnation or lease."""
        self.stream, self._stream_incarnation = stream, incarnation

    def close(self) -> None:
        self.servers.close()

    # ---- tables and blocks ----

    def create_table(self, schema: TableSchema) -> None:
        """Make sure that all servers have the table. Raises SchemaMismatch for another schema."""
        if self._tables.get(schema.name) == schema:
            return
        body = {"schema": schema.declaration()}
        replies = self.servers.everywhere_current("ps.create_table", body)
        if any(reply.body.get("tier", False) for reply in replies):
            self._tiered.add(schema.name)
        self._tables[schema.name] = schema

    def create_blocks(
        self,
        optimizer: str,
        groups: list[GroupValues],
        dense: DenseParameters,
        owners: Callable[[int], list[int] | None] = lambda num_servers: None,
    ) -> None:
        """Make the blocks of these parameters with worker 0's weights, and take part in their
        updates. Every worker calls it; all return when the blocks exist. Blocks that a predecessor
        has trained stay.

        owners: number of servers -> the server of each block, or None: they are dealt in turn.
        """
        self._dense = dense
        if self.script.is_behind:
            self.script.next_meeting()
            return
        servers = self.servers
        arrays = ids_to_wire([spec.id for spec in dense.specs])
        if (placed := owners(len(servers.endpoints))) is not None:
            arrays.append(np.array(placed, np.uint16))
        are_placed = {"are_placed": placed is not None}
        servers.adopt(self.coordinator.call("coord.add_blocks", are_placed, arrays))
        if self.worker == 0:
            for server, endpoint in enumerate(servers.endpoints):
                block_ids = dense.blocks_of(servers.map, server)
                shapes, specs = specs_to_wire(dense.specs_of(block_ids))
                body = {
                    "map": servers.map.version,
                    "optimizer": optimizer,
                    "groups": groups,
                    "shapes": shapes,
                }
                call = Call(endpoint, "ps.create_blocks", body, [*specs, dense.values(block_ids)])
                servers.call_all([call], self.timeout_s)
        self.coordinator.gather({}, [], purpose="create the dense parameters")

    def begin_anew(self, tables: Sequence[str], *, blocks: bool) -> None:
        """Drop tables with their rows, and if asked all dense parameters; streams start over, and
        the options of the job are open. One worker calls it while none is in a pass; then every
        worker calls `forget_tables`.
        """
        body = {"tables": list(tables), "blocks": blocks}
        begins = {"blocks": blocks, "rows": bool(tables)}
        self.servers.adopt(self.coordinator.call("coord.begin_anew", begins))
        self.servers.everywhere_current("ps.begin_anew", body)

    def forget_tables(self, tables: Sequence[str]) -> None:
        """Expect that the servers do not have these tables."""
        for name in tables:
            self._tables.pop(name, None)
            self._tiered.discard(name)

    # ---- pull and push ----

    def pull(
        self,
        keys: KeysByClass,
        *,
        via: LockedTransport | None = None,
        blocks: bool = False,
        staged: int = 0,
        clipped: bool = False,
        pace: Pace | None = None,
        time: int = 0,
    ) -> Pulled:
        """Fetch the current weights of keys, and of all blocks if asked.

        Args:
            keys: `Table.class_id` -> (K,) uint64, distinct, in bucket order, as `_core.unique`
                returns them.
            via: the way to the servers; default an own one of pulls.
            blocks: the dense weights too.
            staged: sync only: the answer waits until this step, of which this stream has staged its
                push, has been applied everywhere.
            clipped: servers clip that step by its norm, which is computed first.
            pace: bounded only: the answer waits until no other stream is too far behind.
            time: data time in seconds for pulled shows and clicks; 0: of the row's last push.

        Raises:
            DeadlineExceeded, Unavailable: a server did not answer in time; calling again is safe.
            NotFinite: the gradient of the step is not; it has not been applied.
        """
        via = via or self.servers.pulls

        def attempt(left_s: float) -> Pulled:
            deadline = monotonic() + left_s
            bucket_map = self.servers.map
            norm = self._norm_of(staged, left_s, via) if clipped and staged else None
            plan = PullPlan(keys, bucket_map, self._pool)
            body = self._pull_body(plan, bucket_map, blocks=blocks, time=time)
            body |= {"staged": staged, "norm": norm}
            body["pace"] = None if pace is None else pace.to_wire()
            replies = via.call_all(plan.calls(body), deadline - monotonic())
            return plan.join(replies, blocks=blocks)

        return self.servers.until_current("pull", attempt)

    @property
    def has_tiers(self) -> bool:
        """Whether any table may have rows on SSD."""
        return bool(self._tiered)

    def announce(self, keys: KeysByClass) -> None:
        """Tell the servers which keys a pull will ask for soon, so that they fetch rows from SSD
        meanwhile. Tables in memory need none. Whatever happens to it, the pull gets its rows.
        """
        tiered = {c: keys_K for c, keys_K in keys.items() if c.table in self._tiered}
        if not tiered:
            return
        plan = PullPlan(tiered, self.servers.map, self._pool)
        try:
            self.servers.announce(plan.calls(plan.tables(), "ps.announce"))
        except TriremeError as error:
            log.info("rows were not announced to the servers: %s", error)

    def _norm_of(self, step: int, left_s: float, via: LockedTransport) -> float | None:
        """The norm of a step's gradient over all servers; None: all have applied it."""
        bucket_map = self.servers.map
        body = {"map": bucket_map.version, "stream": self.stream, "staged": step}
        calls = [Call(endpoint, "ps.norm", body, []) for endpoint in bucket_map.servers]
        replies = via.call_all(calls, left_s)
        return norm_of_step(step, [NormReply.from_wire(reply.body) for reply in replies])

    def push(
        self,
        header: PushHeader,
        tables: Mapping[RowClassId, TableGradient],
        dense: DenseGradient | None = None,
        *,
        via: LockedTransport | None = None,
        staged: bool = False,
        kind: str = GRADIENT,
        following: FollowingPull | None = None,
    ) -> None:
        """Send one step's gradients to every server; returns when all have applied (or, in sync,
        staged) them. via: the way to the servers; default an own one of pushes. kind: DIFFERENCE:
        values to add to the weights stand in place of gradients. following: gets the answer of a
        pull that is made together with the push.

        Raises:
            Fenced: a successor of this worker has taken over. DeadlineExceeded, Unavailable:
                unknown whether it was applied; calling again with the same header is safe.
        """
        via = via or self.servers.pushes

        def attempt(left_s: float) -> None:
            bucket_map = self.servers.map
            table_pushes = split_tables(tables, bucket_map, self._pool)
            blocks_pushes = split_blocks(dense, self._dense, bucket_map)
            calls = []
            for server, endpoint in enumerate(bucket_map.servers):
                push = Push(
                    stream=self.stream,
                    sequence=header.sequence,
                    incarnation=self._stream_incarnation,
                    step=header.step,
                    staged=staged,
                    computed_at=header.push_counts[server] if header.push_counts else 0,
                    examples=header.examples,
                    position=header.position,
                    time=header.time,
                    map_version=bucket_map.version,
                    tables=table_pushes[server],
                    blocks=blocks_pushes[server],
                    kind=kind,
                    clip=header.clip,
                    stops=header.stops,
                )
                body, arrays = push.to_wire()
                calls.append(Call(endpoint, "ps.push", body, arrays))
            if following is None:
                via.call_all(calls, left_s)
                return
            # A server handles the requests of a connection in their order. The pull of a staged
            # push has to wait for all servers: only `via` of mode collective sees to that.
            plan = PullPlan(following.keys, bucket_map, self._pool)
            body = self._pull_body(plan, bucket_map, blocks=following.blocks, time=following.time)
            body |= {"staged": header.step if staged else 0, "after": header.sequence}
            replies = via.call_all([*calls, *plan.calls(body)], left_s)[len(calls) :]
            if refusals := [reason for r in replies if (reason := r.body.get("refused"))]:
                log.debug("a pull behind push %d is made later: %s", header.sequence, refusals[0])
            else:
                following.pulled = plan.join(replies, blocks=following.blocks)

        self.servers.until_current("push", attempt)

    def _pull_body(
        self, plan: PullPlan, bucket_map: BucketMap, *, blocks: bool, time: int
    ) -> dict[str, Any]:
        """What every pull tells a server."""
        head = {"map": bucket_map.version, "stream": self.stream, **plan.tables()}
        return {**head, "blocks": blocks, "time": time}

    def stream_position(self) -> StreamPosition:
        """What every server has applied of this worker's stream; ask after joining or loading."""
        return self.stream_positions([self.stream])[0]

    def stream_positions(self, streams: Sequence[int]) -> list[StreamPosition]:
        """What every server has applied of these streams."""
        applied = [
            {
                stream: StreamPosition(int(last), tuple(position))
                for stream, last, position in reply.body["streams"]
            }
            for reply in self.servers.everywhere_current("ps.streams", {})
        ]
        return [
            min((at.get(s, StreamPosition()) for at in applied), key=lambda at: at.sequence)
            for s in streams
        ]

    def stats(self) -> list[dict[str, Any]]:
        """Each server's counts (`ServerState.stats`)."""
        return [reply.body for reply in self.servers.everywhere_current("ps.stats", {})]
