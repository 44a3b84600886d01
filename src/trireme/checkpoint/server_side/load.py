"""A server's share of a load: first everything that it will read is checked, then rows and blocks
change.

Of a table that has no rows yet, what is checked is read into one that nobody sees, which takes its
place in the end: so files are read once. Any other is read again, bucket by bucket, or there would
be two of it in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import pyarrow as pa

from trireme import _core
from trireme.checkpoint.format.block_files import read_blocks
from trireme.checkpoint.format.manifest import BlocksFile, FileEntry, Manifest, Piece
from trireme.checkpoint.format.recut import Recut
from trireme.checkpoint.format.row_files import Buckets, Columns, cells_of, read_piece
from trireme.checkpoint.server_side.choice import gains_of, takes_gains
from trireme.checkpoint.server_side.jobs import Progress, in_parallel
from trireme.errors import BadRequest, Corruption, SchemaMismatch
from trireme.protocol.block_spec import BlockSpec
from trireme.protocol.core_table import make_core_table
from trireme.protocol.routing import NUM_BUCKETS
from trireme.protocol.wide_rows import RowLayout
from trireme.protocol.wire import Array
from trireme.server.state import ServedTable, ServerState
from trireme.storage.storage import Storage, read_chunks
from trireme.table import TableSchema

NO_OFFSETS = np.empty(0, np.int32)


@dataclass(frozen=True)
class LoadOrder:
    """What to load.

    tables: names; None: all, of which the model must have none besides.
    parameters: names of dense parameters; None: all of the model, which must be there.
    resumes: streams go on behind what the checkpoint holds; else they begin anew.
    """

    tables: frozenset[str] | None
    parameters: frozenset[str] | None
    resumes: bool


class Load:
    """One server's load of one checkpoint: `check`, then `apply`.

    Raises Corruption and SchemaMismatch.
    """

    def __init__(
        self, server: ServerState, storage: Storage, manifest: Manifest, order: LoadOrder
    ) -> None:
        self._server, self._storage = server, storage
        self.manifest, self.order = manifest, order
        self._staged: dict[str, _core.Table] = {}
        self._owned = np.zeros(NUM_BUCKETS, bool)
        self._owned[server.map().owned_by(server.index)] = True

    # ---- checking ----

    def check(self, progress: Progress) -> None:
        """Read all of this server's, and compare it with manifest, schemas and blocks."""
        self._check_order()
        tasks: list[Callable[[], None]] = []
        for name in self._tables():
            if self._is_new(name):
                self._staged[name] = make_core_table(self.manifest.tables[name].schema)
                self._staged[name].expect(self._num_rows(name))
            for piece in self._pieces(name):
                progress.expect(piece.rows.num_bytes + piece.buckets.num_bytes)
                tasks.append(partial(self._check_piece, name, piece, progress))
        for part in self._block_files():
            progress.expect(part.file.num_bytes)
            tasks.append(partial(self._check_blocks_file, part, progress))
        in_parallel(tasks, progress)

    def _check_order(self) -> None:
        saved, served = self.manifest.tables, self._server.tables
        wanted = served.keys() if self.order.tables is None else self.order.tables
        if missing := set(wanted) - saved.keys():
            raise SchemaMismatch(
                f"checkpoint {self._storage.name}: expected tables {sorted(missing)},"
                f" found {sorted(saved)}"
            )
        for name in self._tables():
            existing = served.get(name)
            if existing is not None and existing.schema != saved[name].schema:
                raise SchemaMismatch(
                    f"table {name!r}: it exists as {existing.schema.to_wire()},"
                    f" found {saved[name].schema.to_wire()}"
                )
        if self.manifest.mode == "delta" and (absent := set(self._tables()) - served.keys()):
            raise SchemaMismatch(
                f"checkpoint {self._storage.name}: expected the tables of its delta,"
                f" found no {sorted(absent)}"
            )
        if self.manifest.mode == "delta" and not self._server.is_as_loaded:
            raise BadRequest(
                f"load: expected no training between a checkpoint and the delta"
                f" {self._storage.name} on top of it, found server {self._server.index} changed"
            )
        self._check_blocks()

    def _check_blocks(self) -> None:
        if not self._blocks():
            return
        where = f"checkpoint {self._storage.name}"
        if self.manifest.optimizer != self._server.blocks.class_name:
            raise SchemaMismatch(
                f"{where}: its optimizer is {self.manifest.optimizer},"
                f" the model's is {self._server.blocks.class_name}"
            )
        self._recut()

    def _check_file(self, entry: FileEntry, progress: Progress) -> None:
        for num_bytes in read_chunks(self._storage, entry.to_json()):
            progress.add(num_bytes)

    def _check_piece(self, name: str, piece: Piece, progress: Progress) -> None:
        for entry in (piece.rows, piece.buckets):
            self._check_file(entry, progress)
        for buckets, batch in checked_rows(self._storage, piece, self._columns(name).schema):
            if name in self._staged:
                self._restore(self._staged[name], name, piece, buckets, batch)

    def _check_blocks_file(self, part: BlocksFile, progress: Progress) -> None:
        self._check_file(part.file, progress)
        for _ in read_blocks(self._storage, part, self._sources):
            pass

    # ---- changing ----

    def apply(self, progress: Progress) -> None:
        """Replace the rows and blocks that this server owns. Requires: `check`, once."""
        manifest, order = self.manifest, self.order
        is_delta = manifest.mode == "delta"
        tables = list(self._tables())
        for name, rows in self._staged.items():
            self._server.adopt_rows(manifest.tables[name].schema, rows)
        if not order.resumes:
            for table in self._server.tables.values():
                self._set_marks(table, {})
        tasks: list[Callable[[], None]] = []
        marks: dict[str, dict[int, Array]] = {}
        for name in tables:
            of_table = marks.setdefault(name, {})
            for piece in self._pieces(name) if name not in self._staged else ():
                progress.expect(piece.num_rows)
                tasks.append(partial(self._load_piece, name, piece, of_table, progress))
        in_parallel(tasks, progress)
        if is_delta and order.resumes:
            for name in tables:
                self._set_marks(self._server.tables[name], marks[name])
        self._load_blocks()
        self._server.raise_version(manifest.version + 1)
        self._server.reset_streams(dict(manifest.streams) if order.resumes else {})
        self._server.note_load()

    def _load_piece(
        self, name: str, piece: Piece, marks: dict[int, Array], progress: Progress
    ) -> None:
        rows = self._server.tables[name].rows
        for buckets, batch in read_piece(self._storage, piece, self._columns(name).schema):
            self._restore(rows, name, piece, buckets, batch)
            if self.manifest.mode == "delta":
                _note_marks(marks, buckets)
            progress.add(batch.num_rows)

    def _restore(
        self, rows: _core.Table, name: str, piece: Piece, buckets: Buckets, batch: pa.RecordBatch
    ) -> None:
        """Put these buckets into a table. Raises Corruption for keys and rows that cannot be."""
        manifest = self.manifest
        try:
            _core.restore_columns(
                rows,
                buckets=buckets.buckets,
                num_rows=buckets.num_rows,
                wanted=self._owned[buckets.buckets],
                keys=batch["key"].to_numpy(),
                classes=batch["row_class"].to_numpy(),
                columns=cells_of(batch),
                widths=list(self._columns(name).widths),
                mark_offsets=buckets.mark_offsets if self.order.resumes else NO_OFFSETS,
                streams=buckets.streams,
                sequences=buckets.sequences,
                removed_offsets=buckets.removed_offsets,
                removed=buckets.removed,
                pending_offsets=buckets.pending_offsets,
                pending=buckets.pending,
                removed_at=manifest.version,
                removed_since=min(manifest.chain.values(), default=manifest.version),
                apply=manifest.mode == "delta",
            )
        except BadRequest as error:
            raise Corruption(f"{self._storage.name}/{piece.rows.path}: {error}") from error
        if takes_gains(manifest, manifest.tables[name].schema):
            rows.settle(*gains_of(batch), self._server.pool)

    def _set_marks(self, table: ServedTable, marks: Mapping[int, Array]) -> None:
        """The marks of this server's buckets: (4096,) per stream; 0 for streams not given."""
        for stream in {*marks, *self._server.streams}:
            values = table.rows.marks(stream)
            values[self._owned] = marks[stream][self._owned] if stream in marks else 0
            table.rows.set_marks(stream, values)

    def _load_blocks(self) -> None:
        recut = self._recut()
        with self._server.blocks_lock:
            store = self._server.blocks
            if not self.order.resumes:
                store.forget_marks()
            for part in self._block_files():
                for spec, tensors, marks in read_blocks(self._storage, part, self._sources):
                    kept = marks if self.order.resumes else {}
                    for block, parts in recut.add(spec, tensors, kept):
                        store.restore(block.id, parts)

    # ---- what is this server's ----

    def _tables(self) -> Iterable[str]:
        wanted = self.order.tables
        return [name for name in self.manifest.tables if wanted is None or name in wanted]

    def _is_new(self, name: str) -> bool:
        """Whether what is loaded needs to replace no rows."""
        served = self._server.tables.get(name)
        return self.manifest.mode != "delta" and (served is None or served.rows.rows == 0)

    def _columns(self, name: str) -> Columns:
        rows = self._staged[name] if name in self._staged else self._server.tables[name].rows
        return Columns.of(RowLayout.of(self.manifest.tables[name].schema, rows))

    def _pieces(self, name: str) -> list[Piece]:
        pieces = self.manifest.tables[name].pieces
        return [p for p in pieces if self._owned[p.low : p.high + 1].any()]

    def _num_rows(self, name: str) -> int:
        """About as many as it has of a table: keys are spread evenly over buckets."""
        shares = ((p, self._owned[p.low : p.high + 1].mean()) for p in self._pieces(name))
        return int(sum(piece.num_rows * share for piece, share in shares))

    def _blocks(self) -> list[BlockSpec]:
        """Wanted blocks of this server."""
        wanted = self.order.parameters
        return [s for s in self._server.blocks.specs() if wanted is None or s.param in wanted]

    def _recut(self) -> Recut:
        """How they are made of those in the checkpoint. Raises SchemaMismatch."""
        saved = (block.spec for part in self.manifest.blocks for block in part.blocks)
        return Recut(self._blocks(), saved, f"checkpoint {self._storage.name}")

    @cached_property
    def _sources(self) -> frozenset[str]:
        """Ids of the saved blocks that are needed."""
        return self._recut().sources

    def _block_files(self) -> list[BlocksFile]:
        blocks = self.manifest.blocks
        return [p for p in blocks if any(b.spec.id in self._sources for b in p.blocks)]


def checked_rows(
    storage: Storage, piece: Piece, schema: pa.Schema
) -> Iterator[tuple[Buckets, pa.RecordBatch]]:
    """As read_piece; rows of other buckets raise Corruption too."""
    for buckets, batch in read_piece(storage, piece, schema):
        keys = batch["key"].to_numpy()
        of_keys = np.empty(len(keys), np.uint16)
        _core.buckets(keys, of_keys)
        if not np.array_equal(of_keys, np.repeat(buckets.buckets, buckets.num_rows)):
            raise Corruption(
                f"{storage.name}/{piece.rows.path}: expected keys in the order of their buckets"
            )
        yield buckets, batch


def columns_of(schema: TableSchema) -> Columns:
    """The columns of a table's row files."""
    return Columns.of(RowLayout.of(schema, make_core_table(schema)))


def _note_marks(marks: dict[int, Array], buckets: Buckets) -> None:
    """Enter the marks of these buckets into (4096,) arrays per stream. Pieces are of different
    buckets, so threads do not meet.
    """
    of_mark = np.repeat(buckets.buckets, np.diff(buckets.mark_offsets))
    for stream in np.unique(buckets.streams).tolist():
        mine = buckets.streams == stream
        array = marks.setdefault(stream, np.zeros(NUM_BUCKETS, np.uint64))
        array[of_mark[mine]] = buckets.sequences[mine]
