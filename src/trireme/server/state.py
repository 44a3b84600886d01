"""What one server owns, and the operations that change it.

Invariants:
- A push is applied to a bucket or block at most once: each keeps the last sequence applied per
stream (its mark).
- A stream's pushes are applied in order, and all pushes in the order of their records. A change is
checked, then recorded in the journal, then made, so it does not fail halfway. Nothing else records
changes of tables, blocks and streams; `leases` record their own.

Threads: any. `lock` guards the parts, `blocks_lock` the blocks; tables lock by stripe inside the
core. `creating`, before all others, lets one table be made at a time. All requests need `lock`: who
holds it applies no push and reads no row, for rows on SSD wait for a disk.
"""

import logging
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from threading import Lock, RLock
from typing import Any, TypeVar

from trireme import _core
from trireme.dense.optimizers import GroupValues
from trireme.errors import BadRequest, NotReady, TriremeError, UnknownTable
from trireme.protocol.block_spec import BlockSpec
from trireme.protocol.membership import PassMembers
from trireme.protocol.pass_lease import PassLease
from trireme.protocol.routing import BucketMap, Floats, Keys
from trireme.protocol.wire import DIFFERENCE, Push, need, need_list, need_time
from trireme.rows.core_table import make_core_table
from trireme.rpc import HeldBytes, Request
from trireme.server.assignment import Assignment, lost
from trireme.server.block_slice import BlockSlice, Tensors
from trireme.server.block_store import BlockStore
from trireme.server.counts import Counts
from trireme.server.journal import Journal
from trireme.server.pacing import Pacing
from trireme.server.pass_leases import PassLeases
from trireme.server.prepared_import import PreparedImport
from trireme.server.prepared_load import CheckedLoad, PreparedLoad
from trireme.server.row_claims import NO_CLAIMS, Claims, RowClaims
from trireme.server.row_tier import RowTier
from trireme.server.served_tables import SavedAs, ServedTable, ServedTables
from trireme.server.server_limits import CapacityLimits, HasBytes
from trireme.server.staging import Staging
from trireme.server.step_gradient import StepGradient
from trireme.server.store_hosts import StoreHosts
from trireme.server.streams import Streams
from trireme.table import TableSchema

log = logging.getLogger("trireme.server")

_T = TypeVar("_T")
_SETTLED_KEYS = 256  # at a time: their rows must all find room


class ServerState:
    """Holds the parts of one server, and makes every change to them. The parts do not know the
    journal, but for the leases, which are given what records.

    A method that gets a request, or its body, records it as it arrived.

    journal: makes changes durable.
    store_hosts: hosts of stores that peers may name.
    tier: where the rows of tables lie; None: in memory.
    held: the budget of what peers make it hold.
    woken: answers that can be given since others have made a step; see `answer_woken`.
    state_id: random name of the contents; a server that started without them has another one.
    """

    def __init__(
        self,
        pool: _core.Pool,
        limits: CapacityLimits | None = None,
        store_hosts: StoreHosts = None,
        tier: RowTier | None = None,
    ) -> None:
        self.pool = pool
        self.limits = limits or CapacityLimits()
        self.store_hosts = store_hosts
        self.tier = tier
        self.held = HeldBytes(self.limits.held_bytes_max)
        self.journal = Journal()
        self.state_id = uuid.uuid4().hex
        self.assignment = Assignment()
        self.tables = ServedTables()
        self.blocks = BlockStore()
        self.streams = Streams()
        self.pacing = Pacing()
        self.counts = Counts()
        self.leases = PassLeases(lambda *record: self.journal.record(*record))
        self.prepared: PreparedImport | PreparedLoad | None = None
        self.checked_load = CheckedLoad(self.held)
        self.creating = Lock()
        self.lock = RLock()
        self.blocks_lock = Lock()
        self.staging = Staging(self._apply_step, self._square_sum, self.held, self.lock)
        self.woken: deque[Callable[[], None]] = deque()
        self.row_claims = RowClaims(self.table, self.with_room, pool)

    def table(self, name: Any) -> ServedTable:
        table = self.tables.get(name) if isinstance(name, str) else None
        if table is None:
            raise UnknownTable(
                f"server {self.assignment.index}: no table {name!r},"
                f" there are {sorted(self.tables)}"
            )
        return table

    # ---- map and members ----

    def adopt_map(
        self, job: str, bucket_map: BucketMap | None, index: int, request: Request
    ) -> None:
        """Adopt the bucket map of a request, if it has one that is newer than the current one.
        Raises SchemaMismatch: this server belongs to another job. Corruption: the worker knew
        another state.
        """
        with self.journal.changing(), self.lock:
            self.assignment.check_job(job, index, self.journal.where)
            if need(request.body, "state", str) not in ("", self.state_id):
                raise lost()
            if bucket_map is not None and self.assignment.is_newer(bucket_map):
                self.held.hold("map", bucket_map.num_bytes)
                self.journal.record(request.method, request.body, request.arrays)
                self.assignment.adopt(job, bucket_map, index)

    def adopt_members(self, members: PassMembers, request: Request) -> None:
        """Adopt the members of a pass if they are newer; apply the steps that waited for them."""
        with self.journal.changing():
            with self.lock:
                if not self.pacing.is_newer(members.version):
                    return
                self.journal.record(request.method, request.body)
                self.set_members(members)
            self.apply_steps()
        self.answer_woken()

    def set_members(self, members: PassMembers) -> None:
        """Adopt members without recording them, and apply no step."""
        self.pacing.set_members(members.version, members.members)
        if members.staged:
            self.staging.set_members(members.version, members.members)

    # ---- passes on a device ----

    def lease(self, lease: PassLease) -> None:
        """Refuse changes of rows and blocks until the end of this pass. A push that is being
        applied by another thread is found by the marks of its tables. Raises as `PassLeases.take`
        and `check_settled`.
        """
        with self.journal.changing(), self.lock:
            self.check_settled()
            self.leases.take(lease)

    def release(self, last: PassLease) -> None:
        """End the lease of a pass of this worker, `last` or one before."""
        with self.journal.changing(), self.lock:
            self.leases.release(last)

    def claim(self, lease: PassLease | None = None) -> None:
        """As `PassLeases.claim`. Within a guard of the journal."""
        with self.lock:
            self.leases.claim(lease)

    # ---- tables and blocks ----

    def make_rows(self, schema: TableSchema) -> _core.Table:
        """An empty table for this server, where the table's declaration wants its rows. Raises
        BadRequest; ResourceExhausted: it has no room.
        """
        if (declared := self.tables.get(schema.name)) is not None:
            schema = declared.schema
        if self.tier is not None:
            return self.tier.make_rows(schema)
        if schema.tier is not None:
            raise BadRequest(
                f"Table {schema.name!r}: ssd=True: expected a server with a folder for rows on SSD"
                " (--ssd_dir, TRIREME_SSD_DIR, tr.init(ssd_dir=)), found none"
            )
        return make_core_table(schema)

    def with_room(self, change: Callable[[], _T]) -> _T:
        """change(), as `RowTier.with_room`; at once, if all rows are in memory."""
        return change() if self.tier is None else self.tier.with_room(change)

    def create_table(self, schema: TableSchema) -> None:
        """Make the table unless it exists. Raises as `ServedTables.check_schema`.

        Tables share memory, so for a new one rows of others may have to leave it: what waits for a
        disk is done before anything that other requests need is locked.
        """
        with self.creating:
            with self.lock:
                self.tables.check_schema(schema)
                table = self.tables.get(schema.name)
                if table is None:
                    self.limits.check_new_table(len(self.tables), schema.admission)
                    self.check_rows(len(self.streams.applied_ids()))
            if table is not None:
                self._declare_tier(table, schema)
                return
            rows = self.make_rows(schema)
            with self.journal.changing(), self.lock:
                self.journal.record("ps.create_table", {"schema": schema.declaration()})
                self.tables.add(schema, rows, self.streams.applied_ids())

    def _declare_tier(self, table: ServedTable, schema: TableSchema) -> None:
        """Follow a declaration of a table that exists. Raises BadRequest: its rows are in memory.
        ResourceExhausted: the memory that it wants is not there. Requires: `creating`.
        """
        if schema.tier in (None, table.schema.tier):
            return
        if self.tier is None or table.rows.tier is None:
            raise BadRequest(
                f"Table {schema.name!r}: ssd=True: expected a new table, found one whose rows are"
                " in memory; take a checkpoint, and load it in a job that begins with ssd=True"
            )
        self.tier.declare(table.rows, schema)
        with self.journal.changing(), self.lock:
            self.journal.record("ps.create_table", {"schema": schema.declaration()})
            table.schema = schema

    def check_settled(self) -> None:
        """Raises NotReady while an import or load is prepared: other servers may have its rows
        already. Whoever is refused asks the coordinator, and brings the decision. In a recovery,
        one that was recorded in part, on a full disk, was never prepared.
        """
        if (prepared := self.prepared) is None or not prepared.is_whole:
            return
        what, id = prepared.what, prepared.id
        del prepared  # its rows would live as long as the error and its frames
        error = NotReady(
            f"server {self.assignment.index}: expected the decision about {what} {id}, which is"
            " prepared"
        )
        if not self.leases.is_live:  # else its worker lives, and brings it
            error.details = {what: id}
        raise error

    def prepare(
        self, prepared: PreparedImport | PreparedLoad, lease: PassLease | None = None
    ) -> None:
        """Record an import or load; no table changes yet. lease: of the pass that the import ends.
        Raises as `check_settled` and `claim`.
        """
        with self.journal.changing():
            self.check_settled()
            self.claim(lease)
            for record in prepared.records() if self.journal.keeps else ():
                self.journal.record(*record)
            self.prepared = prepared

    def finish(self, id: str, *, commit: bool) -> None:
        """Put the rows of a prepared import into the tables, or forget them. Of a load: its rows
        and blocks are durable, or nothing of it was changed. A repetition does nothing. Within
        `Journal.change_once`, or `changing_once`.
        """
        if (prepared := self.prepared) is None or prepared.id != id:
            return
        self.journal.record(prepared.end, {"id": id, "commit": commit})
        if commit and isinstance(prepared, PreparedImport):
            self._install(prepared)
        self.prepared = None
        if commit:  # no other was prepared while a pass had the rows
            self.leases.end()

    def replace_blocks(self, blocks: Mapping[str, Tensors]) -> None:
        """Replace tensors of blocks, which have been checked to fit, by those of the same name."""
        with self.blocks_lock:
            for block_id, tensors in blocks.items():
                state = self.blocks.state_with(block_id, tensors)
                part = BlockSlice(0, state, self.blocks.marks_of(block_id))
                self.blocks.restore(block_id, [part])

    def _install(self, prepared: PreparedImport) -> None:
        self.replace_blocks(prepared.blocks)
        for name in prepared.rows:
            table = self.table(name)
            with self.lock:
                self.streams.note_contents(are_loaded=False)
                if (rows := prepared.replacement(table)) is not None:
                    self.tables.replace_rows(name, rows, self.streams.applied_ids())
                    if prepared.replace:
                        # Which keys went is not known: a delta since then would lack them.
                        rows.forget_removed(rows.version)
            for change in prepared.changes(table, self.pool):
                self.with_room(change)

    def adopt_rows(self, schema: TableSchema, rows: _core.Table) -> None:
        """Replace the rows of a table, if it exists, by loaded ones, which have their own marks."""
        with self.creating, self.journal.changing(), self.lock:
            if schema.name not in self.tables:
                self.journal.record("ps.create_table", {"schema": schema.declaration()})
            self.tables.adopt_rows(schema, rows)

    def create_blocks(
        self,
        optimizer: str,
        groups: Sequence[GroupValues],
        specs: Sequence[BlockSpec],
        values: Floats,
        request: Request,
    ) -> None:
        """Make the blocks that do not exist yet."""
        with self.journal.changing(), self.lock, self.blocks_lock:
            self.assignment.map_of_version(need(request.body, "map", int))
            self.blocks.check(optimizer, groups, specs, values)
            self.limits.check_blocks(self.blocks, specs)
            self.journal.record(request.method, request.body, request.arrays)
            marks = dict(self.streams.applied_ids())
            self.blocks.create(optimizer, groups, specs, values, marks)

    # ---- pushes ----

    def push(self, push: Push, request: Request) -> int:
        """Stage or apply a push; returns how many pushes and steps have been applied here."""
        with self.journal.pushing(), self.journal.in_order():
            with self.lock:
                self.leases.check_push(push, self.streams)
            self.check_settled()
            self.checked_load.give_up()  # training goes on: its worker has gone
            claims = self._check_push(push)
            with self.lock:
                stream = self.streams[push.stream]
            with stream.lock:
                if not stream.last:
                    self.check_rows(len(self.tables))
                stream.admit(push)
                if push.staged:
                    with self.lock:
                        self.staging.admit(push)
                with self.lock:
                    self.leases.give_up()
                self.journal.record(request.method, request.body, request.arrays)
                self.stage_or_apply(push, claims)
        self.answer_woken()
        return self.streams.num_pushes

    def _check_push(self, push: Push) -> Claims:
        """Check everything that could fail, and take the room that rows need, so that applying the
        push cannot stop halfway.
        """
        bucket_map = self.assignment.map_of_version(push.map_version)
        self.check_rows()
        for part in push.tables:
            self.table(part.table).check_push(part)
        if push.blocks is not None:
            block_ids = bucket_map.blocks_of(self.assignment.index)
            expected = self.blocks.size_of(block_ids)
            if len(push.blocks.gradients) != expected:
                raise BadRequest(
                    f"push: the blocks of server {self.assignment.index} have {expected} elements,"
                    f" found {len(push.blocks.gradients)}"
                )
            self.blocks.check_finite(block_ids, push.blocks.gradients)
            with self.blocks_lock:
                self.blocks.check_groups(push.blocks.groups)
        return self.row_claims.claim(push)

    def check_rows(self, num_marks: int = 0, staged: Iterable[HasBytes] = ()) -> None:
        """Raises ResourceExhausted as `CapacityLimits.check_rows`. staged: rows of an import or
        load that are held beside those of the tables.
        """
        served = (table.rows for table in list(self.tables.values()))
        self.limits.check_rows(chain(served, staged), num_marks)

    def stage_or_apply(self, push: Push, claims: Claims = NO_CLAIMS) -> None:
        """Stage or apply a push that has been checked and recorded. claims: of its rows."""
        if push.staged:
            with self.lock:
                if self.staging.stage(push):
                    self.row_claims.keep(push, claims)
        else:
            self._apply([push], claims=claims)

    def apply_steps(self) -> None:
        """Apply complete steps of sync, within `Journal.pushing` or `changing`. Who waits gets the
        error of one that cannot be applied.
        """
        try:
            self.staging.apply_complete()
        except TriremeError as error:
            log.warning("sync: step %d cannot be applied: %s", self.staging.applied + 1, error)
        except Exception:
            log.exception("sync: step %d cannot be applied", self.staging.applied + 1)

    def answer_woken(self) -> None:
        """Answer the requests that waited, without a lock, by whoever may have woken some."""
        while True:
            try:
                answer = self.woken.popleft()
            except IndexError:
                return
            answer()

    def _apply_step(self, pushes: list[Push], norm: float | None) -> None:
        self.journal.record("log.step", {"step": pushes[0].step, "norm": norm})
        self._apply(pushes, norm, self.row_claims.of(pushes))

    def _apply(
        self, pushes: list[Push], norm: float | None = None, claims: Claims = NO_CLAIMS
    ) -> None:
        """Apply one push, or the pushes of one sync step as one update. What has some of them
        already, in a checkpoint saved between two pushes, gets the others.
        """
        if not any(push.tables or push.blocks for push in pushes):
            self.pass_over(pushes)  # with many servers, a worker's batch has keys of few
            return
        ahead = {push.stream for push in pushes if len(pushes) > 1 and self._is_ahead(push)}
        self._update(StepGradient(pushes, self.pool, norm), claims)
        if ahead:
            parts = [[push] for push in pushes if push.stream in ahead]
            if level := [push for push in pushes if push.stream not in ahead]:
                parts.insert(0, level)
            for part in parts:
                self._update(StepGradient(part, self.pool, norm, step=pushes), claims)
        self._record(pushes)

    def pass_over(self, pushes: list[Push]) -> None:
        """Count pushes as applied that change nothing, or cannot be applied."""
        ids = [push.id for push in pushes]
        for table in list(self.tables.values()):
            table.rows.advance(ids)
        with self.blocks_lock:
            self.blocks.advance(ids)
        self._record(pushes)

    def _record(self, pushes: list[Push]) -> None:
        with self.lock:
            self.row_claims.drop(pushes)
            for push in self.streams.record(pushes):
                self.counts.add_push(push)
                if self.tier is not None:
                    self.tier.note_push()
                if push.step and not push.staged:
                    self.pacing.record(push.stream, push.step)

    def _is_ahead(self, push: Push) -> bool:
        """Whether a bucket or block has a push that others lack. So it may be after a load; a step
        makes the marks of its streams equal.
        """
        stream = self.streams[push.stream]
        if not stream.is_level:
            newest = [int(t.rows.marks(push.stream).max()) for t in list(self.tables.values())]
            with self.blocks_lock:
                newest.append(self.blocks.newest_mark(push.stream))
            stream.is_level = max(newest) < push.sequence
        return not stream.is_level

    def _update(self, gradient: StepGradient, claims: Claims) -> None:
        """Update what has seen none of the pushes, and raise its marks."""
        names = gradient.table_names()
        for name in names:
            self._update_table(self.tables[name], gradient, claims.get(name, ()))
        for name, table in list(self.tables.items()):
            if name not in names:
                table.rows.advance(gradient.ids)
        self._update_blocks(gradient)

    def _update_table(
        self, table: ServedTable, gradient: StepGradient, claims: Sequence[_core.Claim]
    ) -> None:
        keys_K, gradients, columns = gradient.of_table(table.schema)
        update = partial(
            table.rows.update,
            keys_K,
            gradients,
            gradient.ids,
            gradient.rule_values(table.schema.name),
            self.pool,
            time=gradient.time,
            show_click=columns.get("show_click"),
            features=columns.get("feature"),
            counts=columns.get("count"),
            change="add" if gradient.kind == DIFFERENCE else "rule",
            claims=claims,
        )
        self.with_room(update)

    def _update_blocks(self, gradient: StepGradient) -> None:
        summed, ids = gradient.of_blocks(), gradient.ids
        with self.blocks_lock:
            if summed is None:
                self.blocks.advance(ids)
                return
            block_ids = self.assignment.owned_blocks()
            if gradient.kind == DIFFERENCE:
                self.blocks.add(block_ids, summed.gradients, ids)
            else:
                self.blocks.apply(summed.groups, block_ids, summed.gradients, ids, summed.absent)

    def _square_sum(self, pushes: list[Push]) -> int | None:
        gradient = StepGradient(pushes, self.pool)
        return gradient.square_sum([self.tables[name].schema for name in gradient.table_names()])

    def applied_streams(self) -> list[list[Any]]:
        """[stream, last sequence, position after it], which all buckets and blocks have applied."""
        with self.lock:
            return self.streams.applied()

    def finish_load(self, version: int, streams: Mapping[int, tuple[int, tuple[int, ...]]]) -> None:
        """The rows and blocks are now those of a checkpoint, which `version` follows. streams: as
        in `Streams.reset`.
        """
        with self.journal.changing():  # within `replacing`
            self._raise_version(version)
        with self.lock:
            self.row_claims.drop(self.staging.staged())
            self.staging.forget()
            self.streams.reset(streams)
            self.streams.note_contents(are_loaded=True)

    def begin_anew(self, body: dict[str, Any]) -> None:
        """Drop `tables` by name and, if asked, all `blocks`; streams start over. No push is on its
        way, and nobody is in a pass. Within `Journal.change_once`.
        """
        names, drops_blocks = need_list(body, "tables", str), need(body, "blocks", bool)
        self.check_settled()
        self.claim()
        with self.lock, self.blocks_lock:
            self.journal.record("ps.begin_anew", body)
            self.tables.drop(names)
            self.tables.forget_marks(list(self.streams))
            if drops_blocks:
                self.blocks = BlockStore()
            self.blocks.forget_marks()
            self.row_claims.drop(self.staging.staged())
            self.staging.forget()
            self.streams.reset({})
            self.streams.note_contents(are_loaded=False)

    # ---- versions and age ----

    def raise_version(self, version: int) -> None:
        """Stamp rows that change from now on with this version, or a later one. Waits for a
        snapshot that is being written: with rows of a later version than its beginning had, replay
        would stamp pushes before that later, and evict other rows.
        """
        with self.journal.changing_once():
            self._raise_version(version)

    def _raise_version(self, version: int) -> None:
        with self.lock:
            self.journal.record("log.version", {"version": version})
            self.tables.raise_version(version)

    def forget_removed(self, version: int) -> None:
        """Forget keys that were removed with a version up to this one: no delta needs them."""
        with self.journal.changing():
            self.journal.record("log.forget", {"version": version})
            self.tables.forget_removed(version)

    def settle(
        self, table: ServedTable, saved: SavedAs, part: str, keys: Keys, gained: Floats
    ) -> bool:
        """Subtract from rows the delta_score that a part of a checkpoint has exported. A repetition
        does nothing; after an error it does what was left. Returns False: not `Settled.allows`.
        Raises ResourceExhausted: the rows find no room in memory, or the log none on disk.
        """
        some = [slice(n, n + _SETTLED_KEYS) for n in range(0, len(keys), _SETTLED_KEYS)]
        return all(self.settle_some(table, saved, part, s.start, keys[s], gained[s]) for s in some)

    def settle_some(
        self, table: ServedTable, saved: SavedAs, part: str, first: int, keys: Keys, gained: Floats
    ) -> bool:
        """Settle those rows of a part, from number `first` on, that are not settled. Each is once,
        also if an error ends this and replay does them all. Returns and raises as `settle`.
        """
        (id, _), end, settled = saved, first + len(keys), self.tables.settled
        claims = self.row_claims.claim_keys(table, keys)  # refused before it is recorded
        with self.journal.changing_once(), settled.lock:
            if not settled.allows(*saved):
                return False
            if (done := max(settled.num_rows(id, part), first)) >= end:
                return True  # by an earlier call of the same job
            self.claim()
            body = {"table": table.schema.name, "id": id, "part": part, "first": first}
            self.journal.record("log.settle", body, [keys, gained])
            while done < end:
                done += table.rows.settle(keys[done - first :], gained[done - first :], claims)
                settled.note(id, part, done, self.tables.version)
        return True

    def shrink(self, body: dict[str, Any]) -> dict[str, dict[str, int]]:
        """Execute a checked `policy.shrink`; returns the numbers of rows removed. Within
        `Journal.change_once`.
        """
        time, day_over = need_time(body), need(body, "day_over", bool)
        self.claim()
        buckets = self.assignment.owned_buckets()[body["slice"] :: body["slices"]].tolist()
        # Refused before it is recorded: replay would remove rows that are still there.
        self.with_room(partial(self.tables.check_shrink, buckets))
        self.journal.record("policy.shrink", body)
        with self.lock:
            self.streams.note_contents(are_loaded=False)
        return self.tables.shrink(buckets, time, day_over=day_over)
