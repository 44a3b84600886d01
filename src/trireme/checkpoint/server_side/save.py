"""A server's share of a save: the rows of its buckets, and its blocks.

Training continues meanwhile: each bucket is saved as of one moment with the marks of that moment,
so that a restart neither loses nor repeats an update that the checkpoint has.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from trireme.checkpoint.format.block_files import write_tensors
from trireme.checkpoint.format.row_files import RowColumns
from trireme.checkpoint.format.row_writer import BATCH_BYTES, BUCKETS_PER_BATCH_MAX, RowWriter
from trireme.checkpoint.server_side.operations import OperationProgress, in_parallel
from trireme.checkpoint.server_side.rows_to_save import RowsToSave
from trireme.protocol.block_spec import BlockSpec
from trireme.protocol.wire import Array
from trireme.server.assignment import consecutive
from trireme.server.served_tables import ServedTable
from trireme.server.state import ServerState
from trireme.storage.checked_file import FILE_THREADS, written
from trireme.storage.storage import Storage

ROW_FILE_BYTES = 128 << 20
BLOCK_FILE_BYTES = 64 << 20  # a load reads such a file whole
SMALL_BYTES = 16 << 20  # fewer are written to one file
DELTA_SHARE = 1 / 16  # an assumed part of a table: files of a small delta cost as much as its rows


@dataclass(frozen=True)
class SavePlan:
    """What to save. version: of this save. since: rows changed after this version; 0: all.
    removed_since: keys removed after this version, 0 for none.
    prefix: the beginning of the paths of files.
    stays: of tables with rows on SSD, write where those are instead.
    """

    version: int
    since: int
    removed_since: int
    prefix: str
    rows: RowsToSave
    stays: bool = False


def save_shard(
    server: ServerState, storage: Storage, plan: SavePlan, progress: OperationProgress
) -> dict[str, Any]:
    """Write this server's files; returns its share of the manifest, in JSON."""
    # First: what is written from now on has at least the batches up to these positions. Marks tell
    # what it has beyond them, and a run that continues from here repeats.
    streams = server.applied_streams()
    server.raise_version(plan.version + 1)
    written = write_shard(server, storage, plan, progress)
    # Else no delta can follow earlier saves.
    is_known = all(t["removed_since"] <= plan.removed_since for t in written["tables"].values())
    return {**written, "streams": streams, "removed_known": is_known}


def write_shard(
    server: ServerState, storage: Storage, plan: SavePlan, progress: OperationProgress
) -> dict[str, Any]:
    """Write this server's rows and blocks. Returns them as the manifest has them, and per table the
    version since which all removed keys are in its files.
    """
    owned = server.assignment.owned_buckets()
    saves: dict[str, _TableSave] = {}
    blocks: list[dict[str, Any]] = []
    tasks: list[Callable[[], None]] = [
        lambda: blocks.extend(_save_blocks(server, storage, plan.prefix))
    ]
    for number, (name, table) in enumerate(sorted(server.tables.items())):
        save = _TableSave(table, storage, f"{plan.prefix}tables/{number}", plan, progress)
        saves[name] = save
        tasks += save.tasks(owned)
    in_parallel(tasks, progress)
    tables = {
        name: {
            "schema": save.table.schema.to_wire(),
            "pieces": [files for files, _ in save.written],
            "removed_since": max((since for _, since in save.written), default=0),
        }
        for name, save in saves.items()
    }
    return {
        "tables": tables,
        "optimizer": server.blocks.class_name if blocks else None,
        "blocks": blocks,
    }


# ---- rows ----


@dataclass(frozen=True)
class _TableSave:
    table: ServedTable
    storage: Storage
    folder: str
    plan: SavePlan
    progress: OperationProgress
    written: list[tuple[dict[str, Any], int]] = field(default_factory=list)

    def tasks(self, owned: Array) -> Iterator[Callable[[], None]]:
        """Each writes one pair of row files, and appends what `RowWriter.write` returns."""
        self.progress.expect(len(owned))
        rows, plan = self.table.rows, self.plan
        columns = RowColumns.of_schema(self.table.schema, rows)
        choose = plan.rows.of(self.table)
        use = rows.tier
        stays = plan.stays and use is not None
        writer = RowWriter(rows, columns, plan.since, plan.removed_since, choose, stays)
        num_bytes = rows.rows * rows.row_bytes
        if stays and use is not None:
            num_bytes += use["index_bytes"] - use["rows"] * rows.row_bytes
        per_bucket = max(num_bytes // max(len(owned), 1), 1)
        per_batch = int(np.clip(BATCH_BYTES // per_bucket, 1, BUCKETS_PER_BATCH_MAX))

        def write(low: int, high: int) -> None:
            stem = f"{self.folder}/{low:04d}-{high:04d}"
            self.written.append(
                writer.write(self.storage, stem, low, high, per_batch, self.progress.add)
            )

        for run in consecutive(owned):
            num_bytes = int(per_bucket * len(run) * (DELTA_SHARE if plan.since else 1))
            num_files = max(FILE_THREADS, -(-num_bytes // ROW_FILE_BYTES))
            num_files = 1 if num_bytes < SMALL_BYTES else min(num_files, len(run))
            for buckets in np.array_split(run, num_files):
                yield partial(write, int(buckets[0]), int(buckets[-1]))


# ---- blocks ----

_SavedBlock = tuple[BlockSpec, Mapping[str, Tensor], Mapping[int, int]]


def _save_blocks(server: ServerState, storage: Storage, prefix: str) -> list[dict[str, Any]]:
    """Write all blocks of this server; returns their files for the manifest. Each block is as of
    one moment, with the marks of that moment, and copied when its file is written: the copies of a
    file are all that a save takes. A block of which parts have seen different pushes is saved as
    several blocks.
    """
    files = []
    for number, group in enumerate(_file_groups(_blocks_to_save(server))):
        path = f"{prefix}blocks/server-{server.assignment.index}-{number}.safetensors"
        files.append(_write_blocks(storage, path, group))
        group.clear()  # frees them before those of the next file are copied
    return files


def _write_blocks(storage: Storage, path: str, group: list[_SavedBlock]) -> dict[str, Any]:
    """Write a file of blocks; returns it as the manifest has it."""
    tensors = {
        f"{spec.id}/{name}": tensor
        for spec, block_tensors, _ in group
        for name, tensor in block_tensors.items()
    }
    with written(storage, path) as (file, entry):
        write_tensors(file, tensors)
    distinct: dict[tuple[tuple[int, int], ...], int] = {}
    of_shared: dict[int, int] = {}  # by identity: the marks of a thousand streams are sorted once
    blocks = []
    for spec, _, marks in group:
        if id(marks) not in of_shared:
            of_shared[id(marks)] = distinct.setdefault(tuple(sorted(marks.items())), len(distinct))
        blocks.append({"spec": spec.to_wire(), "marks": of_shared[id(marks)]})
    return {"file": dict(entry), "marks": [{"applied": m} for m in distinct], "blocks": blocks}


def _blocks_to_save(server: ServerState) -> Iterator[_SavedBlock]:
    """Copies of the blocks, one after the other. Pushes run between two of them."""
    with server.blocks_lock:
        specs = server.blocks.specs()
    for spec in specs:
        with server.blocks_lock:
            parts = server.blocks.slices_of(spec.id)
        for part in parts:
            yield replace(spec, start=part.start, size=part.size), part.tensors, part.marks


def _file_groups(blocks: Iterator[_SavedBlock]) -> Iterator[list[_SavedBlock]]:
    """The blocks of each file."""
    group: list[_SavedBlock] = []
    num_bytes = 0
    for block in blocks:
        group.append(block)
        num_bytes += sum(tensor.nbytes for tensor in block[1].values())
        if num_bytes >= BLOCK_FILE_BYTES:
            yield group
            group, num_bytes = [], 0
    if group:
        yield group
