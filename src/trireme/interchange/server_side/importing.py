"""Imports on a server: each server reads all files and keeps the rows of its buckets.

    import.begin   rows for a table follow; an unfinished import into it is discarded
    import.fleet   read files of Fleet's text        import.parquet   read Parquet files
    import.rows    take rows of a message
    import.wide    take wide rows of a message, which a pass on a device has trained; they may
                   replace others that it has taken
    import.read    the rows of keys, taken ones before those of the table
    import.discard forget the rows of a table
    import.prepare record the rows of all tables of the import, and take the room that they need;
                   from now on the server needs the coordinator's decision, and is not ready for
                   other calls before it
    import.finish  put the rows into the tables, replacing all rows or those of the same keys; or
                   forget them
    import.settled not ready while an import is prepared

No table changes before the coordinator has decided, when all servers are prepared, so an import
happens completely or not at all.
"""

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np

from trireme import _core
from trireme.errors import BadRequest, DataError, NotReady, ResourceExhausted
from trireme.interchange.formats.fleet_rows import FleetText, RowError, need_betas
from trireme.interchange.formats.lines import line_chunks
from trireme.interchange.formats.named_columns import DTYPES, RANK2, rows_of
from trireme.interchange.formats.parquet import batches
from trireme.interchange.server_side.dense_blocks import blocks_of
from trireme.interchange.server_side.staged_rows import StagedRows
from trireme.protocol.pass_lease import PassLease
from trireme.protocol.routing import IDS_BELOW, NUM_BUCKETS, Keys, buckets_of
from trireme.protocol.wire import Array, Arrays, need, need_list, need_time
from trireme.rows.feature_keys import FeatureKeys
from trireme.rpc import Deferred, Handler, Reply, Request
from trireme.server.paths import resolve_path, storage_errors
from trireme.server.prepared_import import PreparedImport, RowPart, by_buckets
from trireme.server.row_scan import check_reply, read_rows
from trireme.server.served_tables import ServedTable
from trireme.server.state import ServerState
from trireme.table import TableSchema

KeysOf = Callable[[str], Iterator[Keys]]
PlacesOf = Callable[[str, int], Iterator[str]]


class ImportHandlers:
    """The methods `import.*`; local paths stay under `root`."""

    def __init__(self, server: ServerState, root: Path) -> None:
        self._server, self._root = server, root
        self._staged: dict[str, StagedRows] = {}
        self._taking = threading.Lock()  # room for what is prepared

    def handlers(self) -> dict[str, Handler]:
        return {
            "import.begin": self._on_begin,
            "import.fleet": self._on_fleet,
            "import.parquet": self._on_parquet,
            "import.rows": self._on_rows,
            "import.wide": self._on_wide,
            "import.read": self._on_read,
            "import.discard": self._on_discard,
            "import.prepare": self._on_prepare,
            "import.finish": self._on_finish,
            "import.settled": lambda _: self._server.check_settled(),
        }

    def _on_begin(self, request: Request) -> None:
        lease, server = PassLease.of_import(request.body), self._server
        with server.lock:
            server.leases.check(lease)
        server.check_settled()
        name, id = need(request.body, "table", str), need(request.body, "id", str)
        is_read = need({"is_read": True, **request.body}, "is_read", bool)
        table = server.table(name)
        self._staged.pop(name, None)  # first: frees its memory
        self._staged[name] = StagedRows.of(server, table, id, is_read=is_read)

    def _current(self) -> dict[str, StagedRows]:
        """The rows whose tables were not dropped since."""
        tables = self._server.tables
        return {name: one for name, one in self._staged.items() if tables.get(name) is one.table}

    def _staged_rows(self, request: Request) -> StagedRows:
        """Of the request's import. Raises NotReady: it has none here, or not any more."""
        name, id = need(request.body, "table", str), need(request.body, "id", str)
        return self._staged_of(id, [name])[name]

    def _staged_of(self, id: str, names: Sequence[str]) -> dict[str, StagedRows]:
        staged = self._current()  # another request may discard them meanwhile
        if missing := [name for name in names if name not in staged or staged[name].id != id]:
            raise NotReady(
                f"import: expected rows of tables {missing}, found none: another import into"
                " them has begun, or this server was restarted; import again"
            )
        return {name: staged[name] for name in names}

    def _files(self, request: Request) -> list[str]:
        options = need(request.body, "storage_options", dict)
        files = need_list(request.body, "files", str)
        hosts = self._server.store_hosts
        return [resolve_path(self._root, path, options, hosts) for path in files]

    def _on_fleet(self, request: Request) -> Reply:
        staged, time = self._staged_rows(request), need_time(request.body)
        options = need(request.body, "storage_options", dict)
        accessor = need(request.body, "accessor", str)
        text = FleetText.of(staged.table.schema, staged.rows, accessor, need_betas(request.body))

        def stage(path: str) -> Iterator[int]:
            num_lines = 0
            for chunk in line_chunks(path, options):
                self._check_room()
                num_lines += (count := _stage_lines(chunk, text, time, staged, path, num_lines))
                yield count

        def keys_of(path: str) -> Iterator[Keys]:
            for chunk in line_chunks(path, options):
                yield _core.parse_rows(chunk, text.format, staged.wanted)[0]

        def places_of(path: str, key: int) -> Iterator[str]:
            num_lines = 0
            for chunk in line_chunks(path, options):
                yield from (f"{path}:{num_lines + line}" for line in _lines_of(chunk, key))
                num_lines += chunk.tobytes().count(b"\n")

        return self._read_files(request, staged, stage, keys_of, places_of)

    def _on_parquet(self, request: Request) -> Reply:
        staged, options = self._staged_rows(request), need(request.body, "storage_options", dict)
        columns = need(request.body, "columns", dict)
        feature = _feature(request)

        def stage(path: str) -> Iterator[int]:
            num_rows = 0
            for batch in batches(path, columns, options, feature):
                self._stage(staged, batch, request, path, num_rows)
                num_rows += len(batch["key"])
                yield len(batch["key"])

        def keys_of(path: str) -> Iterator[Keys]:
            for batch in batches(path, columns, options, feature):
                yield batch["key"][staged.wanted[buckets_of(batch["key"])] > 0]

        def places_of(path: str, key: int) -> Iterator[str]:
            num_rows = 0
            for batch in batches(path, columns, options, feature):
                rows = np.flatnonzero(batch["key"] == np.uint64(key))
                yield from (f"{path}: row {num_rows + row}" for row in rows)
                num_rows += len(batch["key"])

        return self._read_files(request, staged, stage, keys_of, places_of)

    def _read_files(
        self,
        request: Request,
        staged: StagedRows,
        stage: Callable[[str], Iterator[int]],
        keys_of: KeysOf,
        places_of: PlacesOf,
    ) -> Reply:
        """Stage the rows of the files on several threads; returns how many lines they have. The
        first error stops all threads, and is raised. `stage` yields the number of lines of each
        part.
        """
        stop = threading.Event()

        def read(path: str) -> int:
            num_lines = 0
            try:
                with storage_errors(path):
                    for count in () if stop.is_set() else stage(path):
                        num_lines += count
                        if stop.is_set():
                            break
            except BaseException:
                stop.set()
                raise
            return num_lines

        files = self._files(request)
        staged.files += files
        with ThreadPoolExecutor(max(1, min(self._server.pool.threads, len(files)))) as pool:
            num_lines = sum(pool.map(read, files))
        staged.flush()
        if staged.num_put != staged.rows.rows:
            raise DataError(
                first_duplicate(staged, keys_of, places_of)
                or f"import of table {staged.table.schema.name!r}: expected distinct keys, found"
                f" {staged.rows.rows} of {staged.num_put}"
            )
        return Reply({"lines": num_lines, "rows": staged.num_put, "keys": staged.rows.rows})

    def _on_rows(self, request: Request) -> Reply:
        """Take rows of a message, one array per column."""
        staged, arrays = self._staged_rows(request), Arrays(request.arrays)
        names = need_list(request.body, "names", str)
        for name in ("key", "weights", *names):
            if name not in DTYPES or name not in names:
                raise BadRequest(f"import.rows: expected names of {list(DTYPES)}, found {names}")
        columns = {
            name: arrays.take(name, DTYPES[name], (None, None) if name in RANK2 else (None,))
            for name in names
        }
        arrays.end()
        self._stage(staged, columns, request, "import", None)
        if need(request.body, "is_last", bool):
            staged.flush()
        return Reply({"keys": staged.rows.rows})

    def _on_wide(self, request: Request) -> Reply:
        """Take wide rows of one row class."""
        staged, arrays = self._staged_rows(request), Arrays(request.arrays)
        row_class = need(request.body, "row_class", int)
        staged.table.schema.dim_of(row_class)
        keys = arrays.take("keys", np.uint64, (None,))
        rows = arrays.take("rows", np.uint8, (None, staged.layout.row_bytes))
        arrays.end()
        is_wanted = staged.wants_all or staged.wanted[buckets_of(keys)].all()
        if len(rows) != len(keys) or not is_wanted:
            raise BadRequest(
                f"import.wide: expected a row for each of {len(keys)} keys of this server's"
                f" buckets, found {len(rows)} rows"
            )
        self._check_room()
        classes = np.full(len(keys), row_class, np.uint8)
        staged.put_part(RowPart(keys, classes, rows))
        return Reply()

    def _on_read(self, request: Request) -> Reply:
        """As ps.rows, but rows of this import come first."""
        staged, arrays, server = self._staged_rows(request), Arrays(request.arrays), self._server
        if not staged.is_read:
            raise BadRequest("import.read: expected import.begin with is_read, found it without")
        keys = arrays.take("keys", np.uint64, (None,))
        arrays.end()
        check_reply("import.read", request, len(keys), staged.rows)
        table, num_buckets = staged.table, len(server.assignment.owned_buckets())
        mark, version = table.mark, table.rows.version
        is_present, rows = read_rows(table.rows, keys, num_buckets, server.pool)
        is_staged, taken = read_rows(staged.rows, keys, num_buckets, server.pool)
        rows[is_staged] = taken[is_staged]
        arrays_out = [(is_present | is_staged).astype(np.uint8), rows]
        return Reply({"version": version, "mark": mark}, arrays_out)

    def _stage(
        self,
        staged: StagedRows,
        columns: dict[str, Array],
        request: Request,
        where: str,
        before: int | None,
    ) -> None:
        """Stage the rows whose buckets this server owns. All are of the request's row class, if it
        names one, or heads.

        where: the file. before: rows of the file before these; None: errors name the key instead.
        """
        self._check_room()
        schema, time = staged.table.schema, need_time(request.body)
        _check_salted(schema, columns["key"], where)
        owned = np.flatnonzero(staged.wanted[buckets_of(columns["key"])])
        if len(owned) < len(columns["key"]):
            columns = {name: values[owned] for name, values in columns.items()}
        try:
            classes, rows = rows_of(schema, staged.layout, staged.rows.dims, columns, time)
            if "row_class" in request.body:
                dim = schema.dim_of(need(request.body, "row_class", int))
                dims = np.array(staged.rows.dims)[classes]
                if len(wrong := np.flatnonzero((dims != dim) & (classes < len(schema.dims)))):
                    raise RowError(int(wrong[0]), f"{dim} weights", f"{dims[wrong[0]]}")
        except RowError as error:
            key = columns["key"][error.row]
            row = f"row of key {key}" if before is None else f"row {before + owned[error.row]}"
            raise DataError(f"{where}: {row}: {error}") from error
        except BadRequest as error:
            raise BadRequest(f"{where}: {error}") from error
        staged.put(columns["key"], classes, rows)

    def _check_room(self) -> None:
        self._server.check_rows(staged=list(self._staged.values()))

    def _on_discard(self, request: Request) -> None:
        name, id = need(request.body, "table", str), need(request.body, "id", str)
        staged = self._staged.get(name)
        if staged is not None and staged.id == id:
            self._staged.pop(name, None)

    def _on_prepare(self, request: Request) -> Reply | Deferred:
        server, id = self._server, need(request.body, "id", str)
        if server.prepared is None or server.prepared.id != id:  # else by an earlier call
            names = list(dict.fromkeys(need_list(request.body, "tables", str)))
            staged = self._staged_of(id, names)
            rows = {name: one.rows for name, one in staged.items()}
            replace, blocks = need(request.body, "replace", bool), blocks_of(server, request)
            parts = {name: one.parts for name, one in staged.items()}
            lease = PassLease.of_import(request.body)
            server.prepare(PreparedImport(id, replace, rows, blocks, parts), lease)
            for name in names:
                self._staged.pop(name, None)
        with self._taking:
            if isinstance(prepared := server.prepared, PreparedImport) and prepared.id == id:
                _take_room(server, prepared)  # also again: a restarted server has none
        return server.journal.answered(Reply())

    def _on_finish(self, request: Request) -> Reply | Deferred:
        id, commit = need(request.body, "id", str), need(request.body, "commit", bool)
        server = self._server

        def finish() -> Reply:
            server.finish(id, commit=commit)
            return Reply()

        return server.journal.change_once(finish)


def _take_room(server: ServerState, prepared: PreparedImport) -> None:
    """Take the room that rows need of tables on SSD before their import is decided, by having it.
    Raises ResourceExhausted.
    """
    for name, rows in prepared.rows.items():
        table = server.table(name)
        if prepared.replace or table.rows.tier is None or name in prepared.claims | prepared.copies:
            continue
        with suppress(ResourceExhausted):  # then a copy may find room
            claim = server.with_room(partial(table.rows.claim_rows, rows, server.pool))
            if claim is not None:
                prepared.claims[name] = [claim]
                continue
        try:
            prepared.copies[name] = table.mark, _copy(server, table, rows)
        except ResourceExhausted as error:
            raise ResourceExhausted(
                f"import: table {name!r} finds no room on server {server.assignment.index}:"
                f" {error}. Nothing was imported: give the servers more memory or space on SSD, or"
                " import fewer rows at a time"
            ) from error


def _copy(server: ServerState, table: ServedTable, rows: _core.Table) -> _core.Table:
    """What a table will be with the rows of an import."""
    if table.rows.num_changes == 0 and table.rows.version == rows.version:
        return rows
    copy = server.make_rows(table.schema)
    for change, source in ((copy.copy, table.rows), (copy.merge, rows)):
        for change_some in by_buckets(change, source, server.pool):
            server.with_room(change_some)
    return copy


def _check_salted(schema: TableSchema, keys: Keys, where: str) -> None:
    """Raises DataError: ids in place of keys, which salt spreads over all of 64 bits."""
    if schema.salt and len(keys) and keys.max() < IDS_BELOW:
        raise DataError(
            f"{where}: expected keys of table {schema.name!r} with salt, those of"
            f" trireme.nn.keys_of, found ids up to {keys.max()}: give feature= for values as"
            " training takes them"
        )


def _feature(request: Request) -> FeatureKeys | None:
    """Whose values the column `key` has; None: keys."""
    if "feature" not in request.body:
        return None
    body = need(request.body, "feature", dict)
    are_strings = body.get("are_strings")
    if are_strings not in (None, False, True):
        raise BadRequest(f"import: expected are_strings true, false or null, found {are_strings!r}")
    return FeatureKeys(need(body, "name", str), need(body, "is_salted", bool), are_strings)


def _stage_lines(
    chunk: Array, text: FleetText, time: int, staged: StagedRows, path: str, before: int
) -> int:
    """Stage the rows of a chunk; returns its number of lines. before: lines before the chunk."""
    keys, numbers, wide, is_full, num_lines, broken = _core.parse_rows(
        chunk, text.format, staged.wanted
    )
    if broken is not None:
        _, expected, actual = broken
        raise DataError(f"{path}:{before + num_lines}: expected {expected}, found {actual}")
    try:
        classes, rows = text.read(keys, numbers, wide, is_full, time)
    except RowError as error:
        line = before + next(iter(_lines_of(chunk, int(keys[error.row]))), 1)
        raise DataError(f"{path}:{line}: {error}") from error
    staged.put(keys, classes, rows)
    return int(num_lines)


def _lines_of(chunk: Array, key: int) -> list[int]:
    """The numbers, from 1, of the lines that begin with this key."""
    text: bytes = chunk.tobytes()
    matches = re.finditer(rb"^(?:%d|-%d)[ \t]" % (key, 2**64 - key), text, re.MULTILINE)
    return [text.count(b"\n", 0, match.start()) + 1 for match in matches]


def first_duplicate(staged: StagedRows, keys_of: KeysOf, places_of: PlacesOf) -> str | None:
    """A key of `staged.files` that occurs twice, and where; None: the files are others now. They
    are read again, since rows do not keep their places.

    places_of: names the lines or rows of a file that have a key.
    """
    bucket = _bucket_with_fewer(staged, keys_of)
    of_bucket = [
        keys[buckets_of(keys) == bucket] for path in staged.files for keys in keys_of(path)
    ]
    distinct, counts = np.unique(np.concatenate(of_bucket), return_counts=True)
    twice = distinct[counts > 1]
    if not len(twice):
        return None
    key = int(twice[0])
    places = islice((place for path in staged.files for place in places_of(path, key)), 2)
    return f"{' and '.join(places)}: expected distinct keys, found {key} twice"


def _bucket_with_fewer(staged: StagedRows, keys_of: KeysOf) -> int:
    counts = np.zeros(NUM_BUCKETS, np.int64)
    for path in staged.files:
        for keys in keys_of(path):
            counts += np.bincount(buckets_of(keys), minlength=NUM_BUCKETS)
    owned: Sequence[int] = np.flatnonzero(staged.wanted).tolist()
    return next((b for b in owned if counts[b] > len(staged.rows.snapshot(b).keys)), owned[0])
