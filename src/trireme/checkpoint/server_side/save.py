"""A server's share of a save: the rows of its buckets, and its blocks.

Training goes on meanwhile: each bucket is of one moment, with the marks of that moment, so a
restart neither loses nor repeats an update that the checkpoint holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from trireme.checkpoint.format.block_files import save_blocks
from trireme.checkpoint.format.row_files import (
    BATCH_BYTES,
    BUCKETS_PER_BATCH_MAX,
    Columns,
    PieceWriter,
)
from trireme.checkpoint.server_side.choice import Choice
from trireme.checkpoint.server_side.jobs import THREADS, Progress, in_parallel
from trireme.protocol.wide_rows import RowLayout
from trireme.protocol.wire import Array
from trireme.server.state import ServedTable, ServerState
from trireme.storage.storage import Storage

PIECE_BYTES = 128 << 20
SMALL_BYTES = 16 << 20  # less is not worth several files
DELTA_SHARE = 1 / 16  # of a table, at a guess: each file of a small delta costs as much as its rows


@dataclass(frozen=True)
class SaveOrder:
    """What to save.

    version: of this save.  since: rows changed after this version; 0: all.
    removed_since: keys removed after this version, 0 for none.
    prefix: what the paths of files begin with.
    """

    version: int
    since: int
    removed_since: int
    prefix: str
    choice: Choice


def save_shard(
    server: ServerState, storage: Storage, order: SaveOrder, progress: Progress
) -> dict[str, Any]:
    """Write this server's files; returns its part of the manifest, in JSON."""
    # First: what is written from now on holds at least the batches up to these positions. What it
    # holds beyond them, its marks tell from what a run that goes on from here repeats.
    streams = server.applied_streams()
    server.raise_version(order.version + 1)
    known = max((t.rows.removed_known_since for t in list(server.tables.values())), default=0)
    if order.since == 0 and known > order.removed_since:  # no delta can follow what came before
        order = replace(order, removed_since=0)
    return {
        **write_shard(server, storage, order.prefix, lambda _: order, progress),
        "streams": streams,
        "removed_known": order.removed_since > 0,
    }


def write_shard(
    server: ServerState,
    storage: Storage,
    prefix: str,
    order_of: Callable[[ServedTable], SaveOrder],
    progress: Progress,
) -> dict[str, Any]:
    """Write the rows and blocks here as each table's order says; returns them as the manifest has
    them.
    """
    owned = server.map().owned_by(server.index)
    tables: dict[str, Any] = {}
    blocks: list[dict[str, Any]] = []
    tasks: list[Callable[[], None]] = [lambda: blocks.extend(save_blocks(server, storage, prefix))]
    for number, (name, table) in enumerate(sorted(server.tables.items())):
        save = _TableSave(table, storage, f"{prefix}tables/{number}", order_of(table), progress)
        tables[name] = {"schema": table.schema.to_wire(), "pieces": save.pieces}
        tasks += save.tasks(owned)
    in_parallel(tasks, progress)
    return {
        "tables": tables,
        "optimizer": server.blocks.class_name if blocks else None,
        "blocks": blocks,
    }


@dataclass(frozen=True)
class _TableSave:
    table: ServedTable
    storage: Storage
    folder: str
    order: SaveOrder
    progress: Progress
    pieces: list[dict[str, Any]] = field(default_factory=list)

    def tasks(self, owned: Array) -> Iterator[Callable[[], None]]:
        """One per file, which appends its piece."""
        self.progress.expect(len(owned))
        rows, order = self.table.rows, self.order
        columns = Columns.of(RowLayout.of(self.table.schema, rows))
        choose = order.choice.of(self.table)
        writer = PieceWriter(rows, columns, order.since, order.removed_since, choose)
        per_bucket = max(rows.rows * rows.row_bytes // max(len(owned), 1), 1)
        per_batch = int(np.clip(BATCH_BYTES // per_bucket, 1, BUCKETS_PER_BATCH_MAX))

        def write(low: int, high: int) -> None:
            stem = f"{self.folder}/{low:04d}-{high:04d}"
            self.pieces.append(
                writer.write(self.storage, stem, low, high, per_batch, self.progress)
            )

        for run in _runs(owned):
            share = int(per_bucket * len(run) * (DELTA_SHARE if order.since else 1))
            num_files = 1 if share < SMALL_BYTES else max(THREADS, -(-share // PIECE_BYTES))
            for part in np.array_split(run, min(num_files, len(run))):
                yield partial(write, int(part[0]), int(part[-1]))


def _runs(buckets: Array) -> list[Array]:
    """Owned buckets, ascending, cut where numbers are missing."""
    if len(buckets) == 0:
        return []
    return list(np.split(buckets, np.flatnonzero(np.diff(buckets) != 1) + 1))


def merged_streams(parts: list[Mapping[str, Any]]) -> dict[int, tuple[int, tuple[int, ...]]]:
    """What every server has of each stream; one that a server does not name begins anew."""
    found: dict[int, list[list[Any]]] = {}
    for part in parts:
        for entry in part["streams"]:
            found.setdefault(int(entry[0]), []).append(entry)
    merged = {}
    for stream, entries in found.items():
        if len(entries) == len(parts):
            _, last, position = min(entries, key=lambda entry: int(entry[1]))
            merged[stream] = (int(last), tuple(int(number) for number in position))
    return merged
