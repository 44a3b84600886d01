"""Rows of tables alone, without a model: Parquet files and NumPy arrays."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trireme.errors import BadRequest
from trireme.interchange.formats.file_lists import parquet_files
from trireme.interchange.import_export import data_time, on_first_worker, progress_of
from trireme.interchange.worker_side.dense_blocks import TIMEOUT_S
from trireme.interchange.worker_side.import_requests import (
    importing,
    read_files,
    send_rows,
)
from trireme.nn.ids import keys_of_values
from trireme.protocol.wire import Array
from trireme.storage.atomic_folder import new_folder
from trireme.train.optimizer import DistributedOptimizer
from trireme.train.trainer import Trainer, optimizer_of


def import_parquet(
    trainer: Trainer | DistributedOptimizer,
    table: str,
    source: str | os.PathLike[str] | Sequence[str],
    *,
    columns: Mapping[str, str] | None = None,
    feature: str | None = None,
    replace: bool = False,
    time: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> int:
    """Put rows of Parquet files into a table; returns how many. All rows come in, or none.

    Args:
        source: a file, a folder of files, or a list of files.
        columns: what the files call a column, by its name here: key, weights, and optionally
            state, show, click, delta_score, feature, time (docs/interchange.md).
        feature: the column `key` has values of this feature as training takes them, integers or
            strings. None: it has the keys of rows; of a table with `salt`, those of `keys_of`.
        replace: True: the table has these rows alone afterwards. False: they replace rows of the
            same keys.
        time: data time in seconds of the last push, for rows without a column `time`; None: that
            of `set_time`.

    Raises:
        DataError: a file cannot be read, or has a wrong value. BadRequest: columns that do not fit.
    """
    optimizer = optimizer_of(trainer)

    def send() -> int:
        files = parquet_files(source, storage_options)
        with progress_of(trainer, f"import {table}") as watch:
            client = optimizer.cluster.client
            options: dict[str, Any] = {
                "columns": dict(columns or {}),
                "time": int(data_time(optimizer, time)),
            }
            if feature is not None:
                is_salted = _is_salted(optimizer, table)
                options["feature"] = {"name": feature, "is_salted": is_salted}
            return read_files(
                client, "import.parquet", table, files, options, storage_options, watch
            )

    return _import(optimizer, table, replace, "import_parquet", send)


def import_arrays(
    trainer: Trainer | DistributedOptimizer,
    table: str,
    arrays: Mapping[str, Array],
    *,
    feature: str | None = None,
    replace: bool = False,
    time: int | None = None,
) -> int:
    """Put rows of NumPy arrays into a table; returns how many. All rows come in, or none.

    Args:
        arrays: by column; columns, `replace` and `time` as in `import_parquet`.
        feature: as in `import_parquet`.
    """
    optimizer = optimizer_of(trainer)
    if feature is not None and "key" in arrays:
        salted = _is_salted(optimizer, table)
        arrays = {**arrays, "key": keys_of_values(feature, arrays["key"], salted=salted)}

    def send() -> int:
        cluster, at = optimizer.cluster, data_time(optimizer, time)
        return send_rows(cluster.client, table, arrays, time=at, pool=cluster.pool)

    return _import(optimizer, table, replace, "import_arrays", send)


def _is_salted(optimizer: DistributedOptimizer, table: str) -> bool:
    return any(known.salt for known in optimizer.tables if known.name == table)


def _import(
    optimizer: DistributedOptimizer, table: str, replace: bool, name: str, send: Callable[[], int]
) -> int:
    known = [table.name for table in optimizer.tables]
    if table not in known:
        raise BadRequest(f"{name}: expected the name of a table among {known}, found {table!r}")

    def act() -> dict[str, Any]:
        with importing(optimizer.cluster.client, [table], replace=replace):
            return {"rows": send()}

    return int(on_first_worker(optimizer, name, act)["rows"])


def export_parquet(
    trainer: Trainer | DistributedOptimizer,
    path: str | os.PathLike[str],
    *,
    tables: Sequence[str] | None = None,
    state: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> dict[str, int]:
    """Write tables to PATH/TABLE/part-*.parquet; returns how many rows each has.

    Args:
        path: a new folder on storage that all processes share, or a location such as
            s3://bucket/key, where a file _SUCCESS comes last.
        tables: default all.
        state: also write the update rules' state.
    """
    optimizer = optimizer_of(trainer)
    options = {"state": state, "storage_options": dict(storage_options or {})}

    def write(table: str, folder: str) -> int:
        body = {"table": table, "folder": folder, **options}
        servers = optimizer.cluster.client.servers
        replies = servers.everywhere("export.parquet", body, timeout_s=TIMEOUT_S)
        return sum(int(reply.body["rows"]) for reply in replies)

    def act() -> dict[str, Any]:
        names = tables or [table.name for table in optimizer.tables]
        with new_folder(path, storage_options) as folder:
            return {name: write(name, f"{folder}/{name}") for name in names}

    return on_first_worker(optimizer, "export_parquet", act)
