"""Requests that have every server write its rows."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trireme.errors import Corruption
from trireme.interchange.formats.file_lists import list_files
from trireme.interchange.worker_side.import_requests import TIMEOUT_S
from trireme.worker.client import WorkerClient


def write_fleet_rows(
    client: WorkerClient,
    table: str,
    folder: Path,
    options: Mapping[str, Any],
    *,
    shard_num: int,
    compress: bool,
) -> int:
    """Have the servers write a table as Fleet's text; returns how many rows. A key is in the file
    of its shard, key % shard_num. options: accessor, betas and time.
    """
    body = {
        "table": table,
        "folder": str(folder),
        **options,
        "shard_num": shard_num,
        "gzip": compress,
    }
    replies = client.servers.everywhere("export.fleet", body, timeout_s=TIMEOUT_S)
    client.servers.everywhere("export.join", body, timeout_s=TIMEOUT_S)
    num_files = len(list_files(str(folder)))
    if num_files != shard_num:
        raise Corruption(
            f"export: expected {shard_num} files in {folder}, found {num_files};"
            " the folder must be on storage that all servers and worker 0 share"
        )
    return sum(int(reply.body["rows"]) for reply in replies)


def write_parquet(
    client: WorkerClient,
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
