"""Imports and exports on the worker's side: find files, tell every server, put all in place."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import numpy as np

from trireme import _core
from trireme.errors import BadRequest, Corruption, DataError, TriremeError
from trireme.interchange.formats.columns import checked
from trireme.protocol.routing import Split
from trireme.protocol.wire import Array
from trireme.rpc import Call, Reply
from trireme.worker.client import Client

log = logging.getLogger("trireme.interchange")

TIMEOUT_S = 3600.0  # for one order
ROWS_PER_MESSAGE = 1 << 16
FILES_PER_ORDER_MIN = 16  # for the threads of a server
ORDERS_MAX = 100

Watch = Callable[[float], None]
"""Is told which fraction is done."""


def unwatched(_: float) -> None:
    """Nobody wants to know."""


@contextmanager
def importing(client: Client, tables: Sequence[str], *, replace: bool) -> Iterator[None]:
    """Rows that the block sends come into the tables when it ends well, else nothing does.

    Args:
        replace: True: they are then all that the tables have. False: they take the place of rows of
            the same keys, the others stay.
    """
    for table in tables:
        client.servers.everywhere("import.begin", {"table": table}, timeout_s=TIMEOUT_S)
    try:
        yield
    except BaseException:
        for table in tables:
            _forget(client, table)
        raise
    for table in tables:
        body = {"table": table, "commit": True, "replace": replace}
        client.servers.everywhere("import.end", body, timeout_s=TIMEOUT_S)


def _forget(client: Client, table: str) -> None:
    """What cannot be told is no loss: the next import begins anew."""
    try:
        body = {"table": table, "commit": False, "replace": False}
        client.servers.everywhere("import.end", body)
    except TriremeError as error:
        log.warning("import: the servers keep unfinished rows of table %r: %s", table, error)


def read_fleet_rows(
    client: Client,
    table: str,
    files: Sequence[str],
    *,
    accessor: str,
    betas: tuple[float, float],
    time: int,
    storage_options: Mapping[str, Any] | None = None,
    watch: Watch = unwatched,
) -> int:
    """Have the servers read files of Fleet's text; returns how many rows. Within `importing`.

    Raises:
        DataError: a line is wrong, or a key is there twice. Corruption: the servers do not see the
            same files.
    """
    body = {
        "table": table,
        "accessor": accessor,
        "betas": [float(beta) for beta in betas],
        "time": int(time),
        "storage_options": dict(storage_options or {}),
    }
    return _read(client, "import.fleet", body, files, watch)


def _read(
    client: Client, method: str, body: Mapping[str, Any], files: Sequence[str], watch: Watch
) -> int:
    """Some files at a time, so that there is something to watch."""
    lines = [0] * len(client.servers.map.servers)
    replies: Sequence[Reply] = []
    step = max(FILES_PER_ORDER_MIN, -(-len(files) // ORDERS_MAX))
    for begin in range(0, len(files), step):
        part = list(files[begin : begin + step])
        replies = client.servers.everywhere(method, {**body, "files": part}, timeout_s=TIMEOUT_S)
        lines = [n + int(of.body["lines"]) for n, of in zip(lines, replies, strict=True)]
        watch((begin + len(part)) / len(files))
    return _count(body["table"], files, set(lines), replies)


def _count(table: str, files: Sequence[str], lines: set[int], replies: Sequence[Reply]) -> int:
    """Every server has read every line, and each is the row of one of them.

    replies: the last ones, with the rows and keys of all orders.
    """
    num_rows, num_keys = (
        sum(int(reply.body[field]) for reply in replies) for field in ("rows", "keys")
    )
    if lines != {num_rows}:
        raise Corruption(
            f"import of table {table!r}: the servers have read {sorted(lines)} rows, of which"
            f" {num_rows} have an owner; the files must be on storage that all servers share"
        )
    if num_keys != num_rows:
        raise DataError(
            f"import of table {table!r}: expected distinct keys, found {num_rows} rows of"
            f" {num_keys} keys in {len(files)} files, {files[0]} the first"
        )
    return num_rows


def list_files(folder: str, storage_options: Mapping[str, Any] | None = None) -> list[str]:
    """The files of a folder, by name. Raises DataError if there is no folder, or nothing in it."""
    options = dict(storage_options or {})
    try:
        filesystem, path = fsspec.core.url_to_fs(folder, **options)
        found = sorted(
            entry["name"] for entry in filesystem.ls(path, detail=True) if entry["type"] == "file"
        )
    except (OSError, ValueError, ImportError) as error:
        raise DataError(f"import: cannot list {folder}: {error}") from error
    if not found:
        raise DataError(f"import: expected files in {folder}, found none")
    if "://" in folder:
        return [filesystem.unstrip_protocol(name) for name in found]
    return found


def write_fleet_rows(
    client: Client,
    table: str,
    folder: Path,
    *,
    accessor: str,
    betas: tuple[float, float],
    time: int,
    shard_num: int,
    compress: bool,
) -> int:
    """Have the servers write a table as Fleet's text; returns how many rows. A key is in the file
    of its shard, key % shard_num.
    """
    body = {
        "table": table,
        "folder": str(folder),
        "accessor": accessor,
        "betas": [float(beta) for beta in betas],
        "time": int(time),
        "shard_num": shard_num,
        "gzip": compress,
    }
    replies = client.servers.everywhere("export.fleet", body, timeout_s=TIMEOUT_S)
    client.servers.everywhere("export.join", body, timeout_s=TIMEOUT_S)
    found = len(list_files(str(folder)))
    if found != shard_num:
        raise Corruption(
            f"export: expected {shard_num} files in {folder}, found {found};"
            " the folder must be on storage that all servers and worker 0 share"
        )
    return sum(int(reply.body["rows"]) for reply in replies)


# ---- Parquet, arrays ----


def parquet_files(
    source: str | os.PathLike[str] | Sequence[str], storage_options: Mapping[str, Any] | None
) -> list[str]:
    """The files of a path, which may be a file or a folder of *.parquet, or of a list of files."""
    if not isinstance(source, (str, os.PathLike)):
        return [os.path.abspath(path) if "://" not in path else path for path in source]
    path = os.fspath(source)
    if "://" not in path:
        path = os.path.abspath(path)
    if path.endswith(".parquet") and not os.path.isdir(path):
        return [path]
    found = [file for file in list_files(path, storage_options) if file.endswith(".parquet")]
    if not found:
        raise DataError(f"import: expected files *.parquet in {path}, found none")
    return found


def read_parquet(
    client: Client,
    table: str,
    files: Sequence[str],
    columns: Mapping[str, str],
    *,
    time: int,
    storage_options: Mapping[str, Any] | None = None,
    watch: Watch = unwatched,
) -> int:
    """Have the servers read Parquet files; returns how many rows. Within `importing`.

    Raises: as `read_fleet_rows`.
    """
    body = {
        "table": table,
        "columns": dict(columns),
        "time": int(time),
        "storage_options": dict(storage_options or {}),
    }
    return _read(client, "import.parquet", body, files, watch)


def send_rows(
    client: Client, table: str, arrays: Mapping[str, Array], *, time: int, pool: _core.Pool
) -> int:
    """Send rows in arrays to the servers that own them; returns how many. Within `importing`.

    Raises:
        BadRequest: columns that do not fit. DataError: a key is there twice.
    """
    missing = {"key", "weights"} - arrays.keys()
    if missing:
        raise BadRequest(f"import: expected columns key and weights, found {sorted(arrays)}")
    columns = {name: checked(name, np.asarray(values)) for name, values in arrays.items()}
    num_rows = len(columns["key"])
    lengths = {name: len(values) for name, values in columns.items()}
    if set(lengths.values()) != {num_rows}:
        raise BadRequest(f"import: expected columns of one length, found {lengths}")
    num_keys = 0
    for begin in range(0, num_rows, ROWS_PER_MESSAGE):
        is_last = begin + ROWS_PER_MESSAGE >= num_rows
        body = {"table": table, "names": list(columns), "time": int(time), "is_last": is_last}
        part = {name: values[begin : begin + ROWS_PER_MESSAGE] for name, values in columns.items()}
        split = Split(part["key"], client.servers.map, pool)
        parts = [split.parts(values) for values in part.values()]
        calls = [
            Call(endpoint, "import.rows", body, [of[server] for of in parts])
            for server, endpoint in enumerate(client.servers.map.servers)
        ]
        replies = client.servers.call_all(calls, TIMEOUT_S)
        num_keys = sum(int(reply.body["keys"]) for reply in replies)
    if num_keys != num_rows:
        raise DataError(
            f"import of table {table!r}: expected distinct keys, found {num_rows} rows of"
            f" {num_keys} keys"
        )
    return num_rows


def write_parquet(
    client: Client,
    table: str,
    folder: str,
    *,
    state: bool,
    storage_options: Mapping[str, Any] | None = None,
) -> int:
    """Have the servers write a table as Parquet; returns how many rows."""
    body = {
        "table": table,
        "folder": folder,
        "state": state,
        "storage_options": dict(storage_options or {}),
    }
    replies = client.servers.everywhere("export.parquet", body, timeout_s=TIMEOUT_S)
    return sum(int(reply.body["rows"]) for reply in replies)
