"""Snapshots: the rows and blocks of a server in its state folder, in the files of a checkpoint.

A snapshot goes with the segment of the same number: it holds whatever was recorded before that
segment, and of what follows as much as its marks say.
"""

from __future__ import annotations

import logging
import shutil
from functools import partial
from pathlib import Path

import numpy as np

from trireme import _core
from trireme.checkpoint.format.block_files import read_blocks
from trireme.checkpoint.format.json_object import JsonObject
from trireme.checkpoint.format.manifest import BlockFile, RowFiles
from trireme.checkpoint.format.row_columns import RowColumns
from trireme.checkpoint.format.row_reader import BucketLines, cells_of, read_rows
from trireme.checkpoint.server_side.block_assembly import BlockAssembly
from trireme.checkpoint.server_side.operations import OperationProgress, in_parallel
from trireme.checkpoint.server_side.rows_to_save import RowsToSave
from trireme.checkpoint.server_side.save import SaveOptions, write_shard
from trireme.errors import writing
from trireme.protocol.core_table import ServedTable
from trireme.protocol.wire import Array
from trireme.server.shard import Shard
from trireme.storage.checked_file import check_file
from trireme.storage.document import Document
from trireme.storage.local import LocalStorage, sync_folder

log = logging.getLogger("trireme.server")

CONTENTS = "contents"
_NUMBER_MAX = (1 << 32) - 1


def write_snapshot(shard: Shard, path: Path, is_stopping: OperationProgress) -> int:
    """Write a snapshot beside what goes on, and put it in place; returns its bytes.

    Raises:
        ResourceExhausted: the disk is full; nothing is in its place.
    """
    aside = path.with_name(f".{path.name}")
    with writing(f"log: cannot write {path}"):
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        try:
            body = write_shard(shard, LocalStorage(aside), "", _order_of, is_stopping)
            body["version"] = shard.version  # after: keys removed meanwhile count as of this one
            Document(aside / CONTENTS, is_synced=True).write(body)
            for folder in [*(p for p in aside.rglob("*") if p.is_dir()), aside]:
                sync_folder(folder)
            aside.rename(path)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        sync_folder(path.parent)
    return sum(entry.stat().st_size for entry in path.rglob("*") if entry.is_file())


def _order_of(table: ServedTable) -> SaveOptions:
    """All rows, and which keys were removed, as far as that is known: deltas go on after it."""
    known = max(table.rows.removed_known_since, 1)  # the first delta is since version 1
    return SaveOptions(0, 0, known, "", RowsToSave("full", 0, {}))


def read_snapshot(shard: Shard, path: Path) -> int:
    """Put rows and blocks of a snapshot into a server that has its tables and blocks already;
    returns the bytes read.

    Raises:
        Corruption: a file is missing or damaged; names it.
    """
    storage = LocalStorage(path)
    fields = JsonObject(Document(path / CONTENTS, is_synced=True).read(), str(path / CONTENTS))
    version = fields.whole("version", 0, _NUMBER_MAX)
    pieces = []
    for name, of in fields.object("tables").items():
        # A table made since the snapshot began is all in the log.
        if (table := shard.tables.get(name)) is not None:
            pieces += [(table, RowFiles.read(piece)) for piece in of.objects("pieces")]
    blocks = [BlockFile.read(part) for part in fields.objects("blocks")]
    files = [entry for _, piece in pieces for entry in (piece.rows, piece.buckets)]
    files += [part.file for part in blocks]
    progress = OperationProgress()
    in_parallel([partial(check_file, storage, entry.to_json()) for entry in files], progress)
    tasks = [partial(_read_piece, storage, table, piece, version) for table, piece in pieces]
    in_parallel(tasks, progress)
    saved = (block.spec for part in blocks for block in part.blocks)
    recut = BlockAssembly(shard.blocks.specs(), saved, str(path))
    for part in blocks:
        for spec, tensors, marks in read_blocks(storage, part, recut.sources):
            for block, parts in recut.add(spec, tensors, marks):
                shard.blocks.restore(block.id, parts)
    return sum(entry.num_bytes for entry in files)


def _read_piece(storage: LocalStorage, table: ServedTable, piece: RowFiles, version: int) -> None:
    columns = RowColumns.of_schema(table.schema)
    known = max(table.rows.removed_known_since, 1)
    for buckets, batch in read_rows(storage, piece, columns.schema):
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


def _without(buckets: BucketLines, keys: Array) -> tuple[Array, Array]:
    """The removed keys but for those that have come back. All count as removed at one version, so
    a delta since an earlier one may name keys that it need not; were a row among them that has not
    changed since, that delta would lose it.
    """
    stays = ~np.isin(buckets.removed, keys)
    if stays.all():
        return buckets.removed_offsets, buckets.removed
    ends = np.concatenate([[0], np.cumsum(stays, dtype=np.int64)])
    return ends[buckets.removed_offsets], buckets.removed[stays]
