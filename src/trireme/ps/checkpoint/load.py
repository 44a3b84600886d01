"""A server's share of a load: first everything that it will read is checked, then rows and blocks
change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa

from trireme import _core
from trireme.errors import BadRequest, Corruption, SchemaMismatch
from trireme.ps.checkpoint.block_files import read_blocks
from trireme.ps.checkpoint.jobs import Progress, in_parallel
from trireme.ps.checkpoint.manifest import BlocksFile, FileEntry, Manifest, Piece
from trireme.ps.checkpoint.row_files import Buckets, Columns, cells_of, read_piece
from trireme.ps.checkpoint.storage import Storage, read_chunks
from trireme.ps.routing import NUM_BUCKETS
from trireme.ps.rows import RowLayout
from trireme.ps.shard import ServedTable, Shard, make_core_table
from trireme.ps.wire import Array
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
    """One server's load of one checkpoint. Raises Corruption and SchemaMismatch."""

    def __init__(
        self, shard: Shard, storage: Storage, manifest: Manifest, order: LoadOrder
    ) -> None:
        self._shard, self._storage = shard, storage
        self._manifest, self._order = manifest, order
        self._owned = np.zeros(NUM_BUCKETS, bool)
        self._owned[shard.map().owned_by(shard.index)] = True

    # ---- checking ----

    def check(self, progress: Progress) -> None:
        """Read all that `apply` will read, and compare it with manifest, schemas and blocks."""
        self._check_order()
        pieces = [(name, piece) for name in self._tables() for piece in self._pieces(name)]
        files = [entry for _, piece in pieces for entry in (piece.rows, piece.buckets)]
        files += [part.file for part in self._block_files()]
        progress.expect(sum(entry.num_bytes for entry in files))
        in_parallel([partial(self._check_file, entry, progress) for entry in files], progress)
        in_parallel([partial(self._check_piece, *piece) for piece in pieces], progress)
        for part in self._block_files():
            list(read_blocks(self._storage, part, self._blocks()))

    def _check_order(self) -> None:
        saved, served = self._manifest.tables, self._shard.tables
        wanted = served.keys() if self._order.tables is None else self._order.tables
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
        if self._manifest.mode == "delta" and (absent := set(self._tables()) - served.keys()):
            raise SchemaMismatch(
                f"checkpoint {self._storage.name}: expected the tables of its delta,"
                f" found no {sorted(absent)}"
            )
        if self._manifest.mode == "delta" and not self._shard.is_as_loaded:
            raise BadRequest(
                f"load: expected no training between a checkpoint and the delta"
                f" {self._storage.name} on top of it, found server {self._shard.index} changed"
            )
        self._check_blocks()

    def _check_blocks(self) -> None:
        blocks = self._blocks()
        if not blocks:
            return
        where = f"checkpoint {self._storage.name}"
        if self._manifest.optimizer != self._shard.blocks.class_name:
            raise SchemaMismatch(
                f"{where}: its optimizer is {self._manifest.optimizer},"
                f" the model's is {self._shard.blocks.class_name}"
            )
        saved = {b.spec.id: b.spec for part in self._manifest.blocks for b in part.blocks}
        if missing := blocks.keys() - saved.keys():
            raise SchemaMismatch(f"{where}: expected blocks {sorted(missing)}, found none of them")
        for block_id, spec in blocks.items():
            if saved[block_id].size != spec:
                raise SchemaMismatch(
                    f"{where}: block {block_id}: expected {spec} elements,"
                    f" found {saved[block_id].size}"
                )

    def _check_file(self, entry: FileEntry, progress: Progress) -> None:
        for num_bytes in read_chunks(self._storage, entry.to_json()):
            progress.add(num_bytes)

    def _check_piece(self, name: str, piece: Piece) -> None:
        table = self._manifest.tables[name]
        served = self._shard.tables.get(name)
        columns = columns_of(table.schema) if served is None else _columns(served)
        check_rows(self._storage, piece, columns.schema)

    # ---- changing ----

    def apply(self, progress: Progress) -> None:
        """Replace the rows and blocks that this server owns. Requires: `check`."""
        manifest, order = self._manifest, self._order
        is_delta = manifest.mode == "delta"
        tables = list(self._tables())
        for name in tables:
            self._shard.create_table(manifest.tables[name].schema)
        if not order.resumes:
            for table in self._shard.tables.values():
                self._set_marks(table, {})
        tasks: list[Callable[[], None]] = []
        marks: dict[str, dict[int, Array]] = {}
        for name in tables:
            of_table = marks.setdefault(name, {})
            for piece in self._pieces(name):
                progress.expect(piece.num_rows)
                tasks.append(
                    partial(self._load_piece, self._shard.tables[name], piece, of_table, progress)
                )
        in_parallel(tasks, progress)
        if is_delta and order.resumes:
            for name in tables:
                self._set_marks(self._shard.tables[name], marks[name])
        self._load_blocks()
        self._shard.raise_version(manifest.version + 1)
        self._shard.reset_streams(dict(manifest.streams) if order.resumes else {})
        self._shard.note_load()

    def _load_piece(
        self, table: ServedTable, piece: Piece, marks: dict[int, Array], progress: Progress
    ) -> None:
        columns = _columns(table)
        is_delta = self._manifest.mode == "delta"
        for buckets, batch in read_piece(self._storage, piece, columns.schema):
            wanted = self._owned[buckets.buckets]
            _core.restore_columns(
                table.rows,
                buckets=buckets.buckets,
                num_rows=buckets.num_rows,
                wanted=wanted,
                keys=batch["key"].to_numpy(),
                classes=batch["row_class"].to_numpy(),
                columns=cells_of(batch),
                widths=list(columns.widths),
                mark_offsets=buckets.mark_offsets if self._order.resumes else NO_OFFSETS,
                streams=buckets.streams,
                sequences=buckets.sequences,
                removed_offsets=buckets.removed_offsets,
                removed=buckets.removed,
                pending_offsets=buckets.pending_offsets,
                pending=buckets.pending,
                removed_at=self._manifest.version,
                removed_since=min(self._manifest.chain.values(), default=self._manifest.version),
                apply=is_delta,
            )
            if is_delta:
                _note_marks(marks, buckets)
            progress.add(batch.num_rows)

    def _set_marks(self, table: ServedTable, marks: Mapping[int, Array]) -> None:
        """The marks of this server's buckets: (4096,) per stream; 0 for streams not given."""
        for stream in {*marks, *self._shard.streams}:
            values = table.rows.marks(stream)
            values[self._owned] = marks[stream][self._owned] if stream in marks else 0
            table.rows.set_marks(stream, values)

    def _load_blocks(self) -> None:
        wanted = self._blocks()
        with self._shard.blocks_locked():
            store = self._shard.blocks
            if not self._order.resumes:
                for block_id in store.marks:
                    store.marks[block_id] = {}
            for part in self._block_files():
                for spec, tensors, marks in read_blocks(self._storage, part, wanted):
                    kept = marks if self._order.resumes else {}
                    store.restore(spec.id, tensors, kept)

    # ---- what is this server's ----

    def _tables(self) -> Iterable[str]:
        wanted = self._order.tables
        return [name for name in self._manifest.tables if wanted is None or name in wanted]

    def _pieces(self, name: str) -> list[Piece]:
        pieces = self._manifest.tables[name].pieces
        return [p for p in pieces if self._owned[p.low : p.high + 1].any()]

    def _blocks(self) -> dict[str, int]:
        """Wanted blocks of this server: id -> elements."""
        wanted = self._order.parameters
        specs = self._shard.blocks.specs()
        return {s.id: s.size for s in specs if wanted is None or s.param in wanted}

    def _block_files(self) -> list[BlocksFile]:
        wanted = self._blocks()
        return [p for p in self._manifest.blocks if any(b.spec.id in wanted for b in p.blocks)]


def check_rows(storage: Storage, piece: Piece, schema: pa.Schema) -> None:
    """Whether the rows are those of the piece's buckets. Raises Corruption, SchemaMismatch."""
    for buckets, batch in read_piece(storage, piece, schema):
        keys = batch["key"].to_numpy()
        of_keys = np.empty(len(keys), np.uint16)
        _core.buckets(keys, of_keys)
        if not np.array_equal(of_keys, np.repeat(buckets.buckets, buckets.num_rows)):
            raise Corruption(
                f"{storage.name}/{piece.rows.path}: expected keys in the order of their buckets"
            )


def _columns(table: ServedTable) -> Columns:
    return Columns.of(RowLayout.of(table.schema, table.rows))


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
