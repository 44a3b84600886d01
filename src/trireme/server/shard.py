"""What one server owns, and how requests read and change it.

Invariants:
- A push is applied to a bucket or block at most once: each keeps the last sequence applied per
stream (its mark).
- A stream's pushes are applied in order: sequence n + 1 is refused until n has been applied.
- Everything is decided (map version, incarnation, order, shapes) before anything changes.

Threads: any. `_lock` guards the control state; tables lock by stripe inside the core;
`_blocks_lock` guards blocks.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trireme import _core
from trireme.errors import (
    BadRequest,
    Fenced,
    NotReady,
    SchemaMismatch,
    TriremeError,
    UnknownTable,
    WrongMap,
)
from trireme.protocol.block_spec import BlockSpec
from trireme.protocol.clipping import norm_from_wire
from trireme.protocol.columns import check as check_columns
from trireme.protocol.core_table import ServedTable, make_core_table
from trireme.protocol.identity import another_job, lost
from trireme.protocol.membership import Group, Pace
from trireme.protocol.routing import BucketMap, Floats, Keys
from trireme.protocol.wire import (
    Array,
    Arrays,
    Push,
    need,
    need_list,
    need_time,
)
from trireme.rpc import Deferred, Reply, Request
from trireme.server.block_store import BlockStore
from trireme.server.counts import Counts
from trireme.server.journal import Journal
from trireme.server.limits import ShardLimits
from trireme.server.pacing import Paces
from trireme.server.staging import Staging
from trireme.server.step_gradient import Union
from trireme.table import TableSchema

log = logging.getLogger("trireme.server")

STALENESS_MAX = 1024

Handler = Callable[[Request], "Reply | Deferred | None"]


@dataclass
class StreamState:
    """What is known of one stream here. `lock` admits one push of the stream at a time."""

    last: int = 0
    incarnation: int = 0
    position: tuple[int, ...] = ()
    lock: threading.Lock = field(default_factory=threading.Lock)


class Shard:
    """limits: of what is kept. journal: what keeps the changes, see `Journal`. state: names what is
    in here: another server at the same address, or this one without what it had, has another.
    """

    def __init__(self, pool: _core.Pool, limits: ShardLimits | None = None) -> None:
        self.pool = pool
        self.limits = limits or ShardLimits()
        self.journal = Journal()
        self.state = uuid.uuid4().hex
        self.job = ""
        self.tables: dict[str, ServedTable] = {}
        self.blocks = BlockStore()
        self.streams: dict[int, StreamState] = {}
        self.staleness: Counter[int] = Counter()
        self.num_pushes = 0
        self.counts = Counts()
        self.version = 1
        self.pushes_at_load: int | None = None
        self.settled: tuple[str, list[str]] = ("", [])  # of the last checkpoint, which parts
        self.index = -1
        self._map: BucketMap | None = None
        self.staging = Staging(self._apply_step, self._square_sum)
        self.paces = Paces()
        self._lock = threading.RLock()
        self._blocks_lock = threading.Lock()

    def handlers(self) -> dict[str, Handler]:
        """Methods by their names on the wire."""
        return {
            "ps.map": self._on_map,
            "ps.group": self._on_group,
            "ps.create_table": self._on_create_table,
            "ps.create_blocks": self._on_create_blocks,
            "ps.pull": self._on_pull,
            "ps.norm": self._on_norm,
            "ps.push": self._on_push,
            "ps.streams": self._on_streams,
            "ps.stats": self._on_stats,
        }

    # ---- control ----

    def _on_map(self, request: Request) -> Reply | Deferred:
        """The reply names the state here; a worker that knew another one is told of the loss."""
        body = request.body
        bucket_map = BucketMap.from_wire(need(body, "map", dict))
        index, job = need(body, "index", int), need(body, "job", str)
        if not 0 <= index < len(bucket_map.servers):
            raise BadRequest(
                f"ps.map: expected an index below {len(bucket_map.servers)}, found {index}"
            )
        with self.journal.changing():
            if self._map is not None and (job, index) != (self.job, self.index):
                raise another_job((self.job, self.index), (job, index), self.journal.where)
            if need(body, "state", str) not in ("", self.state):
                raise lost()
            if self._map is None or bucket_map.version > self._map.version:
                self.journal.record("ps.map", body)
                self.job = job
                self.set_map(bucket_map, index)
        return self.journal.answered(Reply({"state": self.state}))

    def set_map(self, bucket_map: BucketMap, index: int) -> None:
        """Adopt a bucket map if it is newer than the one here."""
        with self._lock:
            if self._map is not None and bucket_map.version <= self._map.version:
                return
            self._map, self.index = bucket_map, index

    @property
    def is_in_a_job(self) -> bool:
        """Whether workers have brought a bucket map."""
        return self._map is not None

    def map(self) -> BucketMap:
        if self._map is None:
            raise NotReady("server: no bucket map yet; the coordinator's first worker brings it")
        return self._map

    def _check_map(self, version: int) -> BucketMap:
        if self._map is None:  # workers bring it before they ask for anything
            raise lost()
        bucket_map = self.map()
        if version != bucket_map.version:
            raise WrongMap(
                f"server {self.index}: the request was planned with bucket map {version},"
                f" this server has {bucket_map.version}"
            )
        return bucket_map

    def _on_group(self, request: Request) -> Reply | Deferred:
        group = Group.from_wire(request.body)
        with self.journal.changing(), self._lock:
            if self.paces.is_newer(group.version):
                self.journal.record("ps.group", request.body)
                self.paces.set_group(group.version, group.members)
                if group.staged:
                    self.staging.set_group(group.version, group.members)
        return self.journal.answered(Reply())

    def _on_create_table(self, request: Request) -> Reply | Deferred:
        self.create_table(TableSchema.from_wire(need(request.body, "schema", dict)))
        return self.journal.answered(Reply())

    def create_table(self, schema: TableSchema) -> None:
        """Make the table, or find it made.

        Raises:
            SchemaMismatch: the name exists with another schema; the message shows both.
        """
        with self.journal.changing(), self._lock:
            existing = self.tables.get(schema.name)
            if existing is not None:
                if existing.schema != schema:
                    raise SchemaMismatch(
                        f"table {schema.name!r}: it exists as {existing.schema.to_wire()},"
                        f" found {schema.to_wire()}"
                    )
                return
            self.limits.check_new_table(len(self.tables), schema.admission)
            rows = make_core_table(schema)
            self.journal.record("ps.create_table", {"schema": schema.to_wire()})
            rows.raise_version(self.version)
            if applied := self._applied_ids():
                rows.advance(applied)
            self.tables[schema.name] = ServedTable(schema, rows)

    def _applied_ids(self) -> list[tuple[int, int]]:
        return [(stream, state.last) for stream, state in self.streams.items() if state.last]

    def _on_create_blocks(self, request: Request) -> Reply | Deferred:
        specs = [BlockSpec.from_wire(spec) for spec in need(request.body, "blocks", list)]
        arrays = Arrays(request.arrays)
        values = arrays.take("values of blocks", np.float32, (None,))
        arrays.end()
        optimizer = need(request.body, "optimizer", str)
        groups = need_list(request.body, "groups", dict)
        with self.journal.changing(), self._lock, self._blocks_lock:
            self._check_map(need(request.body, "map", int))
            self.blocks.check(optimizer, groups, specs, values)
            self.limits.check_blocks(self.blocks, specs)
            self.journal.record("ps.create_blocks", request.body, request.arrays)
            self.blocks.create(optimizer, groups, specs, values, dict(self._applied_ids()))
        return self.journal.answered(Reply())

    # ---- pull ----

    def _on_pull(self, request: Request) -> Reply | Deferred:
        """Rows of keys, then the blocks of this server in the map's order, if asked for.

        In sync, `staged` says that the stream's pushes up to that step are staged everywhere; the
        answer waits until the step has been applied here; `norm` is that of the step's gradient,
        where it is clipped by that. In bounded, `pace` says for which step
        the rows are; the answer waits until no other stream is too far behind it.
        """
        body = request.body
        tables = [self.table(name) for name in need(body, "tables", list)]
        classes = need_list(body, "classes", int)
        if len(classes) != len(tables):
            raise BadRequest(f"pull: expected a class for {len(tables)} tables, found {classes}")
        arrays = Arrays(request.arrays)
        parts = [
            (table, row_class, arrays.take(f"keys of {table.schema.name}", np.uint64, (None,)))
            for table, row_class in zip(tables, classes, strict=True)
        ]
        arrays.end()
        with_blocks = need(body, "blocks", bool)
        time = need_time(body)
        bucket_map = self._check_map(need(body, "map", int))

        def answer() -> Reply:
            block_ids = bucket_map.blocks_of(self.index) if with_blocks else []
            return self._read(parts, block_ids, time)

        stream, staged = need(body, "stream", int), need(body, "staged", int)
        pace, norm = Pace.from_wire(body.get("pace")), norm_from_wire(body.get("norm"))
        if not staged and pace is None:
            return answer()
        deferred = Deferred(describe=lambda: self._describe_wait(stream, pace))

        def complete() -> None:
            self.journal.when_kept(lambda error: _complete(deferred, answer, error))

        with self.journal.pushing(), self._lock:
            if pace is None:
                self.staging.give_norm(staged, norm)
                self.staging.declare(stream, staged)
                may_have = self.staging.when_applied(staged, complete)
            else:
                may_have = self.paces.when_within(stream, pace, complete)
            if not may_have:
                return deferred
        return self.journal.answered(answer())

    def _on_norm(self, request: Request) -> Reply | Deferred:
        """This server's share of the norm of a step that is staged everywhere, as soon as all of
        the step is here.
        """
        stream, step = need(request.body, "stream", int), need(request.body, "staged", int)
        self._check_map(need(request.body, "map", int))
        deferred = Deferred(describe=lambda: self._describe_wait(stream, None))

        def answer() -> Reply:
            with self._lock:
                return Reply(self.staging.norm_of(step).to_wire())

        def complete() -> None:
            self.journal.when_kept(lambda error: _complete(deferred, answer, error))

        with self.journal.pushing(), self._lock:
            self.staging.declare(stream, step)
            if not self.staging.when_complete(stream, step, complete):
                return deferred
        return self.journal.answered(answer())

    def _describe_wait(self, stream: int, pace: Pace | None) -> str:
        with self._lock:
            if pace is None:
                return self.staging.waiting_for()
            return self.paces.waiting_for(stream, pace)

    def _read(
        self, parts: list[tuple[ServedTable, int, Array]], block_ids: list[str], time: int
    ) -> Reply:
        """Rows of keys (of a table, as one of its row classes), then blocks."""
        version = self.num_pushes
        arrays: list[Array] = []
        missing = []
        for table, row_class, keys_K in parts:
            dim = table.schema.dim_of(row_class)
            rows_KD = np.empty((len(keys_K), dim), dtype=np.float32)
            missing.append(table.rows.lookup(keys_K, rows_KD, self.pool, row_class))
            if table.schema.pulls_statistics:
                shows_K2 = np.empty((len(keys_K), 2))
                table.rows.statistics(keys_K, shows_K2, time, False, self.pool)
                rows_KD = np.hstack([shows_K2.astype(np.float32), rows_KD])
            arrays.append(rows_KD)
        if block_ids:
            with self._blocks_lock:
                arrays.append(self.blocks.read(block_ids))
        asked = zip(parts, missing, strict=True)
        self.counts.add_pull(
            (table.schema.name, len(keys), gone) for (table, _, keys), gone in asked
        )
        stop = self.staging.stop
        said = {"stop": None if stop is None else stop.to_wire()}
        return Reply({"version": version, "missing": missing, **said}, arrays)

    def table(self, name: Any) -> ServedTable:
        table = self.tables.get(name) if isinstance(name, str) else None
        if table is None:
            raise UnknownTable(
                f"server {self.index}: no table {name!r}, there are {sorted(self.tables)}"
            )
        return table

    # ---- push ----

    def _on_push(self, request: Request) -> Reply | Deferred:
        push = Push.from_wire(request.body, request.arrays)
        with self.journal.pushing():
            bucket_map = self._check_map(push.map_version)
            self._check_parts(push, bucket_map)
            stream = self.stream(push.stream)
            with stream.lock:
                self._check_order(push, stream)
                if push.staged:
                    with self._lock:
                        self.staging.check(push)
                self.journal.record("ps.push", request.body, request.arrays)
                self.take(push)
            version = self.num_pushes
        return self.journal.answered(Reply({"version": version}))

    def take(self, push: Push) -> None:
        """Stage or apply a push that has been checked."""
        if push.staged:
            with self._lock:
                self.staging.stage(push)
        else:
            self._apply([push])

    def _check_parts(self, push: Push, bucket_map: BucketMap) -> None:
        """Everything that could fail later is checked here, before anything changes."""
        self.limits.check_rows(table.rows for table in list(self.tables.values()))
        for part in push.tables:
            table = self.table(part.table)
            dim = table.schema.dim_of(part.row_class)
            if part.gradients.shape[1] != dim:
                raise BadRequest(
                    f"push: table {part.table!r} has dim {dim},"
                    f" found gradients of shape {part.gradients.shape}"
                )
            check_columns(part.table, table.schema.columns, part.columns)
        if push.blocks is not None:
            expected = self.blocks.size_of(bucket_map.blocks_of(self.index))
            if len(push.blocks.gradients) != expected:
                raise BadRequest(
                    f"push: the blocks of server {self.index} have {expected} elements,"
                    f" found {len(push.blocks.gradients)}"
                )
            self.blocks.check_groups(push.blocks.groups)

    def stream(self, stream: int) -> StreamState:
        """What is known of a stream, which may be new."""
        with self._lock:
            return self.streams.setdefault(stream, StreamState())

    def _check_order(self, push: Push, stream: StreamState) -> None:
        if push.incarnation < stream.incarnation:
            raise Fenced(
                f"stream {push.stream}: incarnation {stream.incarnation} has taken over,"
                f" found a push of incarnation {push.incarnation}"
            )
        stream.incarnation = push.incarnation
        if push.sequence > stream.last + 1:
            raise NotReady(
                f"stream {push.stream}: expected sequence {stream.last + 1} next,"
                f" found {push.sequence}; if what is between does not come, the server has lost"
                " the end of its log: load the newest checkpoint"
            )

    def _apply_step(self, pushes: list[Push], norm: float | None) -> None:
        self.journal.record("log.step", {"step": pushes[0].step, "norm": norm})
        self._apply(pushes, norm)

    def _apply(self, pushes: list[Push], norm: float | None = None) -> None:
        """Apply one push, or the pushes of one sync step as one update on their union."""
        union = Union(pushes, self.pool, norm)
        names = union.tables()
        for name in names:
            self._update_table(self.tables[name], union)
        for name, table in list(self.tables.items()):
            if name not in names:
                table.rows.advance(union.ids)
        self._update_blocks(union)
        self._record(pushes)

    def _update_table(self, table: ServedTable, union: Union) -> None:
        keys_K, gradients, columns = union.rows(table.schema)
        table.rows.update(
            keys_K,
            gradients,
            union.ids,
            _rule_values(union.values(table.schema.name)),
            self.pool,
            time=union.time,
            show_click=columns.get("show_click"),
            features=columns.get("feature"),
            counts=columns.get("count"),
            change="add" if union.kind == "delta" else "rule",
        )

    def _update_blocks(self, union: Union) -> None:
        found = union.blocks()
        with self._blocks_lock:
            if found is None:
                self.blocks.advance(union.ids)
                return
            block_ids = self.map().blocks_of(self.index)
            if union.kind == "delta":
                self.blocks.add(block_ids, found.gradients, union.ids)
            else:
                self.blocks.apply(found.groups, block_ids, found.gradients, union.ids, found.absent)

    def _square_sum(self, pushes: list[Push]) -> int | None:
        union = Union(pushes, self.pool)
        return union.square_sum([self.tables[name].schema for name in union.tables()])

    def _record(self, pushes: list[Push]) -> None:
        with self._lock:
            new = [push for push in pushes if push.sequence > self.streams[push.stream].last]
            for push in new:
                stream = self.streams[push.stream]
                stream.last = push.sequence
                stream.position = push.position
                self.counts.add_push(push)
                steps = self.num_pushes - push.computed_at
                self.staleness[min(max(steps, 0), STALENESS_MAX)] += 1
            self.num_pushes += bool(new)
            for push in new:
                if push.step and not push.staged:
                    self.paces.record(push.stream, push.step)

    # ---- reports ----

    def _on_streams(self, request: Request) -> Reply:
        """Last sequence and position of each stream, as far as everything here has seen it."""
        del request
        with self._lock:
            return Reply({"streams": self.applied_streams(), "applied_step": self.staging.applied})

    def _on_stats(self, request: Request) -> Reply:
        del request
        return Reply(self.stats())

    def sync_waits(self) -> dict[str, int]:
        """Sync: pushes that are staged and not applied, and pulls that wait for a step."""
        with self._lock:
            return self.staging.num_held()

    def stats(self) -> dict[str, Any]:
        """Counts since the start: rows and bytes per table, pushes, missing keys, and histograms:
        of how many pushes had been applied since the pull that a push was computed from, and of how
        many steps it was ahead of the slowest stream.
        """
        with self._lock:
            return {
                "tables": {
                    name: {"rows": table.rows.rows, "bytes": table.rows.bytes}
                    for name, table in self.tables.items()
                },
                "blocks": len(self.blocks),
                "block_bytes": self.blocks.num_bytes,
                "pushes": self.num_pushes,
                "missing": sum(self.counts.by_table()["missing"].values()),
                "staleness": _histogram(self.staleness),
                "ahead": _histogram(self.paces.ahead),
            }

    # ---- checkpoints ----

    def applied_streams(self) -> list[list[Any]]:
        """[stream, last sequence, position behind it] of each stream. Every bucket and block here
        has it, or more by the time that one looks.
        """
        with self._lock:
            return [
                [stream, state.last, list(state.position)]
                for stream, state in self.streams.items()
                if state.last
            ]

    def reset_streams(self, streams: Mapping[int, tuple[int, tuple[int, ...]]]) -> None:
        """After a load: each stream goes on behind this sequence and position, where it is not
        named from the beginning.
        """
        with self._lock:
            for stream in streams:
                self.streams.setdefault(stream, StreamState())
            for stream, state in self.streams.items():
                state.last, state.position = streams.get(stream, (0, ()))

    def replace_rows(self, name: str, rows: _core.Table) -> None:
        """Serve these rows from now on, in the place of the table's; no push may be on its way."""
        with self._lock:
            table = self.tables[name]
            if applied := self._applied_ids():
                rows.advance(applied)
            rows.raise_version(table.rows.version)
            # Which keys went with the old rows is not known: a delta since then would lack them.
            rows.forget_removed(table.rows.version)
            table.rows = rows
            self.pushes_at_load = None

    def adopt_rows(self, schema: TableSchema, rows: _core.Table) -> None:
        """Serve these rows, which bring their marks along, in the place of a table without rows."""
        self.create_table(schema)
        with self._lock:
            rows.raise_version(self.version)
            self.tables[schema.name].rows = rows

    def raise_version(self, version: int) -> None:
        """Rows that change from now on are stamped with this version, or a later one."""
        with self.journal.changing(), self._lock:
            self.journal.record("log.version", {"version": version})
            self.version = max(self.version, version)
            for table in self.tables.values():
                table.rows.raise_version(self.version)

    def forget_removed(self, version: int) -> None:
        """No delta asks any more for keys removed with a version up to this one."""
        with self.journal.changing():
            self.journal.record("log.forget", {"version": version})
            for table in list(self.tables.values()):
                table.rows.forget_removed(version)

    def settle(self, table: ServedTable, id: str, part: str, keys: Keys, gained: Floats) -> None:
        """Subtract, once, what rows of a part of checkpoint `id` had gained when it was written."""
        with self.journal.judging():
            of, parts = self.settled
            if of == id and part in parts:  # by a job that was begun before
                return
            body = {"table": table.schema.name, "id": id, "part": part}
            self.journal.record("log.settle", body, [keys, gained])
            table.rows.settle(keys, gained, self.pool)
            self.settled = (id, [*parts, part] if of == id else [part])

    def note_load(self) -> None:
        """What is here is what has just been loaded, until the next push."""
        with self._lock:
            self.pushes_at_load = self.num_pushes

    @property
    def is_as_loaded(self) -> bool:
        return self.pushes_at_load == self.num_pushes

    def blocks_locked(self) -> threading.Lock:
        return self._blocks_lock


def _histogram(counts: Counter[int]) -> dict[str, int]:
    return {str(steps): count for steps, count in sorted(counts.items())}


def _rule_values(values: Mapping[str, Any]) -> _core.RuleValues:
    return _core.RuleValues(**values)


def _complete(
    deferred: Deferred, answer: Callable[[], Reply], failure: Exception | None = None
) -> None:
    """Answer a request that has waited; its error is its own, not that of the push that woke it."""
    try:
        if failure is not None:
            raise failure
        deferred.reply(answer())
    except TriremeError as error:
        deferred.fail(error)
