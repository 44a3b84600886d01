"""The memory that the tables of a server share, and the folders on SSD for the rows beyond it.

Each table has a folder of its own below a folder of this process, and a part of the budget: what it
takes beside rows, and of the rest as much as its share of all rows. The folders hold nothing that
outlives the process: what a server must not lose is in its log and its snapshots.
"""

from __future__ import annotations

import fcntl
import itertools
import logging
import os
import shutil
import uuid
import weakref
import zlib
from collections.abc import Sequence
from pathlib import Path
from threading import Lock

from trireme import _core
from trireme.byte_size import parse_bytes
from trireme.errors import BadRequest, ResourceExhausted, Unavailable, writing
from trireme.rows.core_table import make_core_table
from trireme.table import TableSchema

log = logging.getLogger("trireme.server")

_PREFIX, _LOCK = "trireme-rows-", "lock"
_BUFFER_BYTES_MIN, _BUFFER_BYTES_MAX = 64 << 10, 1 << 20
_BUFFERS = 4
_TABLE_BYTES = 3 << 20  # that a new table takes beside its buffers, about
_EQUAL_SHARE = 0.1  # of the rest, in equal parts; the others by the rows
_BALANCED_PUSHES = 256


class RowTier:
    """Threads: any.

    memory_bytes: of all tables, with their indexes and buffers.
    folders: exist, on SSD; segments are spread over them.
    Raises BadRequest: no folder, or one that cannot be used.
    """

    def __init__(self, memory_bytes: int, folders: Sequence[Path]) -> None:
        self.memory_bytes = memory_bytes
        self._buffer_bytes = min(max(memory_bytes >> 10, _BUFFER_BYTES_MIN), _BUFFER_BYTES_MAX)
        self.roots = [folder.resolve() for folder in folders]
        self._tables: list[weakref.ref[_core.Table]] = []
        self._folders_of: weakref.WeakKeyDictionary[_core.Table, list[Path]] = (
            weakref.WeakKeyDictionary()
        )
        self._numbers = itertools.count(1)
        self._num_pushes = itertools.count(1)
        self._lock = Lock()
        self._locks: list[int] = []
        self._folders: list[Path] = []
        try:
            for folder in folders:
                self._folders.append(self._own_folder(folder))
        except BaseException:
            self.close()
            raise
        self.io = self._find_io()

    def close(self) -> None:
        """Remove the folders of this process. The tables end first."""
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)  # what is left is removed at the next start
        for lock in self._locks:
            os.close(lock)
        self._folders, self._locks = [], []

    def make_rows(self, schema: TableSchema) -> _core.Table:
        """A table whose rows lie here. Raises BadRequest: the schema. ResourceExhausted: one more
        table finds no room.
        """
        with self._lock:
            parts, own = self._parts(new=1), _TABLE_BYTES + _BUFFERS * self._buffer_bytes
            self._set_parts(parts[:-1])
            number = next(self._numbers)
            paths = [folder / f"table-{number}" for folder in self._folders]
            for path in paths:
                with writing(f"--ssd_dir: cannot use {path}"):
                    path.mkdir()
            rows = make_core_table(
                schema,
                ssd=[_core.SsdDevice(str(path), self.io) for path in paths],
                memory_bytes=max(parts[-1], own),
                number=zlib.crc32(schema.name.encode()),
                buffer_bytes=self._buffer_bytes,
            )
            self._tables.append(weakref.ref(rows))
            self._folders_of[rows] = paths
            return rows

    def folders_of(self, rows: _core.Table) -> list[Path]:
        """Where a table's segments are, a folder in each of `roots`."""
        return self._folders_of[rows]

    def note_push(self) -> None:
        """Divide the memory anew now and then, as rows come."""
        if next(self._num_pushes) % _BALANCED_PUSHES == 0 and self._lock.acquire(blocking=False):
            try:
                self._set_parts(self._parts())
            except (ResourceExhausted, Unavailable) as error:
                log.warning("the tables keep their parts of --memory: %s", error)
            finally:
                self._lock.release()

    def _parts(self, new: int = 0) -> list[int]:
        """The budget of each table, and of new ones. Raises ResourceExhausted."""
        self._tables = [table for table in self._tables if table() is not None]
        owns, sizes = [], []
        for table in filter(None, (table() for table in self._tables)):
            use = table.tier
            assert use is not None
            owns.append(use["own_bytes"])
            sizes.append(table.rows * table.row_bytes)
        owns += [_TABLE_BYTES + _BUFFERS * self._buffer_bytes] * new
        sizes += [0] * new
        rest = self.memory_bytes - sum(owns)
        if rest < sum(owns) // 8:
            raise ResourceExhausted(
                f"server: --memory is {self.memory_bytes} bytes, and {len(owns)} tables take"
                f" {sum(owns)} beside their rows; give it at least {sum(owns) * 9 // 8}"
            )
        all_rows = sum(sizes)
        shares = [size / all_rows if all_rows else 1 / len(owns) for size in sizes]
        return [
            own + int(rest * (_EQUAL_SHARE / len(owns) + (1 - _EQUAL_SHARE) * share))
            for own, share in zip(owns, shares, strict=True)
        ]

    def _set_parts(self, parts: Sequence[int]) -> None:
        """Those that get less give it up first."""
        changes = []
        for part, table in zip(parts, (table() for table in self._tables), strict=True):
            if table is not None and (use := table.tier) is not None:
                changes.append((part - use["memory_bytes"], part, table))
        for _, part, table in sorted(changes, key=lambda change: change[0]):
            table.set_memory(part)

    def _own_folder(self, parent: Path) -> Path:
        """A new folder in `parent`, locked as long as this process lives. Those of processes that
        have ended are removed.
        """
        if not parent.is_dir():
            raise BadRequest(f"--ssd_dir: expected a folder, found {str(parent)!r}")
        for old in parent.glob(_PREFIX + "*"):
            self._remove_if_left(old)
        folder = parent / f"{_PREFIX}{uuid.uuid4().hex[:12]}"
        with writing(f"--ssd_dir: cannot use {folder}"):
            folder.mkdir()
            self._locks.append(_locked(folder))
        return folder

    @staticmethod
    def _remove_if_left(folder: Path) -> None:
        try:
            lock = _locked(folder)
        except OSError:  # its process lives, or another one removes it
            return
        try:
            shutil.rmtree(folder, ignore_errors=True)
            log.info("removed %s, which a process that has ended left behind", folder)
        finally:
            os.close(lock)

    def _find_io(self) -> str:
        try:
            _core.SsdDevice(str(self._folders[0]), "io_uring")
        except Unavailable as error:
            log.info("rows on SSD are read by threads, which costs more CPU: %s", error)
            return "threads"
        return "io_uring"


def _locked(folder: Path) -> int:
    """Raises OSError: another process has it."""
    lock = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise
    return lock


def make_row_tier(memory: str | None, ssd_dir: str | None) -> RowTier | None:
    """The tier of --memory and --ssd_dir; None without them. Raises BadRequest: one of the two."""
    if memory is None and ssd_dir is None:
        return None
    if memory is None or ssd_dir is None:
        raise BadRequest(
            "server: expected --memory and --ssd_dir together (how much memory tables take, and"
            f" where their other rows lie), found memory={memory!r}, ssd_dir={ssd_dir!r}"
        )
    folders = [Path(part.strip()) for part in ssd_dir.split(",") if part.strip()]
    return RowTier(parse_bytes("--memory", memory), folders)
