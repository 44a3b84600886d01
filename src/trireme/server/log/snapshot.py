"""Snapshots: the rows and blocks of a server in its state folder, in the files of a checkpoint.

A snapshot belongs to the segment of the same number: it contains everything recorded before that
segment, and as much of what follows as its marks say.
"""

import itertools
import logging
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from trireme.checkpoint.format.arrow_arrays import to_numpy
from trireme.checkpoint.format.block_files import read_blocks
from trireme.checkpoint.format.json_object import JsonObject
from trireme.checkpoint.format.manifest import BlockFile, FileEntry, RowFiles
from trireme.checkpoint.format.row_files import Places, RowColumns, read_places, read_rows
from trireme.checkpoint.server_side.block_assembly import BlockAssembly
from trireme.checkpoint.server_side.operations import OperationProgress, in_parallel
from trireme.checkpoint.server_side.rows_to_save import RowsToSave
from trireme.checkpoint.server_side.save import SavePlan, write_shard
from trireme.errors import Corruption, writing
from trireme.server.log.kept_segments import adopt_segments, keep_segments, sweep_segments
from trireme.server.log.state_folder import StateFolder
from trireme.server.served_tables import ServedTable
from trireme.server.state import ServerState
from trireme.storage.atomic_folder import publish_folder
from trireme.storage.checked_file import check_file
from trireme.storage.document import Document
from trireme.storage.local import LocalStorage

log = logging.getLogger("trireme.server")

CONTENTS = "contents"
_NUMBER_MAX = (1 << 32) - 1
# All rows, and the removed keys as far back as they are known, for deltas after recovery. The first
# delta is since version 1.
_ALL = SavePlan(
    version=0, since=0, removed_since=1, prefix="", rows=RowsToSave("full", 0, {}), stays=True
)


def write_snapshot(
    server: ServerState, folder: StateFolder, number: int, progress: OperationProgress
) -> int:
    """Write the snapshot of segment `number` while training continues, and rename it into place;
    returns its bytes. Rows on SSD stay where they are. Older snapshots and segments are removed.
    Raises ResourceExhausted: the disk is full, or the log has failed; no snapshot was made.
    """
    path = folder.snapshot(number)
    with writing(f"log: cannot write {path}"):
        temporary = path.with_name(f".{path.name}")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        try:
            body = _write_rows(server, temporary, path.name, progress)
            # Read after the rows: keys removed meanwhile count as of this version.
            body["version"] = server.tables.version
            Document(temporary / CONTENTS, is_synced=True).write(body)
            server.journal.wait_kept()  # or it would hold what its log may lose
            publish_folder(temporary, path)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            kept = {old.name for old in folder.snapshots().values()}  # this one too, once renamed
            sweep_segments(server.tier, server.state_id, kept)
            raise
    folder.sweep(number)
    sweep_segments(server.tier, server.state_id, {path.name})
    return sum(entry.stat().st_size for entry in path.rglob("*") if entry.is_file())


def _write_rows(
    server: ServerState, folder: Path, snapshot: str, progress: OperationProgress
) -> dict[str, Any]:
    """Write rows and blocks; returns the contents."""
    # A table made from now on is all in the log.
    tiered = {name: t.rows for name, t in server.tables.items() if t.rows.tier is not None}
    with ExitStack() as holds:
        for rows in tiered.values():
            holds.callback(rows.hold_segments().release)
        body = write_shard(server, LocalStorage(folder), _ALL, progress)
        if server.tier is not None:
            kept = keep_segments(server.tier, server.state_id, snapshot, tiered)
            for name, segments in kept.items():
                body["tables"][name]["segments"] = segments
    return body


@dataclass(frozen=True)
class _Piece:
    """A part of a table in a snapshot. places: the file that says where rows on SSD are."""

    table: ServedTable
    files: RowFiles
    places: FileEntry | None
    removed_since: int

    @property
    def entries(self) -> list[FileEntry]:
        entries = [self.files.rows, self.files.buckets]
        return entries if self.places is None else [*entries, self.places]


def read_snapshot(server: ServerState, path: Path) -> int:
    """Read rows and blocks of a snapshot into a server that has its tables and blocks already;
    returns the bytes read. Raises Corruption: a file is missing or damaged; names it. BadRequest:
    rows lie on SSD, in folders that the server does not use.
    """
    storage = LocalStorage(path)
    fields = JsonObject(Document(path / CONTENTS, is_synced=True).read(), str(path / CONTENTS))
    version = fields.whole("version", 0, _NUMBER_MAX)
    # A table made since the snapshot began is all in the log.
    tables = [
        (server.tables[name], table)
        for name, table in fields.object("tables").items()
        if name in server.tables
    ]
    pieces = [
        _Piece(
            table,
            RowFiles.read(piece),
            FileEntry.read(piece.object("places")) if "places" in piece.values else None,
            table_fields.whole("removed_since", 0, _NUMBER_MAX),
        )
        for table, table_fields in tables
        for piece in table_fields.objects("pieces")
    ]
    block_files = [BlockFile.read(file) for file in fields.objects("blocks")]
    entries = [entry for piece in pieces for entry in piece.entries]
    entries += [file.file for file in block_files]
    progress = OperationProgress()
    in_parallel([partial(check_file, storage, *entry) for entry in entries], progress)
    with ExitStack() as holds:
        for table, table_fields in tables:
            if "segments" in table_fields.values:
                adopt_segments(server.tier, table.rows, table_fields.object("segments"))
                # Those without rows so far stay until all rows are known.
                holds.callback(table.rows.hold_segments().release)
        read = partial(_read_piece, server, storage, version)
        in_parallel([partial(read, piece) for piece in pieces], progress)
    saved = (block.spec for file in block_files for block in file.blocks)
    assembly = BlockAssembly(server.blocks.specs(), saved, str(path))
    for file in block_files:
        for spec, tensors, marks in read_blocks(storage, file, assembly.sources):
            for block, parts in assembly.add(spec, tensors, marks):
                server.blocks.restore(block.id, parts)
    return sum(entry.num_bytes for entry in entries)


def _read_piece(server: ServerState, storage: LocalStorage, version: int, piece: _Piece) -> None:
    rows = piece.table.rows
    columns = RowColumns.of_schema(piece.table.schema, rows)
    all_places: Iterator[Places | None] = itertools.repeat(None)
    if piece.places is not None:
        all_places = read_places(storage, piece.places.path)
    for lines, batch in read_rows(storage, piece.files, columns.schema):
        places = next(all_places, None)
        if piece.places is not None and (
            places is None or len(places[0]) != len(lines.buckets) + 1
        ):
            raise Corruption(
                f"{piece.places.path}: expected places of {len(lines.buckets)} buckets"
            )
        restore = partial(
            columns.restore,
            rows,
            lines.without(to_numpy(batch["key"])),
            batch,
            wanted=np.ones(len(lines.buckets), bool),
            removed_at=version,
            removed_since=piece.removed_since,
            apply=False,
            places=places,
        )
        server.with_room(restore)
