"""Snapshots: the rows and blocks of a server in its state folder, in the files of a checkpoint.

A snapshot belongs to the segment of the same number: it contains everything recorded before that
segment, and as much of what follows as its marks say.
"""

import logging
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from trireme.checkpoint.format.block_files import read_blocks
from trireme.checkpoint.format.json_object import JsonObject
from trireme.checkpoint.format.manifest import BlockFile, RowFiles
from trireme.checkpoint.format.row_files import BucketLines, RowColumns, read_rows
from trireme.checkpoint.server_side.block_assembly import BlockAssembly
from trireme.checkpoint.server_side.operations import OperationProgress, in_parallel
from trireme.checkpoint.server_side.rows_to_save import RowsToSave
from trireme.checkpoint.server_side.save import SavePlan, write_shard
from trireme.errors import writing
from trireme.protocol.wire import Array
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
_ALL = SavePlan(version=0, since=0, removed_since=1, prefix="", rows=RowsToSave("full", 0, {}))


def write_snapshot(server: ServerState, path: Path, progress: OperationProgress) -> int:
    """Write a snapshot while training continues, and rename it into place; returns its bytes.
    Raises ResourceExhausted: the disk is full, or the log has failed; no snapshot was made.
    """
    temporary = path.with_name(f".{path.name}")
    with writing(f"log: cannot write {path}"):
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        try:
            body = write_shard(server, LocalStorage(temporary), _ALL, progress)
            # Read after the rows: keys removed meanwhile count as of this version.
            body["version"] = server.tables.version
            Document(temporary / CONTENTS, is_synced=True).write(body)
            server.journal.wait_kept()  # or it would hold what its log may lose
            publish_folder(temporary, path, syncs_files=False)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    return sum(entry.stat().st_size for entry in path.rglob("*") if entry.is_file())


def read_snapshot(server: ServerState, path: Path) -> int:
    """Read rows and blocks of a snapshot into a server that has its tables and blocks already;
    returns the bytes read. Raises Corruption: a file is missing or damaged; names it.
    """
    storage = LocalStorage(path)
    fields = JsonObject(Document(path / CONTENTS, is_synced=True).read(), str(path / CONTENTS))
    version = fields.whole("version", 0, _NUMBER_MAX)
    row_files: list[tuple[ServedTable, RowFiles, int]] = []
    for name, table_fields in fields.object("tables").items():
        # A table made since the snapshot began is all in the log.
        if (table := server.tables.get(name)) is not None:
            since = table_fields.whole("removed_since", 0, _NUMBER_MAX)
            row_files += [(table, RowFiles.read(f), since) for f in table_fields.objects("pieces")]
    block_files = [BlockFile.read(file) for file in fields.objects("blocks")]
    entries = [entry for _, files, _ in row_files for entry in (files.rows, files.buckets)]
    entries += [file.file for file in block_files]
    progress = OperationProgress()
    in_parallel([partial(check_file, storage, *entry) for entry in entries], progress)
    in_parallel([partial(_read_rows, storage, version, *files) for files in row_files], progress)
    saved = (block.spec for file in block_files for block in file.blocks)
    assembly = BlockAssembly(server.blocks.specs(), saved, str(path))
    for file in block_files:
        for spec, tensors, marks in read_blocks(storage, file, assembly.sources):
            for block, parts in assembly.add(spec, tensors, marks):
                server.blocks.restore(block.id, parts)
    return sum(entry.num_bytes for entry in entries)


def _read_rows(
    storage: LocalStorage, version: int, table: ServedTable, files: RowFiles, removed_since: int
) -> None:
    columns = RowColumns.of_schema(table.schema, table.rows)
    for lines, batch in read_rows(storage, files, columns.schema):
        columns.restore(
            table.rows,
            _without(lines, batch["key"].to_numpy()),
            batch,
            wanted=np.ones(len(lines.buckets), bool),
            removed_at=version,
            removed_since=removed_since,
            apply=False,
        )


def _without(lines: BucketLines, keys: Array) -> BucketLines:
    """The lines without removed keys that have come back. All are restored with one version of
    removal, so a later delta may list more keys than necessary; a key with an unchanged row must
    not be among them, or the delta would lose the row.
    """
    stays = ~np.isin(lines.removed, keys)
    if stays.all():
        return lines
    ends = np.concatenate([[0], np.cumsum(stays, dtype=np.int64)])
    offsets, removed = ends[lines.removed_offsets], lines.removed[stays]
    return replace(lines, removed_offsets=offsets, removed=removed)
