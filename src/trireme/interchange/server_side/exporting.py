"""Exports on a server: each server writes the rows of its buckets into a shared folder.

export.parquet   part-SSS-NNNNN.parquet, SSS this server's number
export.fleet     a text fragment for each of Fleet's shards
export.join      the files of some shards, from the fragments of all servers
export.blocks    the dense blocks of this server, with the optimizer's state
"""

import gzip
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import fsspec
import numpy as np
import pyarrow.parquet as pq

from trireme.errors import BadRequest, writing
from trireme.interchange.formats.fleet_rows import FleetText, need_betas
from trireme.interchange.formats.parquet import arrow_schema, record_batch
from trireme.protocol.wire import Array, need
from trireme.rows.wide_rows import RowLayout
from trireme.rpc import Handler, Reply, Request
from trireme.server.paths import resolve_local_path, resolve_path, storage_errors
from trireme.server.prepared_import import RowPart
from trireme.server.repeated_calls import repeatable
from trireme.server.served_tables import ServedTable
from trireme.server.state import ServerState

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
            "export.parquet": repeatable(self._on_parquet),
            "export.fleet": repeatable(self._on_fleet),
            "export.join": repeatable(self._on_join),
        }

    def _folder(self, request: Request, own_files: str = "") -> Path:
        """The folder of a table, without `own_files`, which a killed server may have left there. It
        is made in that of the export, which has gone if the export was given up.
        """
        folder = resolve_local_path(self._root, need(request.body, "folder", str))
        with writing(f"export: cannot make {folder}"):
            folder.mkdir(exist_ok=True)
            for file in folder.glob(own_files) if own_files else ():
                file.unlink()
        return folder

    def _table(self, request: Request) -> ServedTable:
        return self._server.table(need(request.body, "table", str))

    def _bucket_runs(self, table: ServedTable) -> list[list[int]]:
        """The buckets of this server, in runs of about ROWS_PER_GROUP rows."""
        owned: list[int] = self._server.assignment.owned_buckets().tolist()
        at_once = max(1, ROWS_PER_GROUP * len(owned) // max(table.rows.rows, 1))
        return [owned[i : i + at_once] for i in range(0, len(owned), at_once)]

    def _on_parquet(self, request: Request) -> Reply:
        table, options = self._table(request), need(request.body, "storage_options", dict)
        path, hosts = need(request.body, "folder", str), self._server.store_hosts
        folder = resolve_path(self._root, path, options, hosts)
        own = f"part-{self._server.assignment.index:03d}"
        if "://" not in folder:
            folder = str(self._folder(request, f"{own}-*"))
        layout = RowLayout.of(table.schema, table.rows)
        dims = np.array(table.rows.dims)
        arrow = arrow_schema(layout, state=need(request.body, "state", bool))
        num_rows = 0
        contents = (_content(table, buckets) for buckets in self._bucket_runs(table))
        groups = (content for content in contents if len(content[0]))
        with writing(f"export: cannot write {folder}"), storage_errors(folder):
            for number in range(SHARDS_MAX):
                group = next(groups, None)
                if group is None and (number or self._server.assignment.index):
                    break  # an empty table still has one file
                created = fsspec.open(f"{folder}/{own}-{number:05d}.parquet", "wb", **options)
                with created as file, pq.ParquetWriter(file, arrow) as writer:
                    while group is not None:
                        keys, classes, rows = group
                        batch = record_batch(arrow, layout, keys, dims[classes], rows)
                        writer.write_batch(batch)
                        num_rows += len(keys)
                        group = next(groups, None) if file.tell() < BYTES_PER_FILE else None
        return Reply({"rows": num_rows})

    def _on_fleet(self, request: Request) -> Reply:
        """Write fragments of text, `SHARD.SERVER`, for the shards that have rows on this server."""
        index = self._server.assignment.index
        table, folder = self._table(request), self._folder(request, f"*.{index}")
        num_shards = _num_shards(request)
        accessor = need(request.body, "accessor", str)
        text = FleetText.of(table.schema, table.rows, accessor, need_betas(request.body))
        time = need(request.body, "time", int)

        def lines(buckets: Sequence[int]) -> tuple[int, dict[int, Array]]:
            keys, classes, rows = _content(table, buckets)
            shards = (keys % np.uint64(num_shards)).astype(np.int64)
            order = np.argsort(shards, kind="stable")
            written = text.write(keys[order], classes[order], rows[order], time)
            return len(keys), _cut_lines(written, shards[order])

        runs, num_rows = self._bucket_runs(table), 0
        with writing(f"export: cannot write {folder}"):
            for count, fragments in _in_order(lines, runs, self._server.pool.threads):
                num_rows += count
                for shard, fragment in fragments.items():
                    with (folder / f"{shard}.{index}").open("ab") as file:
                        file.write(fragment.data)
        return Reply({"rows": num_rows})

    def _on_join(self, request: Request) -> None:
        """Make Fleet's files of every num_servers-th shard, beginning with this server's number."""
        folder, num_shards = self._folder(request), _num_shards(request)
        compress = need(request.body, "gzip", bool)
        num_servers = len(self._server.assignment.map().servers)
        with writing(f"export: cannot write {folder}"):
            for shard in range(self._server.assignment.index, num_shards, num_servers):
                path = folder / f"part-000-{shard:05d}{'.gz' if compress else ''}"
                fragments = [folder / f"{shard}.{server}" for server in range(num_servers)]
                fragments = [fragment for fragment in fragments if fragment.exists()]
                if not path.exists():  # else it is complete, and some fragments may have gone
                    _join(fragments, path, compress)
                for fragment in fragments:
                    fragment.unlink()


def _join(fragments: Sequence[Path], path: Path, compress: bool) -> None:
    """A file of the fragments' content, which appears complete."""
    aside = path.with_name(f".{path.name}")
    with aside.open("wb") as plain:
        file: Any = gzip.GzipFile(path.name, "wb", fileobj=plain) if compress else plain
        for fragment in fragments:
            with fragment.open("rb") as source:
                shutil.copyfileobj(source, file, 1 << 20)
        if compress:
            file.close()
    aside.rename(path)


def _cut_lines(text: Array, shards: Array) -> dict[int, Array]:
    """The lines of each shard; line i belongs to shards[i], which ascend."""
    ends = np.flatnonzero(text == ord("\n")) + 1
    distinct, counts = np.unique(shards, return_counts=True)
    parts = np.split(text, ends[np.cumsum(counts) - 1])  # and nothing after the last line
    return dict(zip(distinct.tolist(), parts, strict=False))


def _num_shards(request: Request) -> int:
    num = need(request.body, "shard_num", int)
    if not 1 <= num <= SHARDS_MAX:
        raise BadRequest(f"export: expected shard_num 1..{SHARDS_MAX}, found {num}")
    return num


def _content(table: ServedTable, buckets: Sequence[int]) -> RowPart:
    """The rows of some buckets, each bucket as of one moment."""
    snapshots = [table.rows.snapshot(bucket) for bucket in buckets]
    parts = zip(*((s.keys, s.classes, s.rows) for s in snapshots), strict=True)
    return RowPart(*map(np.concatenate, parts))


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
