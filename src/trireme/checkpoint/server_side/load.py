"""A server's share of a load: first all that it will read is checked, then rows and blocks change.

Rows of a table that is empty so far are read into a staged table while they are checked, which
replaces the empty one in the end: so files are read once. Rows of any other table in memory are
read again, bucket by bucket, because two such tables might not fit in memory.

Rows on SSD have a budget of memory, and a load that is decided must find room in it. So the room is
taken before, and held until the rows change. Few rows have a claim, as those of a push. Many are
in a staged table, beside those that it replaces; of a delta, with a copy of the rows that it does
not change. A server that is killed in between begins again when the load is decided, and changes
rows where they are, which takes less than two tables.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np
import pyarrow as pa

from trireme import _core
from trireme.checkpoint.format.arrow_arrays import to_numpy
from trireme.checkpoint.format.block_files import read_blocks
from trireme.checkpoint.format.manifest import MATCH, BlockFile, CheckpointManifest, RowFiles
from trireme.checkpoint.format.row_files import (
    BucketLines,
    RowColumns,
    read_checked_rows,
    read_rows,
)
from trireme.checkpoint.server_side.block_assembly import BlockAssembly
from trireme.checkpoint.server_side.operations import OperationProgress, in_parallel
from trireme.checkpoint.server_side.settle import gains_of, settle_rows, settles
from trireme.errors import BadRequest, Corruption, ResourceExhausted, SchemaMismatch
from trireme.protocol.block_spec import BlockSpec
from trireme.protocol.routing import NUM_BUCKETS, Keys
from trireme.protocol.wire import Array
from trireme.rows.core_table import make_core_table
from trireme.server.prepared_import import CHANGED_BUCKETS, by_buckets
from trireme.server.served_tables import ServedTable
from trireme.server.state import ServerState
from trireme.storage.checked_file import check_file
from trireme.storage.storage import Storage

OTHER_TABLE = "tables=[...] leaves it out; its weights: docs/checkpoints.md, A model that changes"
NO_OFFSETS = np.empty(0, np.int32)


@dataclass(frozen=True)
class LoadPlan:
    """What to load. tables: names; None: all, and the model must have no others.
    parameters: names of dense parameters; None: all of the model, which must be in the checkpoint.
    resumes: streams continue after what the checkpoint holds; else they start over.
    """

    tables: frozenset[str] | None
    parameters: frozenset[str] | None
    resumes: bool


@dataclass
class _ToClaim:
    """What a claim is for: keys of a delta, and the numbers of rows that buckets get. Threads: each
    adds other buckets.
    """

    some_keys: list[Keys] = field(default_factory=list)
    num_rows: Array = field(default_factory=lambda: np.zeros(NUM_BUCKETS, np.uint32))

    def add(self, lines: BucketLines, keys: Keys, owned: Array, *, of_delta: bool) -> None:
        """owned: (4096,) bool."""
        is_owned, num_removed = owned[lines.buckets], np.diff(lines.removed_offsets)
        self.num_rows[lines.buckets] = np.where(is_owned, lines.num_rows, 0)
        if of_delta:
            self.some_keys += [
                keys[np.repeat(is_owned, lines.num_rows)],
                lines.removed[np.repeat(is_owned, num_removed)],
            ]

    @property
    def keys(self) -> Keys:
        return np.concatenate([np.zeros(0, np.uint64), *self.some_keys])


class CheckpointLoad:
    """One server's load of one checkpoint: `check`, then `install`, once. Raises Corruption and
    SchemaMismatch; ResourceExhausted: there is no room for rows on SSD.

    is_decided: it takes place, and the server has lost what had been checked before.
    """

    def __init__(
        self,
        server: ServerState,
        storage: Storage,
        manifest: CheckpointManifest,
        plan: LoadPlan,
        *,
        is_decided: bool = False,
    ) -> None:
        self._server, self._storage, self._is_decided = server, storage, is_decided
        self._where = f"checkpoint {storage.name}"
        self.manifest, self.plan = manifest, plan
        self._staged: dict[str, _core.Table] = {}
        self._claims: dict[str, list[_core.Claim]] = {}
        self._to_claim: dict[str, _ToClaim] = {}
        self._marks: dict[str, dict[int, Array]] = {}  # of deltas
        self._owned = np.zeros(NUM_BUCKETS, bool)
        self._owned[server.assignment.owned_buckets()] = True

    # ---- checking ----

    def check(self, progress: OperationProgress) -> None:
        """Read all files of this server, and compare them with manifest, schemas and blocks."""
        self._check_tables()
        if self.plan.parameters is None and self._has_other_optimizer():
            raise SchemaMismatch(
                f"{self._where}: its optimizer is {self.manifest.optimizer}, the model's is"
                f" {self._server.blocks.class_name}; {MATCH}, and without the optimizer's state"
            )
        self._assembly()
        tasks: list[Callable[[], None]] = []
        for name in self._tables():
            self._marks[name] = {}
            if self._is_staged(name):
                self._stage(name, self._num_rows(name))
            elif self._may_claim(name):
                self._to_claim[name] = _ToClaim()
            for files in self._row_files(name):
                progress.expect(files.rows.num_bytes + files.buckets.num_bytes)
                tasks.append(partial(self._check_rows, name, files, progress))
        for blocks in self._block_files():
            progress.expect(blocks.file.num_bytes)
            tasks.append(partial(self._check_blocks, blocks, progress))
        in_parallel(tasks, progress)
        for name in self._tables() if not self._is_decided else ():
            if name not in self._staged:
                self._take_room(name, progress)
        for name, rows in self._staged.items():
            with self._needing_room(name):  # of what came with rows, such as removed keys
                self._server.with_room(rows.check_room)

    def _check_tables(self) -> None:
        saved, served = self.manifest.tables, self._server.tables
        wanted = served.keys() if self.plan.tables is None else self.plan.tables
        if missing := set(wanted) - saved.keys():
            what = f"expected tables {sorted(wanted)}, found {sorted(saved)}, without"
            raise SchemaMismatch(f"{self._where}: {what} {sorted(missing)}; {MATCH}")
        new = [name for name in self._tables() if name not in served]
        for name in self._tables():
            try:
                self._server.tables.check_schema(saved[name].schema)
            except SchemaMismatch as error:
                raise SchemaMismatch(f"{self._where}: {error}; {OTHER_TABLE}") from None
        for number, name in enumerate(new, len(served)):
            self._server.limits.check_new_table(number, saved[name].schema.admission)
        if self.manifest.mode != "delta":
            return
        if absent := set(self._tables()) - served.keys():
            raise SchemaMismatch(
                f"{self._where}: expected the tables of its delta, found no {sorted(absent)}"
            )
        if not self._server.streams.is_as_loaded:
            raise BadRequest(
                f"load: expected no training, import or expiry between a checkpoint and the delta"
                f" {self._storage.name} on top of it, found server"
                f" {self._server.assignment.index} changed"
            )

    def _check_rows(self, name: str, files: RowFiles, progress: OperationProgress) -> None:
        for entry in (files.rows, files.buckets):
            check_file(self._storage, *entry, progress.add)
        for buckets, batch in read_checked_rows(self._storage, files, self._columns[name].schema):
            # What a table would refuse is found before the load is decided.
            rows = self._staged.get(name) or make_core_table(self.manifest.tables[name].schema)
            with self._needing_room(name):
                self._restore(rows, name, files, buckets, batch)
            self._server.check_rows(staged=list(self._staged.values()))
            if name in self._to_claim:
                keys, of_delta = to_numpy(batch["key"]), self.manifest.mode == "delta"
                self._to_claim[name].add(buckets, keys, self._owned, of_delta=of_delta)

    def _check_blocks(self, blocks: BlockFile, progress: OperationProgress) -> None:
        check_file(self._storage, *blocks.file, progress.add)
        num_bytes = 2 * blocks.file.num_bytes  # read whole, and its tensors
        with self._server.held.holding(("blocks", self._where, blocks.file.path), num_bytes):
            for _ in read_blocks(self._storage, blocks, self._sources):
                pass

    # ---- room ----

    def _stage(self, name: str, num_rows: int) -> _core.Table:
        with self._needing_room(name):
            rows = self._server.make_rows(self.manifest.tables[name].schema)
        self._staged[name] = rows
        rows.expect(num_rows)
        return rows

    def _may_claim(self, name: str) -> bool:
        """Whether the rows that change in a table are so few that a claim may find room."""
        if self._is_decided or (use := self._server.tables[name].rows.tier) is None:
            return False
        num = sum(files.num_rows + files.num_removed for files in self._row_files(name))
        return bool(num * self._server.tables[name].rows.row_bytes <= use["memory_bytes"] // 2)

    def _take_room(self, name: str, progress: OperationProgress) -> None:
        """Take what a table with rows on SSD needs: by a claim, or in a staged table."""
        table = self._server.tables[name]
        if table.rows.tier is None:
            return
        if (wanted := self._to_claim.pop(name, None)) is not None:
            with suppress(ResourceExhausted):  # then a staged table may find room
                self._claims[name] = self._server.with_room(partial(self._claim, table, wanted))
                return
        rows = self._stage(name, self._num_rows(name))
        if self.manifest.mode == "delta":
            rows.expect(table.rows.rows)
            progress.expect(NUM_BUCKETS)
            for copy in by_buckets(rows.copy, table.rows, self._server.pool):
                with self._needing_room(name):
                    self._server.with_room(copy)
                progress.add(CHANGED_BUCKETS)
        files = self._row_files(name)
        progress.expect(sum(one.num_rows for one in files))
        load = partial(self._load_rows, name, rows=rows, progress=progress)
        in_parallel([partial(load, one) for one in files], progress)

    def _claim(self, table: ServedTable, wanted: _ToClaim) -> list[_core.Claim]:
        """Raises ResourceExhausted: there is no room for all together."""
        if self.manifest.mode == "delta":
            claim = table.rows.claim(wanted.keys, self._server.pool)
        else:
            claim = table.rows.claim_buckets(wanted.num_rows)
        if claim is None:
            raise ResourceExhausted(f"load: no room to claim rows of table {table.schema.name!r}")
        return [claim]

    @contextmanager
    def _needing_room(self, name: str) -> Iterator[None]:
        """Tell why rows that lie on SSD need room in here, and what to do if there is none."""
        try:
            yield
        except ResourceExhausted as error:
            if self._is_decided or self._server.tier is None:
                raise
            raise ResourceExhausted(
                f"load of {self._where}: table {name!r} finds no room on server"
                f" {self._server.assignment.index}: {error}. Nothing was loaded. Until all servers"
                " have what they load, it lies beside the rows that it replaces: give the servers"
                " more memory or space on SSD, or load it into servers that were started without"
                " a state"
            ) from error

    # ---- changing ----

    def install(self, progress: OperationProgress) -> None:
        """Replace the rows and blocks that this server owns. Requires: `check`, once."""
        manifest, resumes = self.manifest, self.plan.resumes
        self._is_decided = True
        with self._server.lock:
            self._server.row_claims.drop(self._server.staging.staged())  # they find no use
        self._server.tables.settled.end(self._server.tables.version)
        for name, rows in self._staged.items():
            self._server.adopt_rows(manifest.tables[name].schema, rows)
        if not resumes:
            for table in self._server.tables.values():
                self._set_marks(table, {})
        tasks: list[Callable[[], None]] = []
        for name in self._tables():
            for files in self._row_files(name) if name not in self._staged else ():
                progress.expect(files.num_rows)
                rows = self._server.tables[name].rows
                tasks.append(partial(self._load_rows, name, files, rows, progress))
        in_parallel(tasks, progress)
        self._claims.clear()
        if manifest.mode == "delta" and resumes:
            for name, marks in self._marks.items():
                self._set_marks(self._server.tables[name], marks)
        self._load_blocks()
        streams = dict(manifest.streams) if resumes else {}
        self._server.finish_load(manifest.version + 1, streams)

    def _load_rows(
        self, name: str, files: RowFiles, rows: _core.Table, progress: OperationProgress
    ) -> None:
        for buckets, batch in read_rows(self._storage, files, self._columns[name].schema):
            with self._needing_room(name):
                self._restore(rows, name, files, buckets, batch)
            if self.manifest.mode == "delta":
                _note_marks(self._marks[name], buckets)
            progress.add(batch.num_rows)

    def _restore(
        self,
        rows: _core.Table,
        name: str,
        files: RowFiles,
        lines: BucketLines,
        batch: pa.RecordBatch,
    ) -> None:
        """Put these buckets into a table. Raises Corruption for invalid keys and rows."""
        manifest = self.manifest
        claims = self._claims.get(name, ())
        if manifest.mode != "delta":
            lines = lines.without(to_numpy(batch["key"]))
        if not self.plan.resumes:
            lines = replace(lines, mark_offsets=NO_OFFSETS)
        try:
            restore = partial(
                self._columns[name].restore,
                rows,
                lines,
                batch,
                wanted=self._owned[lines.buckets],
                removed_at=manifest.version,
                removed_since=min(manifest.chain.values(), default=manifest.version),
                apply=manifest.mode == "delta",
                claims=claims,
            )
            self._server.with_room(restore)
        except BadRequest as error:
            raise Corruption(f"{self._storage.name}/{files.rows.path}: {error}") from error
        if settles(manifest, manifest.tables[name].schema):
            owned = np.repeat(self._owned[lines.buckets], lines.num_rows)
            keys, gained = gains_of(batch)
            settle_rows(rows, keys[owned], gained[owned], claims)

    def _set_marks(self, table: ServedTable, marks: Mapping[int, Array]) -> None:
        """Set the marks of this server's buckets: (4096,) per stream; 0 for other streams."""
        for stream in {*marks, *self._server.streams}:
            values = table.rows.marks(stream)
            values[self._owned] = marks[stream][self._owned] if stream in marks else 0
            table.rows.set_marks(stream, values)

    def _load_blocks(self) -> None:
        assembly, has_other_optimizer = self._assembly(), self._has_other_optimizer()
        with self._server.blocks_lock:
            store = self._server.blocks
            if not self.plan.resumes:
                store.forget_marks()
            for blocks in self._block_files():
                for spec, tensors, marks in read_blocks(self._storage, blocks, self._sources):
                    kept = marks if self.plan.resumes else {}
                    if has_other_optimizer:
                        tensors = {"weights": tensors["weights"]}
                    for block, parts in assembly.add(spec, tensors, kept):
                        store.restore(block.id, parts)

    # ---- this server's share ----

    def _tables(self) -> list[str]:
        wanted = self.plan.tables
        return [name for name in self.manifest.tables if wanted is None or name in wanted]

    def _is_staged(self, name: str) -> bool:
        """Whether the rows of a table are read into another one, while they are checked."""
        if self.manifest.mode == "delta":
            return False
        if (served := self._server.tables.get(name)) is None or served.rows.rows == 0:
            return True
        has_tier = served.rows.tier is not None
        return has_tier and not self._is_decided and not self._may_claim(name)

    @cached_property
    def _columns(self) -> dict[str, RowColumns]:
        tables = self.manifest.tables
        return {name: RowColumns.of_schema(tables[name].schema) for name in self._tables()}

    def _row_files(self, name: str) -> list[RowFiles]:
        files = self.manifest.tables[name].files
        return [f for f in files if self._owned[f.low : f.high + 1].any()]

    def _num_rows(self, name: str) -> int:
        """About how many rows of a table it gets: keys are spread evenly over buckets."""
        files = self._row_files(name)
        return int(sum(f.num_rows * self._owned[f.low : f.high + 1].mean() for f in files))

    def _blocks(self) -> list[BlockSpec]:
        """Wanted blocks of this server."""
        wanted = self.plan.parameters
        return [s for s in self._server.blocks.specs() if wanted is None or s.param in wanted]

    def _has_other_optimizer(self) -> bool:
        return self._blocks() != [] and self.manifest.optimizer != self._server.blocks.class_name

    def _assembly(self) -> BlockAssembly:
        """Raises SchemaMismatch where the saved blocks lack something."""
        saved = (block.spec for file in self.manifest.blocks for block in file.blocks)
        return BlockAssembly(self._blocks(), saved, self._where)

    @cached_property
    def _sources(self) -> frozenset[str]:
        """Ids of the saved blocks that are needed."""
        return self._assembly().sources

    def _block_files(self) -> list[BlockFile]:
        files = self.manifest.blocks
        return [f for f in files if any(block.spec.id in self._sources for block in f.blocks)]


def _note_marks(marks: dict[int, Array], buckets: BucketLines) -> None:
    """Enter the marks of these buckets into (4096,) arrays per stream. Threads: each has other
    buckets.
    """
    bucket_of_mark = np.repeat(buckets.buckets, np.diff(buckets.mark_offsets))
    for stream in np.unique(buckets.streams).tolist():
        is_of_stream = buckets.streams == stream
        array = marks.setdefault(stream, np.zeros(NUM_BUCKETS, np.uint64))
        array[bucket_of_mark[is_of_stream]] = buckets.sequences[is_of_stream]
