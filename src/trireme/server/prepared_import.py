"""An import between its two phases: every server has recorded its rows, and the coordinator has
not decided yet, or this server does not know how.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trireme import _core
from trireme.protocol.routing import NUM_BUCKETS, Keys
from trireme.protocol.wire import Array
from trireme.rows.wide_rows import WideRows
from trireme.server.served_tables import ServedTable

PREPARE, ROWS, BLOCK = "log.import", "log.import_rows", "log.import_block"
PREPARED, FINISH = "log.import_prepared", "log.import_end"
CHANGED_BUCKETS = 64
"""At a time."""


class RowPart(NamedTuple):
    """Rows as they came: keys, row classes, wide rows."""

    keys: Keys
    classes: npt.NDArray[np.uint8]
    rows: WideRows

    def write_to(self, table: _core.Table, pool: _core.Pool) -> None:
        table.write_wide(*self, pool, is_stamped=True)


@dataclass
class PreparedImport:
    """rows: of each table, in a table that nobody reads. parts: of a table, that come after them.

    Rows that come into a table get the version that it has then, and not one that it had when they
    were read: what is saved in between lacks them, and the next delta has what is newer.

    blocks: tensors that replace those of the same name.
    replace: the tables have these rows alone afterwards; else they replace rows of the same keys.
    is_whole: all rows are recorded; a crash may have kept the rest from the log.
    claims, copies: the room that its rows need of tables on SSD. A copy has them and, while the
    table has this mark and the copy's version, those of the table. After a crash there is neither:
    where copies had room, a change of the tables has it.
    """

    what: ClassVar = "import"
    end: ClassVar = FINISH

    id: str
    replace: bool
    rows: dict[str, _core.Table]
    blocks: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    parts: dict[str, list[RowPart]] = field(default_factory=dict)
    is_whole: bool = True
    claims: dict[str, list[_core.Claim]] = field(default_factory=dict)
    copies: dict[str, tuple[str, _core.Table]] = field(default_factory=dict)

    def replacement(self, table: ServedTable) -> _core.Table | None:
        """What replaces the rows of a table; None: they are changed where they are. Requires: the
        server's lock, until they are replaced.
        """
        mark, copy = self.copies.pop(name := table.schema.name, ("", None))
        if copy is not None and (mark, copy.version) == (table.mark, table.rows.version):
            self.rows[name] = copy
            return copy
        return self.rows[name] if self.replace else None

    def changes(self, table: ServedTable, pool: _core.Pool) -> Iterator[Callable[[], object]]:
        """What puts the rows into a table that do not replace its own, some at a time: a call that
        finds no room is repeated.
        """
        rows, claims = self.rows[name := table.schema.name], self.claims.get(name, ())
        if rows is not table.rows:
            yield from by_buckets(table.rows.merge, rows, pool, claims)
        if parts := self.parts.get(name):
            yield partial(table.rows.write_wide_parts, parts, pool, is_stamped=True)

    def records(self) -> Iterator[tuple[str, dict[str, Any], Sequence[Array]]]:
        """What a log keeps of it; the first record discards an earlier import."""
        yield PREPARE, {"id": self.id, "replace": self.replace, "tables": list(self.rows)}, ()
        for name, rows in self.rows.items():
            for bucket, content in filled_buckets(rows):
                body = {"id": self.id, "table": name, "bucket": bucket}
                yield ROWS, body, [content.keys, content.classes, content.rows]
            for part in self.parts.get(name, ()):
                yield ROWS, {"id": self.id, "table": name}, list(part)
        for block_id, tensors in self.blocks.items():
            body = {"id": self.id, "block": block_id, "names": list(tensors)}
            yield BLOCK, body, [tensor.numpy() for tensor in tensors.values()]
        yield PREPARED, {"id": self.id}, ()

    def add_block(self, body: Mapping[str, Any], arrays: Sequence[Array]) -> None:
        """Take back a record of a block."""
        tensors = [torch.from_numpy(np.array(array)) for array in arrays]
        self.blocks[body["block"]] = dict(zip(body["names"], tensors, strict=True))

    def add(self, body: Mapping[str, Any], arrays: Sequence[Array], pool: _core.Pool) -> None:
        """Take back a record of rows."""
        keys, classes, rows = arrays
        is_part = "bucket" not in body
        self.rows[body["table"]].write_wide(keys, classes, rows, pool, is_stamped=is_part)


def by_buckets(
    change: Callable[..., object], rows: _core.Table, pool: _core.Pool, *claims: Any
) -> Iterator[Callable[[], object]]:
    """`Table.merge` or `Table.copy` of another table with these rows, some buckets at a time."""
    for first in range(0, NUM_BUCKETS, CHANGED_BUCKETS):
        yield partial(change, rows, first, CHANGED_BUCKETS, pool, *claims)


def filled_buckets(rows: _core.Table) -> Iterator[tuple[int, _core.Snapshot]]:
    """The buckets that have rows."""
    for bucket in range(NUM_BUCKETS):
        content = rows.snapshot(bucket)
        if len(content.keys):
            yield bucket, content
