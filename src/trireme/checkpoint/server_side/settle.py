"""Settling: after a base or delta is published, what its rows had gained counts as exported."""

import logging
from collections.abc import Sequence
from functools import partial

import pyarrow as pa

from trireme import _core
from trireme.checkpoint.format.arrow_arrays import to_numpy
from trireme.checkpoint.format.manifest import CheckpointManifest, RowFiles
from trireme.checkpoint.format.row_files import RowColumns, read_rows
from trireme.checkpoint.server_side.operations import OperationProgress, in_parallel
from trireme.protocol.wire import Array
from trireme.server.served_tables import ServedTable
from trireme.server.state import ServerState
from trireme.storage.storage import Storage
from trireme.table import TableSchema

log = logging.getLogger("trireme.checkpoint")


def settle(
    server: ServerState, storage: Storage, manifest: CheckpointManifest, progress: OperationProgress
) -> None:
    """Subtract what the saved rows had gained from this server's rows; what pushes have added
    since stays. Not if another save or a load has been between: see `Settled`.
    """
    owned = set(server.assignment.owned_buckets().tolist())
    tasks = []
    for name, saved in manifest.tables.items():
        table = server.tables.get(name)
        if table is None or not settles(manifest, table.schema):
            continue
        wanted = [f for f in saved.files if not owned.isdisjoint(range(f.low, f.high + 1))]
        progress.expect(sum(files.num_rows for files in wanted))
        tasks += [
            partial(_settle_files, server, table, storage, manifest, files, progress)
            for files in wanted
        ]
    in_parallel(tasks, progress)


def settles(manifest: CheckpointManifest, schema: TableSchema) -> bool:
    """Whether what the rows of the checkpoint had gained counts as exported by it."""
    return manifest.mode in ("base", "delta") and schema.is_scored


def gains_of(batch: pa.RecordBatch) -> tuple[Array, Array]:
    """The keys of these rows of a file, and what each had gained since the last export."""
    return to_numpy(batch["key"]), to_numpy(batch["delta_score"])


def settle_rows(
    rows: _core.Table, keys: Array, gained: Array, claims: Sequence[_core.Claim]
) -> None:
    """Subtract what these rows had gained. Raises the error of a row: those before it are done."""
    done = 0
    while done < len(keys):
        done += rows.settle(keys[done:], gained[done:], claims)


def _settle_files(
    server: ServerState,
    table: ServedTable,
    storage: Storage,
    manifest: CheckpointManifest,
    files: RowFiles,
    progress: OperationProgress,
) -> None:
    columns, saved = RowColumns.of_schema(table.schema, table.rows), (manifest.id, manifest.version)
    for number, (_, batch) in enumerate(read_rows(storage, files, columns.schema)):
        if not server.settle(table, saved, f"{files.rows.path} {number}", *gains_of(batch)):
            text = "%s: another save or load was at the same time: the next delta repeats some rows"
            log.warning(text, storage.name)
            return
        progress.add(batch.num_rows)
