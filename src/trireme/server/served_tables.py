"""The tables of one server."""

import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Lock

import numpy as np

from trireme import _core
from trireme.errors import BadRequest, NotFinite, SchemaMismatch
from trireme.protocol.routing import Floats, Keys
from trireme.protocol.wire import SHOWS_MAX, TablePush
from trireme.table import TableSchema

Ids = Sequence[tuple[int, int]]
"""(stream, sequence) of pushes."""
SavedAs = tuple[str, int]
"""Id and version of a checkpoint."""


@dataclass
class ServedTable:
    """contents: a random name of what `rows` began with. counted: by rows that were replaced."""

    schema: TableSchema
    rows: _core.Table
    contents: str = field(default_factory=lambda: uuid.uuid4().hex)
    counted: Counter[str] = field(default_factory=Counter)

    @property
    def mark(self) -> str:
        """While it stays the same no row has changed."""
        return f"{self.contents}:{self.rows.num_changes}"

    def replace(self, rows: _core.Table) -> None:
        self.counted.update(self.rows.counters)
        self.rows, self.contents = rows, uuid.uuid4().hex

    def read(self, row_class: int, keys_K: Keys, time: int, pool: _core.Pool) -> tuple[Floats, int]:
        """(K, W) rows of keys as a pull answers them, and how many keys have no row."""
        rows_KD = np.empty((len(keys_K), self.schema.dim_of(row_class)), dtype=np.float32)
        num_missing = self.rows.lookup(keys_K, rows_KD, pool, row_class) if len(keys_K) else 0
        if self.schema.pulls_statistics:
            shows_K2 = np.empty((len(keys_K), 2))
            self.rows.statistics(keys_K, shows_K2, time, False, pool)
            return np.hstack([shows_K2.astype(np.float32), rows_KD]), num_missing
        return rows_KD, num_missing

    def check_push(self, push: TablePush) -> None:
        """Raises BadRequest unless the push has gradients of the class's dim, the columns of the
        schema, and shows and clicks in [0, SHOWS_MAX]. NotFinite: a gradient is not.
        """
        name, dim, columns = push.table, self.schema.dim_of(push.row_class), push.columns
        if push.gradients.shape[1] != dim:
            raise BadRequest(
                f"push: table {name!r} has dim {dim}, found gradients of shape"
                f" {push.gradients.shape}"
            )
        if tuple(columns) != self.schema.columns:
            raise BadRequest(
                f"push: table {name!r} has the columns {list(self.schema.columns)},"
                f" found {list(columns)}"
            )
        first = _core.first_not_finite(push.gradients.reshape(-1))
        if first is not None:
            value, key = push.gradients.reshape(-1)[first], push.keys[first // dim]
            raise NotFinite(
                f"push: expected finite gradients, found {value} for key {key} of table {name!r};"
                " nothing of the push is applied here"
            )
        shows = columns.get("show_click")
        if shows is not None and shows.size and not 0 <= shows.min() <= shows.max() <= SHOWS_MAX:
            raise BadRequest(
                f"push: expected shows and clicks of table {name!r} in [0, {SHOWS_MAX:g}],"
                f" found {shows.min()} to {shows.max()}"
            )


@dataclass
class Settled:
    """Where what rows have gained was subtracted last.

    id: of that checkpoint. parts: how many rows of each of its parts. version: of the tables then,
    or when a checkpoint was loaded. A save that had begun before, with a lower one, may hold what
    was subtracted since, and is not settled: its rows are exported once more.
    """

    id: str = ""
    parts: dict[str, int] = field(default_factory=dict)
    version: int = 0

    def __post_init__(self) -> None:
        self.lock = Lock()  # for one settlement at a time

    def allows(self, id: str, version: int) -> bool:
        """Whether the checkpoint of this version may be settled."""
        return id == self.id or version >= self.version

    def num_rows(self, id: str, part: str) -> int:
        """How many rows of a part of this checkpoint were settled."""
        return self.parts.get(part, 0) if self.id == id else 0

    def note(self, id: str, part: str, num_rows: int, version: int) -> None:
        """The first rows of a part are settled, while the tables have this version."""
        if self.id != id:
            self.id, self.parts = id, {}
        self.parts[part], self.version = num_rows, version

    def end(self, version: int) -> None:
        """A load is about to replace the rows, while the tables have this version."""
        with self.lock:
            self.id, self.parts, self.version = "", {}, version


class ServedTables(dict[str, ServedTable]):
    """The tables by name. Changes need the server's lock.

    version: rows that change from now on are stamped with it.
    settled: what is known of settlements.
    """

    def __init__(self) -> None:
        super().__init__()
        self.version = 1
        self.settled = Settled()

    def check_schema(self, schema: TableSchema) -> None:
        """Raises SchemaMismatch if the table exists with another schema; shows what differs."""
        existing = self.get(schema.name)
        if existing is not None and not existing.schema.agrees_with(schema):
            raise SchemaMismatch(
                f"table {schema.name!r} exists with another schema:"
                f" {existing.schema.differing_fields(schema)}"
            )

    def add(self, schema: TableSchema, rows: _core.Table, applied: Ids) -> None:
        """Add a table. applied: the pushes that were applied before it existed."""
        rows.raise_version(self.version)
        _mark(rows, applied)
        self[schema.name] = ServedTable(schema, rows)

    def replace_rows(self, name: str, rows: _core.Table, applied: Ids) -> None:
        """Replace the rows of a table by imported ones, which have seen all pushes so far."""
        _mark(rows, applied)
        rows.raise_version(self[name].rows.version)
        self[name].replace(rows)

    def adopt_rows(self, schema: TableSchema, rows: _core.Table) -> None:
        """Replace the rows of a table, if it exists, by loaded ones, which have their own marks."""
        rows.raise_version(self.version)
        if schema.name in self:
            self[schema.name].replace(rows)
        else:
            self[schema.name] = ServedTable(schema, rows)

    def drop(self, names: Sequence[str]) -> None:
        """Remove tables with all their rows; those that do not exist are none to remove."""
        for name in names:
            self.pop(name, None)

    def forget_marks(self, streams: Sequence[int]) -> None:
        """Remove the marks of these streams: they start again at sequence 1."""
        for table in self.values():
            for stream in streams:
                table.rows.set_marks(stream, np.zeros_like(table.rows.marks(stream)))

    # ---- versions and age ----

    def raise_version(self, version: int) -> None:
        self.version = max(self.version, version)
        for table in self.values():
            table.rows.raise_version(self.version)

    def forget_removed(self, version: int) -> None:
        for table in list(self.values()):
            table.rows.forget_removed(version)

    def check_shrink(self, buckets: Sequence[int]) -> None:
        """Raises ResourceExhausted: the rows of one of these buckets find no room together."""
        numbers = np.array(buckets, np.uint32)
        for table in list(self.values()):
            table.rows.check_shrink(numbers)

    def shrink(
        self, buckets: Sequence[int], time: int, *, day_over: bool
    ) -> dict[str, dict[str, int]]:
        """Remove expired rows from these buckets; returns how many, by table and reason."""
        counts = {}
        for name, table in list(self.items()):
            version = table.rows.version
            removed = [table.rows.shrink(bucket, time, day_over, version) for bucket in buckets]
            expired, evicted = (sum(numbers) for numbers in zip((0, 0), *removed, strict=True))
            counts[name] = {"expired": expired, "evicted": evicted}
        return counts


def _mark(rows: _core.Table, applied: Ids) -> None:
    """Mark new rows as having seen all pushes that were applied before they existed."""
    if applied:
        rows.advance(applied)
