"""Requests that have every server read rows, and put them into its tables."""

import logging
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from trireme import _core
from trireme.errors import BadRequest, Corruption, DataError, TriremeError, Unavailable
from trireme.interchange.formats.named_columns import checked
from trireme.interchange.worker_side.dense_blocks import TIMEOUT_S, block_calls
from trireme.protocol.block_messages import BlockTensors
from trireme.protocol.pass_lease import PassLease
from trireme.protocol.routing import Keys, Split
from trireme.protocol.wire import Array
from trireme.rows.wide_rows import WideRows
from trireme.rpc import Call, Reply
from trireme.table import RowClassId
from trireme.worker.client import WorkerClient

log = logging.getLogger("trireme.interchange")

ROWS_PER_MESSAGE = 1 << 16
FILES_PER_REQUEST_MIN = 16  # for the threads of a server
REQUESTS_MAX = 100

Watch = Callable[[float], None]
"""Is called with the fraction done."""


@contextmanager
def importing(
    client: WorkerClient,
    tables: Sequence[str],
    *,
    replace: bool,
    blocks: BlockTensors | None = None,
    id: str | None = None,
    decide: Callable[[str], bool] | None = None,
    is_read: bool = True,
    lease: PassLease | None = None,
) -> Iterator[str]:
    """Rows that the block sends for the id that it gets come into the tables when it ends without
    an error, and these tensors into the dense blocks; else none do.

    replace: the tables have these rows alone afterwards; else they replace rows of the same keys.
    id: of the import, default a random one. decide: asks the coordinator whether the import of this
    id takes place; default: it does, unless it was ended already. is_read: whether its rows may be
    read before its end, or come twice. lease: of the pass on a device that the import ends.

    Raises Leased: a pass of some worker has the rows. Fenced: this pass does not have them any
    more.
    """
    id = id or new_id()
    of_pass = {} if lease is None else {"lease": lease.to_wire()}
    for table in tables:
        body = {"table": table, "id": id, "is_read": is_read, **of_pass}
        client.servers.everywhere_current("import.begin", body)
    try:
        yield id
        body = {"id": id, "tables": list(tables), "replace": replace, **of_pass}
        calls = block_calls(client, "import.prepare", body, blocks or {})
        client.servers.call_all(calls, TIMEOUT_S)
    except BaseException:
        try:
            for table in tables:
                client.servers.everywhere("import.discard", {"table": table, "id": id})
            client.servers.finish("import", id, commit=False, timeout_s=client.timeout_s)
        except TriremeError as error:  # the next import, pull or push does it
            log.warning("import: the servers keep unfinished rows of %s: %s", tables, error)
        raise
    commit = decide is None or decide(id)
    if not client.servers.finish("import", id, commit=commit, timeout_s=TIMEOUT_S):
        raise Unavailable(
            f"import into {list(tables)}: another worker has pulled or pushed meanwhile, and ended"
            " it before it was decided; nothing was imported, import again"
        )


def new_id() -> str:
    """The id of an import that has not begun."""
    return uuid.uuid4().hex


def read_files(
    client: WorkerClient,
    method: str,
    table: str,
    files: Sequence[str],
    options: Mapping[str, Any],
    storage_options: Mapping[str, Any] | None = None,
    watch: Watch | None = None,
    *,
    id: str,
) -> int:
    """Have the servers read files; returns how many rows they have. Within `importing` of this id.

    method: import.fleet or import.parquet, with its options.

    Raises DataError: a line is wrong, or a key occurs twice. Corruption: the servers do not see the
    same files.
    """
    lines = [0] * len(client.servers.map.servers)
    replies: Sequence[Reply] = []
    body = {"table": table, "id": id, **options, "storage_options": dict(storage_options or {})}
    step = max(FILES_PER_REQUEST_MIN, -(-len(files) // REQUESTS_MAX))
    for begin in range(0, len(files), step):  # some files at a time, to show the progress
        part = list(files[begin : begin + step])
        replies = client.servers.everywhere(method, {**body, "files": part}, timeout_s=TIMEOUT_S)
        lines = [n + int(reply.body["lines"]) for n, reply in zip(lines, replies, strict=True)]
        if watch is not None:
            watch((begin + len(part)) / len(files))
    # The last replies have the rows and keys of all requests. Every server has read every line, and
    # each row belongs to one server.
    num_rows, num_keys = (
        sum(int(reply.body[field]) for reply in replies) for field in ("rows", "keys")
    )
    if set(lines) != {num_rows}:
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


def send_wide_rows(
    client: WorkerClient,
    class_id: RowClassId,
    keys: Keys,
    rows: WideRows,
    pool: _core.Pool,
    id: str,
) -> None:
    """Send (n, row_bytes) wide rows of distinct keys to the servers that own them. Within
    `importing` of this id.
    """
    for begin in range(0, len(keys), ROWS_PER_MESSAGE):
        part = slice(begin, begin + ROWS_PER_MESSAGE)
        body = {"table": class_id.table, "id": id, "row_class": class_id.row_class}
        split = Split(keys[part], client.servers.map, pool)
        parts = zip(
            client.servers.map.servers,
            split.parts(keys[part]),
            split.parts(rows[part]),
            strict=True,
        )
        calls = [Call(endpoint, "import.wide", body, [k, r]) for endpoint, k, r in parts]
        client.servers.call_all(calls, TIMEOUT_S)


def send_rows(
    client: WorkerClient,
    table: str,
    arrays: Mapping[str, Array],
    *,
    time: int,
    pool: _core.Pool,
    id: str,
    row_class: int | None = None,
) -> int:
    """Send rows in arrays to the servers that own them; returns how many. Within `importing` of
    this id. row_class: of all rows that are no heads; None: any.

    Raises BadRequest: columns that do not fit. DataError: a key occurs twice.
    """
    missing = {"key", "weights"} - arrays.keys()
    if missing:
        raise BadRequest(f"import: expected columns key and weights, found {sorted(arrays)}")
    columns = {name: checked(name, np.asarray(values)) for name, values in arrays.items()}
    num_rows = len(columns["key"])
    lengths = {name: len(values) for name, values in columns.items()}
    if set(lengths.values()) != {num_rows}:
        raise BadRequest(f"import: expected columns of one length, found {lengths}")
    order = np.argsort(columns["key"], kind="stable")
    same = np.flatnonzero(np.diff(columns["key"][order]) == 0)
    if len(same):
        first, second = order[same[0]], order[same[0] + 1]
        raise DataError(
            f"import of table {table!r}: expected distinct keys, found {columns['key'][first]} in"
            f" rows {first} and {second}"
        )
    body: dict[str, Any] = {"table": table, "id": id, "names": list(columns), "time": int(time)}
    body |= {} if row_class is None else {"row_class": row_class}
    num_keys = 0
    for begin in range(0, num_rows, ROWS_PER_MESSAGE):
        body["is_last"] = begin + ROWS_PER_MESSAGE >= num_rows
        part = {name: values[begin : begin + ROWS_PER_MESSAGE] for name, values in columns.items()}
        split = Split(part["key"], client.servers.map, pool)
        by_column = [split.parts(values) for values in part.values()]
        calls = [
            Call(endpoint, "import.rows", body, [column[server] for column in by_column])
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
