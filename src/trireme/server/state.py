"""What one server owns: tables, blocks, streams, the bucket map; and the operations that change it.

Invariants:
- A push is applied to a bucket or block at most once: each keeps the last sequence applied per
stream (its mark).
- A stream's pushes are applied in order. Requests are checked before they come here
(`server/requests.py`), so an operation does not fail halfway.

Threads: any. `lock` guards the control state, `blocks_lock` the blocks; tables lock by stripe
inside the core.
"""

import threading
import uuid
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from trireme import _core
from trireme.errors import NotReady, SchemaMismatch, UnknownTable, WrongMap
from trireme.protocol.core_table import make_core_table
from trireme.protocol.identity import lost
from trireme.protocol.membership import Group
from trireme.protocol.routing import BucketMap, Floats, Keys
from trireme.protocol.server_limits import CapacityLimits
from trireme.protocol.wire import Array, Push
from trireme.server.block_store import BlockStore
from trireme.server.counts import Counts
from trireme.server.journal import Journal
from trireme.server.pacing import Pacing
from trireme.server.staging import Staging
from trireme.server.step_gradient import StepGradient
from trireme.table import TableSchema

STALENESS_MAX = 1024


@dataclass
class ServedTable:
    schema: TableSchema
    rows: _core.Table


@dataclass
class StreamState:
    """The last push of a stream that was applied: its sequence number, and the position of the
    stream in the data after it. `lock` admits one push of the stream at a time.
    """

    last: int = 0
    incarnation: int = 0
    position: tuple[int, ...] = ()
    lock: threading.Lock = field(default_factory=threading.Lock)


class ServerState:
    """Everything that one server owns.

    journal: makes changes durable.
    state_id: random name of the contents; a server that started without them has another one.
    num_pushes: pushes and steps applied since the start.
    pushes_at_load: `num_pushes` at the last load; None: there was none, or rows were imported.
    settled: the id of the last checkpoint that was settled, and which parts of it.
    """

    def __init__(self, pool: _core.Pool, limits: CapacityLimits | None = None) -> None:
        self.pool = pool
        self.limits = limits or CapacityLimits()
        self.journal = Journal()
        self.state_id = uuid.uuid4().hex
        self.job = ""
        self.index = -1
        self.tables: dict[str, ServedTable] = {}
        self.blocks = BlockStore()
        self.streams: dict[int, StreamState] = {}
        self.staleness: Counter[int] = Counter()
        self.num_pushes = 0
        self.counts = Counts()
        self.version = 1
        self.pushes_at_load: int | None = None
        self.settled: tuple[str, list[str]] = ("", [])
        self.staging = Staging(self._apply_step, self._square_sum)
        self.pacing = Pacing()
        self.lock = threading.RLock()
        self.blocks_lock = threading.Lock()
        self._map: BucketMap | None = None

    # ---- map and group ----

    @property
    def is_in_a_job(self) -> bool:
        """Whether workers have sent a bucket map."""
        return self._map is not None

    def map(self) -> BucketMap:
        if self._map is None:
            raise NotReady("server: no bucket map yet; the coordinator's first worker brings it")
        return self._map

    def owned_buckets(self) -> npt.NDArray[np.int64]:
        """Buckets of this server, ascending."""
        return self.map().owned_by(self.index)

    def set_map(self, bucket_map: BucketMap, index: int) -> None:
        """Adopt a bucket map if it is newer than the current one."""
        with self.lock:
            if self._map is None or bucket_map.version > self._map.version:
                self._map, self.index = bucket_map, index

    def map_of_version(self, version: int) -> BucketMap:
        """The current map, if a request was planned with it. Raises WrongMap: it was planned with
        another one. Corruption: this server has none, so it has lost its state: workers send a map
        before any other request.
        """
        if self._map is None:
            raise lost()
        if version != self._map.version:
            raise WrongMap(
                f"server {self.index}: the request was planned with bucket map {version},"
                f" this server has {self._map.version}"
            )
        return self._map

    def set_group(self, group: Group, *, advance: bool) -> None:
        """Adopt a group that is newer than the current one. `advance`: as in `Staging`."""
        self.pacing.set_group(group.version, group.members)
        if group.staged:
            self.staging.set_group(group.version, group.members, advance=advance)

    # ---- tables ----

    def table(self, name: Any) -> ServedTable:
        table = self.tables.get(name) if isinstance(name, str) else None
        if table is None:
            raise UnknownTable(
                f"server {self.index}: no table {name!r}, there are {sorted(self.tables)}"
            )
        return table

    def check_schema(self, schema: TableSchema) -> None:
        """Raises SchemaMismatch if the table exists with another schema; shows both."""
        existing = self.tables.get(schema.name)
        if existing is not None and existing.schema != schema:
            raise SchemaMismatch(
                f"table {schema.name!r}: it exists as {existing.schema.to_wire()},"
                f" found {schema.to_wire()}"
            )

    def create_table(self, schema: TableSchema) -> None:
        """Make the table unless it exists. Raises as `check_schema`."""
        with self.journal.changing(), self.lock:
            self.check_schema(schema)
            if schema.name in self.tables:
                return
            self.limits.check_new_table(len(self.tables), schema.admission)
            rows = make_core_table(schema)
            self.journal.record("ps.create_table", {"schema": schema.to_wire()})
            rows.raise_version(self.version)
            self._advance_to_streams(rows)
            self.tables[schema.name] = ServedTable(schema, rows)

    def read_rows(
        self, table: ServedTable, row_class: int, keys_K: Keys, time: int
    ) -> tuple[Floats, int]:
        """(K, W) rows of keys as a pull answers them, and how many keys have no row."""
        rows_KD = np.empty((len(keys_K), table.schema.dim_of(row_class)), dtype=np.float32)
        num_missing = table.rows.lookup(keys_K, rows_KD, self.pool, row_class)
        if table.schema.pulls_statistics:
            shows_K2 = np.empty((len(keys_K), 2))
            table.rows.statistics(keys_K, shows_K2, time, False, self.pool)
            return np.hstack([shows_K2.astype(np.float32), rows_KD]), num_missing
        return rows_KD, num_missing

    def replace_rows(self, name: str, rows: _core.Table) -> None:
        """Replace the rows of a table by imported ones. No push may be running."""
        with self.lock:
            table = self.tables[name]
            self._advance_to_streams(rows)
            rows.raise_version(table.rows.version)
            # Which keys went with the old rows is not known: a delta since then would lack them.
            rows.forget_removed(table.rows.version)
            table.rows = rows
            self.pushes_at_load = None

    def adopt_rows(self, schema: TableSchema, rows: _core.Table) -> None:
        """Replace the rows of a table without rows by loaded ones, which have their own marks."""
        self.create_table(schema)
        with self.lock:
            rows.raise_version(self.version)
            self.tables[schema.name].rows = rows

    # ---- pushes ----

    def stage_or_apply(self, push: Push) -> None:
        """Stage or apply a push that has been checked."""
        if push.staged:
            with self.lock:
                self.staging.stage(push)
        else:
            self._apply([push])

    def _apply_step(self, pushes: list[Push], norm: float | None) -> None:
        self.journal.record("log.step", {"step": pushes[0].step, "norm": norm})
        self._apply(pushes, norm)

    def _apply(self, pushes: list[Push], norm: float | None = None) -> None:
        """Apply one push, or the pushes of one sync step as one update."""
        gradient = StepGradient(pushes, self.pool, norm)
        names = gradient.table_names()
        for name in names:
            self._update_table(self.tables[name], gradient)
        for name, table in list(self.tables.items()):
            if name not in names:
                table.rows.advance(gradient.ids)
        self._update_blocks(gradient)
        self._count_pushes(pushes)

    def _update_table(self, table: ServedTable, gradient: StepGradient) -> None:
        keys_K, gradients, columns = gradient.of_table(table.schema)
        table.rows.update(
            keys_K,
            gradients,
            gradient.ids,
            gradient.rule_values(table.schema.name),
            self.pool,
            time=gradient.time,
            show_click=columns.get("show_click"),
            features=columns.get("feature"),
            counts=columns.get("count"),
            change="add" if gradient.kind == "delta" else "rule",
        )

    def _update_blocks(self, gradient: StepGradient) -> None:
        summed, ids = gradient.of_blocks(), gradient.ids
        with self.blocks_lock:
            if summed is None:
                self.blocks.advance(ids)
                return
            block_ids = self.map().blocks_of(self.index)
            if gradient.kind == "delta":
                self.blocks.add(block_ids, summed.gradients, ids)
            else:
                self.blocks.apply(summed.groups, block_ids, summed.gradients, ids, summed.absent)

    def _square_sum(self, pushes: list[Push]) -> int | None:
        gradient = StepGradient(pushes, self.pool)
        return gradient.square_sum([self.tables[name].schema for name in gradient.table_names()])

    def _count_pushes(self, pushes: list[Push]) -> None:
        with self.lock:
            new = [push for push in pushes if push.sequence > self.streams[push.stream].last]
            for push in new:
                stream = self.streams[push.stream]
                stream.last, stream.position = push.sequence, push.position
                self.counts.add_push(push)
                staleness = self.num_pushes - push.computed_at
                self.staleness[min(max(staleness, 0), STALENESS_MAX)] += 1
            self.num_pushes += bool(new)
            for push in new:
                if push.step and not push.staged:
                    self.pacing.record(push.stream, push.step)

    # ---- streams ----

    def stream(self, number: int) -> StreamState:
        with self.lock:
            return self.streams.setdefault(number, StreamState())

    def applied_ids(self) -> list[tuple[int, int]]:
        """(stream, sequence) of the last push applied of each stream."""
        return [(number, stream.last) for number, stream in self.streams.items() if stream.last]

    def _advance_to_streams(self, rows: _core.Table) -> None:
        """Mark new rows as having seen all pushes that were applied before they existed."""
        if ids := self.applied_ids():
            rows.advance(ids)

    def applied_streams(self) -> list[list[Any]]:
        """[stream, last sequence, position after it], which all buckets and blocks have applied."""
        with self.lock:
            ids = self.applied_ids()
            return [[number, last, list(self.streams[number].position)] for number, last in ids]

    def reset_streams(self, streams: Mapping[int, tuple[int, tuple[int, ...]]]) -> None:
        """After a load: set the last sequence and the position of each stream; streams that are not
        named start at the beginning.
        """
        with self.lock:
            for number in {**streams, **self.streams}:
                stream = self.stream(number)
                stream.last, stream.position = streams.get(number, (0, ()))

    # ---- versions ----

    def raise_version(self, version: int) -> None:
        """Stamp rows that change from now on with this version, or a later one."""
        with self.journal.changing(), self.lock:
            self.journal.record("log.version", {"version": version})
            self.version = max(self.version, version)
            for table in self.tables.values():
                table.rows.raise_version(self.version)

    def forget_removed(self, version: int) -> None:
        """Forget keys that were removed with a version up to this one: no delta needs them."""
        with self.journal.changing():
            self.journal.record("log.forget", {"version": version})
            for table in list(self.tables.values()):
                table.rows.forget_removed(version)

    def settle(self, table: ServedTable, id: str, part: str, keys: Keys, gained: Floats) -> None:
        """Subtract, once, the delta_score that rows had when a part of checkpoint `id` was written:
        that much is exported.
        """
        with self.journal.changing_once():
            last_id, parts = self.settled
            if last_id == id and part in parts:  # an earlier call of the same job did it
                return
            body = {"table": table.schema.name, "id": id, "part": part}
            self.journal.record("log.settle", body, [keys, gained])
            table.rows.settle(keys, gained, self.pool)
            self.settled = (id, [*parts, part] if last_id == id else [part])

    def note_load(self) -> None:
        """The contents are those of a checkpoint, until the next push."""
        with self.lock:
            self.pushes_at_load = self.num_pushes

    # ---- statistics ----

    def sync_waits(self) -> dict[str, int]:
        """Sync: how many pushes are staged and not applied, and how many pulls wait for a step."""
        with self.lock:
            return self.staging.num_held()

    def stats(self) -> dict[str, Any]:
        """Counts since the start; `staleness` and `ahead` are histograms of pushes."""
        with self.lock:
            return {
                "tables": {
                    name: {"rows": table.rows.rows, "bytes": table.rows.bytes}
                    for name, table in self.tables.items()
                },
                "blocks": len(self.blocks),
                "block_bytes": self.blocks.num_bytes,
                "pushes": self.num_pushes,
                "missing": sum(self.counts.read("missing").values()),
                "staleness": _histogram(self.staleness),
                "ahead": _histogram(self.pacing.ahead),
            }


def consecutive(buckets: Array) -> list[Array]:
    """Ascending buckets, split where numbers are missing."""
    is_end = np.diff(buckets) != 1
    return np.split(buckets, np.flatnonzero(is_end) + 1) if len(buckets) else []


def _histogram(counts: Counter[int]) -> dict[str, int]:
    return {str(steps): count for steps, count in sorted(counts.items())}
