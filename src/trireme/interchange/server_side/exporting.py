"""Exports on the servers' side: each writes the rows of its buckets into a shared folder.

export.parquet   part-SSS-NNNNN.parquet, SSS this server's number
export.fleet     for each of Fleet's shards a piece of text
export.join      a share of the shards: their pieces, laid end to end
export.blocks    the dense blocks of this server, with the optimizer's state
"""

from __future__ import annotations

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
from trireme.protocol.routing import Keys
from trireme.protocol.wide_rows import RowLayout, WideRows
from trireme.protocol.wire import Array, need
from trireme.rpc import Handler, Reply, Request
from trireme.server.paths import resolve_local_path, resolve_path, storage_errors
from trireme.server.state import ServedTable, ServerState

T = TypeVar("T")
R = TypeVar("R")

Rows = tuple[Keys, Array, WideRows]  # keys, row classes, wide rows

SHARDS_MAX = 100_000  # Fleet's names have five digits
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

    def _place(self, request: Request) -> str:
        """A folder, or a location of an object store."""
        options = need(request.body, "storage_options", dict)
        place = resolve_path(self._root, need(request.body, "folder", str), options)
        return place if "://" in place else str(self._folder(request))

    def _table(self, request: Request) -> ServedTable:
        return self._server.table(need(request.body, "table", str))

    def _owned(self) -> list[int]:
        return [int(bucket) for bucket in self._server.map().owned_by(self._server.index)]

    def _on_parquet(self, request: Request) -> Reply:
        table, folder = self._table(request), self._place(request)
        options = need(request.body, "storage_options", dict)
        layout = RowLayout.of(table.schema, table.rows)
        dims = np.array(table.rows.dims)
        arrow = arrow_schema(layout, state=need(request.body, "state", bool))
        num_rows = 0
        parts = _row_groups(table, self._owned())
        with writing(f"export: cannot write {folder}"), storage_errors(folder):
            for number in range(SHARDS_MAX):
                group = next(parts, None)
                if group is None and (number or self._server.index):
                    break  # an empty table has one file all the same
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
                        group = next(parts, None) if file.tell() < BYTES_PER_FILE else None
        return Reply({"rows": num_rows})

    def _on_fleet(self, request: Request) -> Reply:
        """Write pieces of text, `SHARD.SERVER`, of the shards that have rows here."""
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
            piece = text.write(keys[order], classes[order], rows[order], time)
            return len(keys), _cut_lines(piece, shards[order])

        owned = self._owned()
        at_once = _buckets_at_once(table, owned)
        runs = [owned[i : i + at_once] for i in range(0, len(owned), at_once)]
        num_rows = 0
        with writing(f"export: cannot write {folder}"):
            for count, of_shard in _in_order(lines, runs, self._server.pool.threads):
                num_rows += count
                for shard, piece in of_shard.items():
                    with (folder / f"{shard}.{self._server.index}").open("ab") as file:
                        file.write(piece.data)
        return Reply({"rows": num_rows})

    def _on_join(self, request: Request) -> None:
        """Make Fleet's files of the shards whose number modulo the servers is this one's."""
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
                        piece = folder / f"{shard}.{server}"
                        if piece.exists():
                            with piece.open("rb") as source:
                                shutil.copyfileobj(source, file, 1 << 20)
                            piece.unlink()
                    if compress:
                        file.close()


def _create(folder: str, name: str, storage_options: Mapping[str, Any]) -> IO[bytes]:
    """A new file in the folder, which is made if need be."""
    if "://" not in folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        return Path(folder, name).open("xb")
    file: IO[bytes] = fsspec.open(f"{folder}/{name}", "wb", **storage_options).open()
    return file


def _cut_lines(text: Array, shards: Array) -> dict[int, Array]:
    """The lines of each shard; line i is of shards[i], in ascending order."""
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


def _content(table: ServedTable, buckets: Sequence[int]) -> Rows:
    """The rows of some buckets, each as it was at one moment."""
    parts = [table.rows.snapshot(bucket) for bucket in buckets]
    return (
        np.concatenate([part.keys for part in parts]),
        np.concatenate([part.classes for part in parts]),
        np.concatenate([part.rows for part in parts]),
    )


def _row_groups(table: ServedTable, owned: Sequence[int]) -> Iterator[Rows]:
    """All rows, some at a time."""
    at_once = _buckets_at_once(table, owned)
    for first in range(0, len(owned), at_once):
        rows = _content(table, owned[first : first + at_once])
        if len(rows[0]):
            yield rows


def _buckets_at_once(table: ServedTable, owned: Sequence[int]) -> int:
    """So many that they have about ROWS_PER_GROUP rows."""
    return max(1, ROWS_PER_GROUP * len(owned) // max(table.rows.rows, 1))


def _in_order(function: Callable[[T], R], items: Sequence[T], threads: int) -> Iterator[R]:
    """`function` of each item, on so many threads, at most that many results ahead."""
    with ThreadPoolExecutor(threads) as pool:
        ahead: deque[Future[R]] = deque()
        for item in items:
            ahead.append(pool.submit(function, item))
            if len(ahead) > threads:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
