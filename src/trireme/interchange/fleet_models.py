"""Models as Paddle's Fleet saves and loads them: folders of text, one per table."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trireme.errors import BadRequest, Corruption, DataError
from trireme.interchange.fleet_parameters import (
    DENSE_FILE,
    fleet_parameters,
    read_parameters,
    write_parameters,
)
from trireme.interchange.formats.file_lists import list_files
from trireme.interchange.import_export import data_time, on_first_worker, progress_of
from trireme.interchange.worker_side.dense_blocks import TIMEOUT_S
from trireme.interchange.worker_side.import_requests import importing, read_files
from trireme.policy import CtrDoubleAccessor
from trireme.storage.atomic_folder import new_folder
from trireme.table import Table
from trireme.train.optimizer import DistributedOptimizer
from trireme.train.trainer import Trainer, optimizer_of
from trireme.worker.client import WorkerClient

ROWS_FILE = re.compile(r"part-\d{3}-\d{5}(\.gz)?")


def is_fleet(path: str | os.PathLike[str]) -> bool:
    """Whether a local folder is what Fleet's save_persistables writes."""
    return any(
        DENSE_FILE.fullmatch(file.name) or ROWS_FILE.fullmatch(file.name)
        for file in Path(path).glob("[0-9][0-9][0-9]/part-*")
    )


def import_fleet(
    trainer: Trainer | DistributedOptimizer,
    path: str | os.PathLike[str],
    *,
    tables: Mapping[str, int] | None = None,
    dense: Mapping[str, str] | None = None,
    accessor: str | None = None,
    time: int | None = None,
    dense_steps: int = 0,
    storage_options: Mapping[str, Any] | None = None,
) -> dict[str, int]:
    """Load what Fleet's `save_persistables` has written: rows with state and statistics, dense
    parameters with their optimizer's state. All of it comes in, or nothing.

    The rows replace the tables' own. The folder must be on storage that all servers share.

    Args:
        path: the folder that holds 000, 001, ...
        tables: Fleet's number of each table to load; None: the only table is 0.
        dense: names of our parameters by Paddle's, for all of them; None: the n-th torch.nn.Linear
            of the model is Paddle's linear_n. {}: leave them as they are.
        accessor: SparseAccessor, CtrCommonAccessor or CtrDoubleAccessor, whose order of fields the
            text has; None: that of the table's policy.
        time: data time in seconds of the save, from which unseen days count back; None: that of
            `set_time`.
        dense_steps: steps that the dense optimizer has made, which the text does not say. With 0
            its bias correction starts over, as Fleet's does.

    Returns:
        How many rows each table got.

    Raises:
        DataError: a line is wrong; names file, line and value. BadRequest: a table whose rule Fleet
            does not have, or names that do not fit.
    """
    optimizer, folder = optimizer_of(trainer), os.fspath(path).rstrip("/")

    def act() -> dict[str, Any]:
        numbers = _table_numbers(optimizer, tables)
        parameters = () if dense == {} else fleet_parameters(optimizer, dense)
        files = {
            table: _row_files(f"{folder}/{numbers[table.name]:03d}", storage_options)
            for table in optimizer.tables
            if table.name in numbers
        }
        tensors = None
        if parameters:
            tensors = read_parameters(optimizer, folder, parameters, dense_steps, storage_options)
        optimizer.mode.publish()  # what is not imported stays as it is
        client, counts = optimizer.cluster.client, dict[str, Any]()
        with importing(client, list(numbers), replace=True, blocks=tensors) as id:
            for table, paths in files.items():
                with progress_of(trainer, f"import {table.name}") as watch:
                    options = _text_options(table, accessor, data_time(optimizer, time))
                    counts[table.name] = read_files(
                        client,
                        "import.fleet",
                        table.name,
                        paths,
                        options,
                        storage_options,
                        watch,
                        id=id,
                    )
        return counts

    counts = on_first_worker(optimizer, "import_fleet", act, folder)
    optimizer.mode.adopt()
    return counts


def export_fleet(
    trainer: Trainer | DistributedOptimizer,
    path: str | os.PathLike[str],
    *,
    tables: Mapping[str, int] | None = None,
    dense: Mapping[str, str] | None = None,
    accessor: str | None = None,
    time: int | None = None,
    shard_num: int = 1000,
    compress: bool = False,
) -> dict[str, int]:
    """Write what Fleet's `load_model` reads into a new folder; returns how many rows each table
    has. `tables`, `dense` and `accessor` are those of `import_fleet`.

    Args:
        time: data time in seconds that unseen days are counted to; None: that of `set_time`.
        shard_num: that of Fleet's table, which reads as many files.
        compress: gzip the files.
    """
    optimizer = optimizer_of(trainer)

    def act() -> dict[str, Any]:
        numbers = _table_numbers(optimizer, tables)
        parameters = () if dense == {} else fleet_parameters(optimizer, dense)
        counts = dict[str, Any]()
        if "://" in os.fspath(path):
            raise BadRequest(f"export_fleet: expected a local folder, found {path}")
        with new_folder(path) as folder:
            for table in optimizer.tables:
                if table.name in numbers:
                    body = {
                        "table": table.name,
                        "folder": f"{folder}/{numbers[table.name]:03d}",
                        **_text_options(table, accessor, data_time(optimizer, time)),
                        "shard_num": shard_num,
                        "gzip": compress,
                    }
                    counts[table.name] = _write_rows(optimizer.cluster.client, body)
            if parameters:
                number = max(numbers.values(), default=-1) + 1
                write_parameters(optimizer, Path(folder, f"{number:03d}"), parameters, compress)
        return counts

    return on_first_worker(optimizer, "export_fleet", act)


def _write_rows(client: WorkerClient, body: Mapping[str, Any]) -> int:
    """Have the servers write a table as Fleet's text; returns how many rows. A key is in the file
    of its shard, key % shard_num.
    """
    replies = client.servers.everywhere("export.fleet", dict(body), timeout_s=TIMEOUT_S)
    client.servers.everywhere("export.join", dict(body), timeout_s=TIMEOUT_S)
    folder, shard_num = body["folder"], body["shard_num"]
    num_files = len(list_files(folder))
    if num_files != shard_num:
        raise Corruption(
            f"export: expected {shard_num} files in {folder}, found {num_files};"
            " the folder must be on storage that all servers and worker 0 share"
        )
    return sum(int(reply.body["rows"]) for reply in replies)


def _table_numbers(
    optimizer: DistributedOptimizer, numbers: Mapping[str, int] | None
) -> dict[str, int]:
    """Fleet's number of each table."""
    names = [table.name for table in optimizer.tables]
    if numbers is None:
        if len(names) > 1:
            raise BadRequest(
                f"tables: expected tables={{name: Fleet's number of it}}, found none for {names}"
            )
        return dict.fromkeys(names, 0)
    unknown = numbers.keys() - set(names)
    if unknown or len(set(numbers.values())) < len(numbers):
        raise BadRequest(
            f"tables: expected names among {names}, each with its number, found {numbers}"
        )
    return dict(numbers)


def _row_files(folder: str, storage_options: Mapping[str, Any] | None) -> list[str]:
    files = list_files(folder, storage_options)
    wrong = [file for file in files if not ROWS_FILE.fullmatch(file.rpartition("/")[2])]
    if wrong:
        raise DataError(f"{folder}: expected files named {ROWS_FILE.pattern}, found {wrong[0]}")
    return files


def _text_options(table: Table, accessor: str | None, time: int) -> dict[str, Any]:
    """How the servers read and write the text of a table."""
    is_double = isinstance(table.policy, CtrDoubleAccessor)
    beta1, beta2 = table.optimizer.group().get("betas", (0.0, 0.0))
    return {
        "accessor": accessor or ("CtrDoubleAccessor" if is_double else "CtrCommonAccessor"),
        "betas": [float(beta1), float(beta2)],
        "time": int(time),
    }
