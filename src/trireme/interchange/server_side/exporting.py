"""Exports on a server: each server writes the rows of its buckets into a shared folder.

export.parquet   part-SSS-NNNNN.parquet, SSS this server's number
export.fleet     a text fragment for each of Fleet's shards
export.join      the files of some shards, from the fragments of all servers
export.blocks    the dense blocks of this server, with the optimizer's state
"""

import gzip
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, TypeVar

import fsspec
import numpy as np
import pyarrow.parquet as pq

from trireme.errors import BadRequest, writing
from trireme.interchange.formats.fleet_rows import FleetText, need_betas
from trireme.interchange.formats.parquet import arrow_schema, record_batch
from trireme.interchange.server_side.staged_rows import KeyedRows
from trireme.protocol.wide_rows import RowLayout
from trireme.protocol.wire import Array, need
from trireme.rpc import Handler, Reply, Request
from trireme.server.paths import resolve_local_path, resolve_path, storage_errors
from trireme.server.state import ServedTable, ServerState

T = TypeVar("T")
R = TypeVar("R")

SHARDS_MAX = 100_000  # Fleet's file names have five digits
ROWS_PER_GROUP = 1 << 17
BYTES_PER_FILE = 1 << 30


class ExportHandlers:
    """The methods `export.*`; paths stay under `root`."""

    def __init__(self, server: ServerState, root: Path) -> None:
        self._server, self._root = server, root

    def handlers(self) -> dict[str, Handler]:
        return {
            "export.parquet": self._on_parquet,
            "export.fleet": self._on_fleet,
            "export.join": self._on_join,
        }

    def _folder(self, request: Request) -> Path:
        folder = resolve_local_path(self._root, need(request.body, "folder", str))
        with writing(f"export: cannot make {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _target(self, request: Request) -> str:
        """A folder, or a location of an object store."""
        options = need(request.body, "storage_options", dict)
        path = resolve_path(self._root, need(request.body, "folder", str), options)
        return path if "://" in path else str(self._folder(request))

    def _table(self, request: Request) -> ServedTable:
        return self._server.table(need(request.body, "table", str))

    def _owned(self) -> list[int]:
        return [int(bucket) for bucket in self._server.map().owned_by(self._server.index)]

    def _on_parquet(self, request: Request) -> Reply:
        table, folder = self._table(request), self._target(request)
        options = need(request.body, "storage_options", dict)
        layout = RowLayout.of(table.schema, table.rows)
        dims = np.array(table.rows.dims)
        arrow = arrow_schema(layout, state=need(request.body, "state", bool))
        num_rows = 0
        groups = _row_groups(table, self._owned())
        with writing(f"export: cannot write {folder}"), storage_errors(folder):
            for number in range(SHARDS_MAX):
                group = next(groups, None)
                if group is None and (number or self._server.index):
                    break  # an empty table still has one file
                name = f"part-{self._server.index:03d}-{number:05d}.parquet"
                with (
                    _create(folder, name, options) as file,
                    pq.ParquetWriter(file, arrow) as writer,
                ):
                    while group is not None:
                        keys, classes, rows = group
                        batch = record_batch(arrow, layout, keys, dims[classes], rows)
                        writer.write_batch(batch)
                        num_rows += len(keys)
                        group = next(groups, None) if file.tell() < BYTES_PER_FILE else None
        return Reply({"rows": num_rows})

    def _on_fleet(self, request: Request) -> Reply:
        """Write fragments of text, `SHARD.SERVER`, for the shards that have rows on this server."""
        table, folder = self._table(request), self._folder(request)
        num_shards = need(request.body, "shard_num", int)
        _check_shards(num_shards)
        accessor = need(request.body, "accessor", str)
        text = FleetText.of(table.schema, table.rows, accessor, need_betas(request.body))
        time = need(request.body, "time", int)

        def lines(buckets: Sequence[int]) -> tuple[int, dict[int, Array]]:
            keys, classes, rows = _content(table, buckets)
            shards = (keys % np.uint64(num_shards)).astype(np.int64)
            order = np.argsort(shards, kind="stable")
            written = text.write(keys[order], classes[order], rows[order], time)
            return len(keys), _cut_lines(written, shards[order])

        owned = self._owned()
        at_once = _buckets_at_once(table, owned)
        runs = [owned[i : i + at_once] for i in range(0, len(owned), at_once)]
        num_rows = 0
        with writing(f"export: cannot write {folder}"):
            for count, fragments in _in_order(lines, runs, self._server.pool.threads):
                num_rows += count
                for shard, fragment in fragments.items():
                    with (folder / f"{shard}.{self._server.index}").open("ab") as file:
                        file.write(fragment.data)
        return Reply({"rows": num_rows})

    def _on_join(self, request: Request) -> None:
        """Make Fleet's files of every num_servers-th shard, beginning with this server's number."""
        folder = self._folder(request)
        num_shards, compress = (
            need(request.body, "shard_num", int),
            need(request.body, "gzip", bool),
        )
        _check_shards(num_shards)
        num_servers = len(self._server.map().servers)
        with writing(f"export: cannot write {folder}"):
            for shard in range(self._server.index, num_shards, num_servers):
                path = folder / f"part-000-{shard:05d}{'.gz' if compress else ''}"
                with path.open("xb") as plain:
                    file: Any = gzip.GzipFile(fileobj=plain, mode="wb") if compress else plain
                    for server in range(num_servers):
                        fragment = folder / f"{shard}.{server}"
                        if fragment.exists():
                            with fragment.open("rb") as source:
                                shutil.copyfileobj(source, file, 1 << 20)
                            fragment.unlink()
                    if compress:
                        file.close()


def _create(folder: str, name: str, storage_options: Mapping[str, Any]) -> IO[bytes]:
    """A new file in the folder, which is made if it is missing."""
    if "://" not in folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        return Path(folder, name).open("xb")
    file: IO[bytes] = fsspec.open(f"{folder}/{name}", "wb", **storage_options).open()
    return file


def _cut_lines(text: Array, shards: Array) -> dict[int, Array]:
    """The lines of each shard; line i belongs to shards[i], which ascend."""
    ends = np.flatnonzero(text == ord("\n")) + 1
    distinct, counts = np.unique(shards, return_counts=True)
    stops = ends[np.cumsum(counts) - 1]
    return {
        shard: text[low:high]
        for shard, low, high in zip(
            distinct.tolist(), [0, *stops.tolist()], stops.tolist(), strict=False
        )
    }


def _check_shards(num: int) -> None:
    if not 1 <= num <= SHARDS_MAX:
        raise BadRequest(f"export: expected shard_num 1..{SHARDS_MAX}, found {num}")


def _content(table: ServedTable, buckets: Sequence[int]) -> KeyedRows:
    """The rows of some buckets, each bucket as of one moment."""
    snapshots = [table.rows.snapshot(bucket) for bucket in buckets]
    return (
        np.concatenate([snapshot.keys for snapshot in snapshots]),
        np.concatenate([snapshot.classes for snapshot in snapshots]),
        np.concatenate([snapshot.rows for snapshot in snapshots]),
    )


def _row_groups(table: ServedTable, owned: Sequence[int]) -> Iterator[KeyedRows]:
    """All rows, some at a time."""
    at_once = _buckets_at_once(table, owned)
    for first in range(0, len(owned), at_once):
        rows = _content(table, owned[first : first + at_once])
        if len(rows[0]):
            yield rows


def _buckets_at_once(table: ServedTable, owned: Sequence[int]) -> int:
    """How many buckets have about ROWS_PER_GROUP rows."""
    return max(1, ROWS_PER_GROUP * len(owned) // max(table.rows.rows, 1))


def _in_order(function: Callable[[T], R], items: Sequence[T], threads: int) -> Iterator[R]:
    """`function` of each item, in order, on `threads` threads; as many results wait at most."""
    with ThreadPoolExecutor(threads) as pool:
        ahead: deque[Future[R]] = deque()
        for item in items:
            ahead.append(pool.submit(function, item))
            if len(ahead) > threads:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
