"""Which rows of a table a save takes, and what it means for their statistics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from trireme.checkpoint.format.manifest import Manifest, Piece
from trireme.checkpoint.format.row_files import Choose, Columns, read_piece
from trireme.checkpoint.server_side.hot import Budget, bins_of
from trireme.checkpoint.server_side.jobs import Progress, in_parallel
from trireme.errors import BadRequest
from trireme.protocol.row_selection import MODES, selected
from trireme.protocol.wide_rows import RowLayout
from trireme.protocol.wire import Array, need
from trireme.server.state import ServedTable, ServerState
from trireme.storage.storage import Storage
from trireme.table import TableSchema


def _share(values: Any) -> tuple[int, int]:
    match values:
        case [int(above), int(within)]:
            return above, within
    raise BadRequest(f"checkpoint: expected two numbers as a share, found {values!r}"[:200])


@dataclass(frozen=True)
class Choice:
    """mode: of the save.  time: data time that rows are judged at.  budgets: of a hot set."""

    mode: str
    time: int
    budgets: Mapping[str, Budget]

    @staticmethod
    def from_wire(body: Mapping[str, Any], server: int) -> Choice:
        budgets = {}
        for name, budget in need(body, "budgets", dict).items():
            match budget:
                case [int(bin), list(shares)] if 0 <= server < len(shares):
                    budgets[str(name)] = Budget(bin, *_share(shares[server]))
                case _:
                    raise BadRequest(f"checkpoint: expected a bin and shares, found {budget!r}")
        mode = need(body, "mode", str)
        if mode not in MODES:
            raise BadRequest(f"checkpoint: expected a mode of {MODES}, found {mode!r}")
        return Choice(mode, need(body, "time", int), budgets)

    def of(self, table: ServedTable) -> Choose | None:
        """Which rows of the table are saved; None: all that the version asks for."""
        if self.mode == "hot":
            if table.schema.name not in self.budgets:
                raise BadRequest(
                    f"checkpoint: expected a budget of table {table.schema.name!r}, which was made"
                    f" after rows were counted, found those of {sorted(self.budgets)}"
                )
            budget, newest = self.budgets[table.schema.name], table.rows.version
            return lambda records: budget.take(bins_of(records, newest))
        if self.mode in ("base", "delta") and table.schema.is_scored:
            # A base is of the end of the day.
            day_over = self.mode == "base"
            return partial(_selected, table.schema, self.mode, self.time, day_over)
        return None


def _selected(
    schema: TableSchema, mode: str, time: int, day_over: bool, records: Array
) -> npt.NDArray[np.bool_]:
    return selected(schema, records, mode, time, day_over)


def settle(server: ServerState, storage: Storage, manifest: Manifest, progress: Progress) -> None:
    """After a base or delta has been published: what the rows that it holds have gained until then
    is exported. Pushes meanwhile stay.
    """
    owned = set(server.map().owned_by(server.index).tolist())
    tasks = []
    for name, part in manifest.tables.items():
        table = server.tables.get(name)
        if table is None or not takes_gains(manifest, table.schema):
            continue
        mine = [p for p in part.pieces if not owned.isdisjoint(range(p.low, p.high + 1))]
        progress.expect(sum(piece.num_rows for piece in mine))
        of_piece = partial(_settle_piece, server, table, storage, manifest.id)
        tasks += [partial(of_piece, piece, progress) for piece in mine]
    in_parallel(tasks, progress)


def takes_gains(manifest: Manifest, schema: TableSchema) -> bool:
    """Whether what the rows of the checkpoint had gained counts as exported by it."""
    return manifest.mode in ("base", "delta") and schema.is_scored


def gains_of(batch: Any) -> tuple[Array, Array]:
    """The keys of these rows of a file, and what each had gained since the last export."""
    return np.array(batch["key"]), np.array(batch["delta_score"])


def _settle_piece(
    server: ServerState,
    table: ServedTable,
    storage: Storage,
    id: str,
    piece: Piece,
    progress: Progress,
) -> None:
    columns = Columns.of(RowLayout.of(table.schema, table.rows))
    for number, (_, batch) in enumerate(read_piece(storage, piece, columns.schema)):
        server.settle(table, id, f"{piece.rows.path} {number}", *gains_of(batch))
        progress.add(batch.num_rows)
