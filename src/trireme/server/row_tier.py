"""The memory that the tables of a server share, and the folders on SSD for the rows beyond it.

Each table has a folder of its own below a folder of this process, and a part of the budget: what it
takes beside rows, and of the rest as much as its share of all rows; or a budget of its own. The
folders end with the process; what a snapshot needs has a second name (log/kept_segments.py).
"""

from __future__ import annotations

import itertools
import logging
import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock, Thread
from typing import TypeVar

from trireme import _core
from trireme.byte_size import parse_bytes
from trireme.errors import BadRequest, ResourceExhausted, TriremeError, start_thread, writing
from trireme.rows.core_table import buffer_bytes, make_core_table, needed_bytes, own_bytes
from trireme.server.row_fetcher import RowFetcher
from trireme.server.ssd_folders import OwnFolders
from trireme.table import TableSchema

log = logging.getLogger("trireme.server")

_EQUAL_SHARE = 0.1  # of the rest, in equal parts; the others by the rows
_BALANCED_PUSHES = 256
_WAITS_S = 0.5  # that a change takes if it waits for room
_CLOSE_S = 60.0
_DEVICE_S_MAX = 30.0  # for a transfer; less if workers wait less than twice as long


_T = TypeVar("_T")


@dataclass
class _TieredTable:
    """name: of the table; one that is loaded or imported has two for a while.
    memory_bytes: that its declaration gives it; None: a part of the server's.
    row_bytes: of the largest row class.
    folders: where its segments are, one in each of `RowTier.roots`.
    """

    rows: Callable[[], _core.Table | None]
    name: str
    memory_bytes: int | None
    row_bytes: int
    folders: list[Path]


class RowTier:
    """Threads: any.

    memory_bytes: of all tables, with their indexes and buffers; None: those that do not say how
        much they take are in memory.
    folders: exist, on SSD; segments are spread over them.
    timeout_s: that workers wait for a server. A disk that does not answer is given up before.
    fetcher: brings rows into memory ahead of pulls.
    Raises BadRequest: no folder, one that cannot be used, or one twice.
    """

    def __init__(
        self, memory_bytes: int | None, folders: Sequence[Path], timeout_s: float = 300.0
    ) -> None:
        self.memory_bytes = memory_bytes
        self._device_s = min(_DEVICE_S_MAX, timeout_s / 2)
        self.roots = [folder.resolve() for folder in folders]
        self._tables: list[_TieredTable] = []
        self._numbers = itertools.count(1)
        self._num_pushes = itertools.count(1)
        self._lock = Lock()  # guards the tables and their parts; held while rows leave memory
        self._changes: dict[object, float] = {}  # that are under way: since when
        self._wanted = Event()  # the memory is to be divided anew
        self._is_closed = False
        self._divider: Thread | None = None
        self._starting = Lock()  # of the thread that divides
        self.fetcher = RowFetcher()
        self._folders = OwnFolders(folders)

    def close(self) -> None:
        """Remove the folders of this process. The tables end first."""
        self._is_closed = True
        self._wanted.set()
        for thread in (self.fetcher.end(), self._divider):
            if thread is None:
                continue
            thread.join(_CLOSE_S)
            if thread.is_alive():
                log.warning("%s has not ended in %g s: the disk hangs", thread.name, _CLOSE_S)
        self._folders.close()

    def make_rows(self, schema: TableSchema) -> _core.Table:
        """A table whose rows lie here, if it or the server says so. Raises BadRequest: the schema.
        ResourceExhausted: one more table finds no room.
        """
        memory = None if schema.tier is None else schema.tier.memory_bytes
        if memory is None and self.memory_bytes is None:
            if schema.tier is None:
                return make_core_table(schema)
            raise BadRequest(
                f"Table {schema.name!r}: ssd=True: expected memory= or a server with --memory"
                " (TRIREME_MEMORY, tr.init(memory=)), found neither"
            )
        with self._lock:
            number = next(self._numbers)
            folders = [folder / f"table-{number}" for folder in self._folders.paths]
            row_bytes = max(make_core_table(schema).class_bytes)
            new = _TieredTable(_no_rows, schema.name, memory, row_bytes, folders)
            tables = self._living()
            parts = self._parts([*tables, new])
            self._set_parts(tables, parts)
            for path in folders:
                with writing(f"--ssd_dir: cannot use {path}"):
                    path.mkdir()
            write_bytes, read_bytes = buffer_bytes(self._memory_of(new))
            rows = make_core_table(
                schema,
                ssd=[_core.SsdDevice(str(path), self._folders.io) for path in folders],
                memory_bytes=max(parts[-1], self._own_bytes(new)),
                number=zlib.crc32(schema.name.encode()),
                buffer_bytes=write_bytes,
                read_bytes=read_bytes,
                timeout_ms=max(int(1000 * self._device_s), 1),
            )
            new.rows = weakref.ref(rows)
            self._tables.append(new)
            return rows

    def declare(self, rows: _core.Table, schema: TableSchema) -> None:
        """Give a table the memory that a later declaration says. Raises ResourceExhausted: there is
        less; it keeps what it has.
        """
        assert schema.tier is not None
        with self._lock:
            table = self._of(rows)
            old, table.memory_bytes = table.memory_bytes, schema.tier.memory_bytes
            try:
                tables = self._living()
                self._set_parts(tables, self._parts(tables))
            except BaseException:
                table.memory_bytes = old
                raise

    def folders_of(self, rows: _core.Table) -> list[Path]:
        """Where a table's segments are, a folder in each of `roots`."""
        return self._of(rows).folders

    def _living(self) -> list[_TieredTable]:
        """The tables. Those that were loaded or imported into others, and replaced, are forgotten.
        Requires: the lock.
        """
        self._tables = [table for table in self._tables if table.rows() is not None]
        return self._tables

    def _of(self, rows: _core.Table) -> _TieredTable:
        return next(table for table in self._tables if table.rows() is rows)

    def note_push(self) -> None:
        """Divide the memory anew now and then, as rows come."""
        if next(self._num_pushes) % _BALANCED_PUSHES == 0:
            self._wanted.set()
            self._start_divider()

    def _start_divider(self) -> None:
        """A thread, as dividing waits for a disk, and who wants it may hold what every request
        needs. Where the system refuses it, later: what calls this must not stop halfway.
        """
        with self._starting:
            if self._divider is not None and self._divider.is_alive():
                return
            thread = Thread(target=self._divide_at_need, name="trireme-divide", daemon=True)
            try:
                start_thread(thread)
                self._divider = thread
            except ResourceExhausted as error:
                log.warning("the tables keep their parts of the memory for now: %s", error)

    def _divide_at_need(self) -> None:
        """Divide the memory when that is wanted, and once for each change that waits."""
        while not self._is_closed:
            is_wanted = self._wanted.wait(_WAITS_S / 2)
            late = time.monotonic() - _WAITS_S
            waiting = [key for key, began in self._changes.copy().items() if began < late]
            for key in waiting:
                self._changes.pop(key, None)
            if is_wanted or waiting:
                with self._lock:
                    self._wanted.clear()
                    self._divide_anew()

    def with_room(self, change: Callable[[], _T]) -> _T:
        """change(), which changes rows and may be repeated. If it finds no room, or waits for it,
        perhaps for calls that wait for its own, the memory is divided anew. Raises as `change`.
        """
        self._start_divider()
        key = object()
        self._changes[key] = time.monotonic()
        try:
            return change()
        except ResourceExhausted:
            with self._lock:
                if not self._divide_anew():
                    raise
        finally:
            self._changes.pop(key, None)
        return change()

    def _divide_anew(self) -> bool:
        """Requires: the lock. Returns False: the tables keep what they have."""
        try:
            tables = self._living()
            self._set_parts(tables, self._parts(tables))
        except TriremeError as error:
            log.warning("the tables keep their parts of the memory: %s", error)
            return False
        return True

    def _memory_of(self, table: _TieredTable) -> int:
        """That it has alone, or shares with others."""
        return (self.memory_bytes if table.memory_bytes is None else table.memory_bytes) or 0

    def _own_bytes(self, table: _TieredTable) -> int:
        """What a table takes beside rows."""
        if (rows := table.rows()) is None:
            return own_bytes(self._memory_of(table), table.row_bytes)
        assert rows.tier is not None
        return rows.tier["own_bytes"]

    def _parts(self, tables: Sequence[_TieredTable]) -> list[int]:
        """The budget of each table. Raises ResourceExhausted."""
        parts = [0] * len(tables)
        shared = [i for i, table in enumerate(tables) if table.memory_bytes is None]
        total, what = self.memory_bytes, "--memory"
        for name in dict.fromkeys(t.name for t in tables if t.memory_bytes is not None):
            own = [i for i, t in enumerate(tables) if t.name == name and t.memory_bytes is not None]
            memory = tables[own[-1]].memory_bytes
            assert memory is not None
            self._divide(f"memory= of table {name!r}", memory, tables, own, parts)
            if total is not None:
                total, what = total - memory, "--memory without the memory= of tables"
        if total is not None and total < 0:
            assert self.memory_bytes is not None
            raise ResourceExhausted(
                f"server: --memory: expected at least {self.memory_bytes - total} bytes, which the"
                f" memory= of tables says, found {self.memory_bytes}: give it more, or them less"
            )
        if total is not None and shared:
            self._divide(what, total, tables, shared, parts)
        return parts

    def _divide(
        self,
        what: str,
        num_bytes: int,
        tables: Sequence[_TieredTable],
        numbers: Sequence[int],
        parts: list[int],
    ) -> None:
        """Divide memory among some of the tables: each gets what it takes beside rows and an
        eighth of that, which the core wants too, and a share of the rest.
        """
        owns = [self._own_bytes(tables[i]) for i in numbers]
        rows = [tables[i].rows() for i in numbers]
        sizes = [0 if table is None else table.rows * table.row_bytes for table in rows]
        needed = [needed_bytes(own) for own in owns]
        rest = num_bytes - sum(needed)
        if rest < 0:
            raise ResourceExhausted(
                f"server: {what}: expected at least {sum(needed)} bytes, which tables need beside"
                f" their rows ({len(owns)} here; one is two while it is loaded or imported), found"
                f" {num_bytes}: give it more (`trireme size` tells how much the rows take)"
            )
        all_rows = sum(sizes)
        for i, least, size in zip(numbers, needed, sizes, strict=True):
            share = size / all_rows if all_rows else 1 / len(owns)
            parts[i] = least + int(rest * (_EQUAL_SHARE / len(owns) + (1 - _EQUAL_SHARE) * share))

    @staticmethod
    def _set_parts(tables: Sequence[_TieredTable], parts: Sequence[int]) -> None:
        """Those that get less give it up first."""
        changes = []
        for part, rows in zip(parts, (table.rows() for table in tables), strict=False):
            if rows is not None and (use := rows.tier) is not None:
                changes.append((part - use["memory_bytes"], part, rows))
        for _, part, rows in sorted(changes, key=lambda change: change[0]):
            rows.set_memory(part)


def make_row_tier(
    memory: str | None, ssd_dir: str | None, timeout_s: float = 300.0
) -> RowTier | None:
    """The tier of --memory and --ssd_dir; None without them. timeout_s: see RowTier.
    Raises BadRequest: --memory alone.
    """
    if ssd_dir is None:
        if memory is not None:
            raise BadRequest(
                "server: expected --ssd_dir with --memory (where rows beyond it lie), found"
                f" memory={memory!r} alone"
            )
        return None
    folders = [Path(part.strip()) for part in ssd_dir.split(",") if part.strip()]
    num_bytes = None if memory is None else parse_bytes("--memory", memory)
    return RowTier(num_bytes, folders, timeout_s)


def _no_rows() -> None:
    """The reference of a table that is not made yet."""
