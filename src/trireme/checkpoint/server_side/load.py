"""A server's share of a load: first all that it will read is checked, then rows and blocks change.

Rows of a table that is empty so far are read into a staged table while they are checked, which
replaces the empty one in the end: so files are read once. Rows of any other table are read again,
bucket by bucket, because two such tables might not fit in memory.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
import pyarrow as pa

from trireme import _core
from trireme.checkpoint.format.block_files import read_blocks
from trireme.checkpoint.format.manifest import BlockFile, CheckpointManifest, RowFiles
from trireme.checkpoint.format.row_files import (
    BucketLines,
    RowColumns,
    read_checked_rows,
    read_rows,
)
from trireme.checkpoint.server_side.block_assembly import BlockAssembly
from trireme.checkpoint.server_side.operations import OperationProgress, in_parallel
from trireme.checkpoint.server_side.settle import gains_of, settle_rows, settles
from trireme.errors import BadRequest, Corruption, SchemaMismatch
from trireme.protocol.block_spec import BlockSpec
from trireme.protocol.routing import NUM_BUCKETS
from trireme.protocol.wire import Array
from trireme.rows.core_table import make_core_table
from trireme.server.served_tables import ServedTable
from trireme.server.state import ServerState
from trireme.storage.checked_file import check_file
from trireme.storage.storage import Storage

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


class CheckpointLoad:
    """One server's load of one checkpoint: `check`, then `install`, once. Raises Corruption and
    SchemaMismatch.
    """

    def __init__(
        self, server: ServerState, storage: Storage, manifest: CheckpointManifest, plan: LoadPlan
    ) -> None:
        self._server, self._storage = server, storage
        self._where = f"checkpoint {storage.name}"
        self.manifest, self.plan = manifest, plan
        self._staged: dict[str, _core.Table] = {}
        self._owned = np.zeros(NUM_BUCKETS, bool)
        self._owned[server.assignment.owned_buckets()] = True

    # ---- checking ----

    def check(self, progress: OperationProgress) -> None:
        """Read all files of this server, and compare them with manifest, schemas and blocks."""
        self._check_tables()
        if self._blocks() and self.manifest.optimizer != self._server.blocks.class_name:
            raise SchemaMismatch(
                f"{self._where}: its optimizer is {self.manifest.optimizer},"
                f" the model's is {self._server.blocks.class_name}"
            )
        self._assembly()
        tasks: list[Callable[[], None]] = []
        for name in self._tables():
            if self._is_new(name):
                self._staged[name] = self._server.make_rows(self.manifest.tables[name].schema)
                self._staged[name].expect(self._num_rows(name))
            for files in self._row_files(name):
                progress.expect(files.rows.num_bytes + files.buckets.num_bytes)
                tasks.append(partial(self._check_rows, name, files, progress))
        for blocks in self._block_files():
            progress.expect(blocks.file.num_bytes)
            tasks.append(partial(self._check_blocks, blocks, progress))
        in_parallel(tasks, progress)

    def _check_tables(self) -> None:
        saved, served = self.manifest.tables, self._server.tables
        wanted = served.keys() if self.plan.tables is None else self.plan.tables
        if missing := set(wanted) - saved.keys():
            raise SchemaMismatch(
                f"{self._where}: expected tables {sorted(missing)}, found {sorted(saved)}"
            )
        for name in self._tables():
            self._server.tables.check_schema(saved[name].schema)
        if self.manifest.mode != "delta":
            return
        if absent := set(self._tables()) - served.keys():
            raise SchemaMismatch(
                f"{self._where}: expected the tables of its delta, found no {sorted(absent)}"
            )
        if not self._server.streams.is_as_loaded:
            raise BadRequest(
                f"load: expected no training between a checkpoint and the delta"
                f" {self._storage.name} on top of it, found server"
                f" {self._server.assignment.index} changed"
            )

    def _check_rows(self, name: str, files: RowFiles, progress: OperationProgress) -> None:
        for entry in (files.rows, files.buckets):
            check_file(self._storage, *entry, progress.add)
        for buckets, batch in read_checked_rows(self._storage, files, self._columns[name].schema):
            # What a table would refuse is found before the load is decided.
            rows = self._staged.get(name) or make_core_table(self.manifest.tables[name].schema)
            self._restore(rows, name, files, buckets, batch)
            self._server.check_rows(staged=list(self._staged.values()))

    def _check_blocks(self, blocks: BlockFile, progress: OperationProgress) -> None:
        check_file(self._storage, *blocks.file, progress.add)
        num_bytes = 2 * blocks.file.num_bytes  # read whole, and its tensors
        with self._server.held.holding(("blocks", self._where, blocks.file.path), num_bytes):
            for _ in read_blocks(self._storage, blocks, self._sources):
                pass

    # ---- changing ----

    def install(self, progress: OperationProgress) -> None:
        """Replace the rows and blocks that this server owns. Requires: `check`, once."""
        manifest, resumes = self.manifest, self.plan.resumes
        for name, rows in self._staged.items():
            self._server.adopt_rows(manifest.tables[name].schema, rows)
        if not resumes:
            for table in self._server.tables.values():
                self._set_marks(table, {})
        tasks: list[Callable[[], None]] = []
        marks: dict[str, dict[int, Array]] = {name: {} for name in self._tables()}
        for name in marks:
            for files in self._row_files(name) if name not in self._staged else ():
                progress.expect(files.num_rows)
                tasks.append(partial(self._load_rows, name, files, marks[name], progress))
        in_parallel(tasks, progress)
        if manifest.mode == "delta" and resumes:
            for name, of_table in marks.items():
                self._set_marks(self._server.tables[name], of_table)
        self._load_blocks()
        streams = dict(manifest.streams) if resumes else {}
        self._server.finish_load(manifest.version + 1, streams)

    def _load_rows(
        self, name: str, files: RowFiles, marks: dict[int, Array], progress: OperationProgress
    ) -> None:
        rows = self._server.tables[name].rows
        for buckets, batch in read_rows(self._storage, files, self._columns[name].schema):
            self._restore(rows, name, files, buckets, batch)
            if self.manifest.mode == "delta":
                _note_marks(marks, buckets)
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
            )
            self._server.with_room(restore)
        except BadRequest as error:
            raise Corruption(f"{self._storage.name}/{files.rows.path}: {error}") from error
        if settles(manifest, manifest.tables[name].schema):
            settle_rows(rows, *gains_of(batch))

    def _set_marks(self, table: ServedTable, marks: Mapping[int, Array]) -> None:
        """Set the marks of this server's buckets: (4096,) per stream; 0 for other streams."""
        for stream in {*marks, *self._server.streams}:
            values = table.rows.marks(stream)
            values[self._owned] = marks[stream][self._owned] if stream in marks else 0
            table.rows.set_marks(stream, values)

    def _load_blocks(self) -> None:
        assembly = self._assembly()
        with self._server.blocks_lock:
            store = self._server.blocks
            if not self.plan.resumes:
                store.forget_marks()
            for blocks in self._block_files():
                for spec, tensors, marks in read_blocks(self._storage, blocks, self._sources):
                    kept = marks if self.plan.resumes else {}
                    for block, parts in assembly.add(spec, tensors, kept):
                        store.restore(block.id, parts)

    # ---- this server's share ----

    def _tables(self) -> list[str]:
        wanted = self.plan.tables
        return [name for name in self.manifest.tables if wanted is None or name in wanted]

    def _is_new(self, name: str) -> bool:
        """Whether the load replaces no rows of the table."""
        served = self._server.tables.get(name)
        return self.manifest.mode != "delta" and (served is None or served.rows.rows == 0)

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
