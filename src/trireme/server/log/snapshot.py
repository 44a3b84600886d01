"""Snapshots: the rows and blocks of a server in its state folder, in the files of a checkpoint.

A snapshot belongs to the segment of the same number: it contains everything recorded before that
segment, and as much of what follows as its marks say.
"""

from __future__ import annotations

import logging
import shutil
from functools import partial
from pathlib import Path

import numpy as np

from trireme import _core
from trireme.checkpoint.format.block_files import read_blocks
from trireme.checkpoint.format.fields import Fields
from trireme.checkpoint.format.manifest import BlocksFile, FileEntry, Piece
from trireme.checkpoint.format.recut import Recut
from trireme.checkpoint.format.row_files import Buckets, cells_of, read_piece
from trireme.checkpoint.server_side.choice import Choice
from trireme.checkpoint.server_side.jobs import Progress, in_parallel
from trireme.checkpoint.server_side.load import columns_of
from trireme.checkpoint.server_side.save import SaveOrder, write_shard
from trireme.errors import writing
from trireme.protocol.wire import Array
from trireme.server.state import ServedTable, ServerState
from trireme.storage.document import Document
from trireme.storage.storage import LocalStorage, read_chunks, sync_folder

log = logging.getLogger("trireme.server")

CONTENTS = "contents"
_NUMBER_MAX = (1 << 32) - 1


def write_snapshot(server: ServerState, path: Path, is_stopping: Progress) -> int:
    """Write a snapshot while training goes on, and rename it into place; returns its bytes.

    Raises:
        ResourceExhausted: the disk is full; no snapshot was made.
    """
    temporary = path.with_name(f".{path.name}")
    with writing(f"log: cannot write {path}"):
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        try:
            body = write_shard(server, LocalStorage(temporary), "", _order_of, is_stopping)
            body["version"] = server.version  # after: keys removed meanwhile count as of this one
            Document(temporary / CONTENTS, is_synced=True).write(body)
            for folder in [*(p for p in temporary.rglob("*") if p.is_dir()), temporary]:
                sync_folder(folder)
            temporary.rename(path)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        sync_folder(path.parent)
    return sum(entry.stat().st_size for entry in path.rglob("*") if entry.is_file())


def _order_of(table: ServedTable) -> SaveOrder:
    """All rows, and the removed keys as far back as they are known, for deltas after recovery."""
    known = max(table.rows.removed_known_since, 1)  # the first delta is since version 1
    return SaveOrder(0, 0, known, "", Choice("full", 0, {}))


def read_snapshot(server: ServerState, path: Path) -> int:
    """Read rows and blocks of a snapshot into a server that has its tables and blocks already;
    returns the bytes read.

    Raises:
        Corruption: a file is missing or damaged; names it.
    """
    storage = LocalStorage(path)
    fields = Fields(Document(path / CONTENTS, is_synced=True).read(), str(path / CONTENTS))
    version = fields.whole("version", 0, _NUMBER_MAX)
    pieces = []
    for name, table_fields in fields.object("tables").items():
        # A table made since the snapshot began is all in the log.
        if (table := server.tables.get(name)) is not None:
            pieces += [(table, Piece.read(piece)) for piece in table_fields.objects("pieces")]
    blocks = [BlocksFile.read(part) for part in fields.objects("blocks")]
    files = [entry for _, piece in pieces for entry in (piece.rows, piece.buckets)]
    files += [part.file for part in blocks]
    progress = Progress()
    in_parallel([partial(_check_file, storage, entry) for entry in files], progress)
    tasks = [partial(_read_piece, storage, table, piece, version) for table, piece in pieces]
    in_parallel(tasks, progress)
    saved = (block.spec for part in blocks for block in part.blocks)
    recut = Recut(server.blocks.specs(), saved, str(path))
    for part in blocks:
        for spec, tensors, marks in read_blocks(storage, part, recut.sources):
            for block, parts in recut.add(spec, tensors, marks):
                server.blocks.restore(block.id, parts)
    return sum(entry.num_bytes for entry in files)


def _check_file(storage: LocalStorage, entry: FileEntry) -> None:
    for _ in read_chunks(storage, entry.to_json()):
        pass


def _read_piece(storage: LocalStorage, table: ServedTable, piece: Piece, version: int) -> None:
    columns = columns_of(table.schema)
    known = max(table.rows.removed_known_since, 1)
    for buckets, batch in read_piece(storage, piece, columns.schema):
        keys = batch["key"].to_numpy()
        offsets, removed = _without(buckets, keys)
        _core.restore_columns(
            table.rows,
            buckets=buckets.buckets,
            num_rows=buckets.num_rows,
            wanted=np.ones(len(buckets.buckets), bool),
            keys=keys,
            classes=batch["row_class"].to_numpy(),
            columns=cells_of(batch),
            widths=list(columns.widths),
            mark_offsets=buckets.mark_offsets,
            streams=buckets.streams,
            sequences=buckets.sequences,
            removed_offsets=offsets,
            removed=removed,
            pending_offsets=buckets.pending_offsets,
            pending=buckets.pending,
            removed_at=version,
            removed_since=known,
            apply=False,
        )


def _without(buckets: Buckets, keys: Array) -> tuple[Array, Array]:
    """The removed keys except those that have come back. All are restored with one version of
    removal, so a later delta may list more keys than necessary; a key with an unchanged row must
    not be among them, or the delta would lose the row.
    """
    stays = ~np.isin(buckets.removed, keys)
    if stays.all():
        return buckets.removed_offsets, buckets.removed
    ends = np.concatenate([[0], np.cumsum(stays, dtype=np.int64)])
    return ends[buckets.removed_offsets], buckets.removed[stays]
