"""Imports on the servers' side: each server reads all files and keeps the rows of its buckets.

    import.begin   rows for a table will come; what an import before left unfinished is forgotten
    import.fleet   read files of Fleet's text        import.parquet   read Parquet files
    import.rows    take rows of a message
    import.end     put the rows into the table, replacing all of it or those keys; or forget them

Nothing changes in the table before import.end, so that an import happens whole or not at all.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from trireme import _core
from trireme.errors import BadRequest, DataError, NotReady
from trireme.interchange.formats.columns import DTYPES, RANK2, rows_of
from trireme.interchange.formats.fleet_rows import FleetText, RowError, Stamp, need_betas
from trireme.interchange.formats.lines import pieces
from trireme.interchange.formats.parquet import batches
from trireme.interchange.server_side.staged import StagedRows
from trireme.protocol.wire import Array, Arrays, need, need_list
from trireme.rpc import Handler, Reply, Request
from trireme.server.paths import resolve_path, storage_errors
from trireme.server.state import ServerState


class ImportHandlers:
    """The methods `import.*`; local paths stay under `root`."""

    def __init__(self, server: ServerState, root: Path) -> None:
        self._server, self._root = server, root
        self._staged: dict[str, StagedRows] = {}

    def handlers(self) -> dict[str, Handler]:
        return {
            "import.begin": self._on_begin,
            "import.fleet": self._on_fleet,
            "import.parquet": self._on_parquet,
            "import.rows": self._on_rows,
            "import.end": self._on_end,
        }

    def _on_begin(self, request: Request) -> None:
        name = need(request.body, "table", str)
        self._staged[name] = StagedRows.of(self._server, self._server.table(name))

    def _of(self, request: Request) -> StagedRows:
        name = need(request.body, "table", str)
        if name not in self._staged:
            raise NotReady(f"import: expected import.begin of table {name!r} first")
        return self._staged[name]

    def _stamp(self, request: Request) -> Stamp:
        name, time = need(request.body, "table", str), need(request.body, "time", int)
        if not 0 <= time < 2**32:
            raise BadRequest(f"import: expected time in seconds 0..2**32 - 1, found {time}")
        return Stamp(self._server.table(name).rows.version, time)

    def _files(self, request: Request) -> list[str]:
        options = need(request.body, "storage_options", dict)
        files = need_list(request.body, "files", str)
        return [resolve_path(self._root, path, options) for path in files]

    def _on_fleet(self, request: Request) -> Reply:
        """Read files of Fleet's text; answers how many lines they have together."""
        staged = self._of(request)
        accessor = need(request.body, "accessor", str)
        text = FleetText.of(staged.schema, staged.rows, accessor, need_betas(request.body))
        stamp, options = self._stamp(request), need(request.body, "storage_options", dict)

        def read(path: str, is_stopped: Callable[[], bool]) -> int:
            num_lines = 0
            for piece in pieces(path, options):
                self._check_room(staged)
                num_lines += _stage(piece, text, stamp, staged, f"{path}:{{}}", num_lines)
                if is_stopped():
                    break
            return num_lines

        counts = for_each_file(self._files(request), read, self._server.pool.threads)
        staged.flush()
        return Reply({"lines": sum(counts), "rows": staged.num_put, "keys": staged.rows.rows})

    def _on_parquet(self, request: Request) -> Reply:
        """Read Parquet files; answers how many rows they have together."""
        staged, stamp = self._of(request), self._stamp(request)
        columns = need(request.body, "columns", dict)
        options = need(request.body, "storage_options", dict)

        def read(path: str, is_stopped: Callable[[], bool]) -> int:
            num_rows = 0
            for batch in batches(path, columns, options):
                self._stage(staged, batch, stamp, path, num_rows)
                num_rows += len(batch["key"])
                if is_stopped():
                    break
            return num_rows

        counts = for_each_file(self._files(request), read, self._server.pool.threads)
        staged.flush()
        return Reply({"lines": sum(counts), "rows": staged.num_put, "keys": staged.rows.rows})

    def _on_rows(self, request: Request) -> Reply:
        """Take rows of a message, one array per column."""
        staged, arrays = self._of(request), Arrays(request.arrays)
        names = need_list(request.body, "names", str)
        for name in ("key", "weights", *names):
            if name not in DTYPES or name not in names:
                raise BadRequest(f"import.rows: expected names of {list(DTYPES)}, found {names}")
        columns = {
            name: arrays.take(name, DTYPES[name], (None, None) if name in RANK2 else (None,))
            for name in names
        }
        arrays.end()
        self._stage(staged, columns, self._stamp(request), "import", None)
        if need(request.body, "is_last", bool):
            staged.flush()
        return Reply({"keys": staged.rows.rows})

    def _stage(
        self,
        staged: StagedRows,
        columns: dict[str, Array],
        stamp: Stamp,
        where: str,
        before: int | None,
    ) -> None:
        """Take those rows that belong here.

        where: the file, for messages. before: rows of the file before these; None: an error names
            the key.
        """
        self._check_room(staged)
        buckets = np.empty(len(columns["key"]), np.uint16)
        _core.buckets(columns["key"], buckets)
        here = np.flatnonzero(staged.wanted[buckets])
        if len(here) < len(buckets):
            columns = {name: values[here] for name, values in columns.items()}
        try:
            classes, rows = rows_of(staged.schema, staged.layout, staged.rows.dims, columns, stamp)
        except RowError as error:
            key = columns["key"][error.row]
            row = f"row of key {key}" if before is None else f"row {before + here[error.row]}"
            raise DataError(f"{where}: {row}: {error}") from error
        except BadRequest as error:
            raise BadRequest(f"{where}: {error}") from error
        staged.put(columns["key"], classes, rows)

    def _check_room(self, staged: StagedRows) -> None:
        served = [table.rows for table in list(self._server.tables.values())]
        self._server.limits.check_rows([*served, staged.rows])

    def _on_end(self, request: Request) -> None:
        staged = self._of(request)
        name = need(request.body, "table", str)
        del self._staged[name]
        if not need(request.body, "commit", bool):
            return
        replace = need(request.body, "replace", bool)
        with self._server.journal.replacing():
            if replace:
                self._server.replace_rows(name, staged.rows)
            else:
                staged.merge_into(self._server.table(name))


def for_each_file(
    files: Sequence[str],
    read: Callable[[str, Callable[[], bool]], int],
    threads: int,
) -> list[int]:
    """`read(file, is_stopped)` of each, on so many threads; the first error stops all and is
    raised.
    """
    stop = threading.Event()

    def guarded(path: str) -> int:
        try:
            with storage_errors(path):
                return 0 if stop.is_set() else read(path, stop.is_set)
        except BaseException:
            stop.set()
            raise

    with ThreadPoolExecutor(max(1, min(threads, len(files)))) as pool:
        return list(pool.map(guarded, files))


def _stage(
    piece: Array, text: FleetText, stamp: Stamp, staged: StagedRows, where: str, before: int
) -> int:
    """Take the rows of a piece; returns its number of lines.

    where: "file:{}", for the number of the line. before: lines before the piece.
    """
    keys, numbers, wide, is_full, num_lines, broken = _core.parse_rows(
        piece, text.format, staged.wanted
    )
    if broken is not None:
        _, expected, found = broken
        raise DataError(f"{where.format(before + num_lines)}: expected {expected}, found {found}")
    try:
        classes, rows = text.read(keys, numbers, wide, is_full, stamp)
    except RowError as error:
        line = before + _line_of(piece, int(keys[error.row]))
        raise DataError(f"{where.format(line)}: {error}") from error
    staged.put(keys, classes, rows)
    return int(num_lines)


def _line_of(piece: Array, key: int) -> int:
    """The number, from 1, of the line that begins with this key."""
    text: bytes = piece.tobytes()
    found = re.search(rb"^(?:%d|-%d)[ \t]" % (key, 2**64 - key), text, re.MULTILINE)
    at = found.start() if found else 0
    return text.count(b"\n", 0, at) + 1
