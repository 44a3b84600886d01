"""Rows of tables alone, without a model: to and from Parquet files and NumPy arrays, or removed."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from trireme.data.arrow_columns import is_text, without_list
from trireme.data.batch import Ragged, Strings
from trireme.data.user_columns import arrow_of, column_of, is_bags
from trireme.errors import BadRequest, writing
from trireme.interchange.formats.file_lists import parquet_files
from trireme.interchange.formats.parquet import arrow_schema, record_batch
from trireme.interchange.import_export import data_time, on_first_worker, progress_of
from trireme.interchange.worker_side.dense_blocks import TIMEOUT_S
from trireme.interchange.worker_side.import_requests import importing, read_files, send_rows
from trireme.job.cluster import Cluster
from trireme.nn.ids import keys_of_column, keys_of_values
from trireme.protocol.routing import IDS_BELOW, Keys
from trireme.protocol.wire import Array
from trireme.rows.core_table import make_core_table
from trireme.rows.wide_rows import RowLayout
from trireme.storage.atomic_folder import new_folder
from trireme.table import Table
from trireme.train.optimizer import DistributedOptimizer
from trireme.train.trainer import Trainer, optimizer_of
from trireme.worker import expiry_calls
from trireme.worker.whole_rows import Reading, read_now

ROWS_PER_GROUP = 1 << 16


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
        DataError: a file cannot be read, or has a wrong value; ids where a table with `salt` needs
            `feature`. BadRequest: columns or a feature that do not fit; values that are strings
            where training took integers, or the reverse.
    """
    optimizer = optimizer_of(trainer)
    known = _known(optimizer, "import_parquet", table)
    if feature is not None:
        known.features.check_name(table, feature)

    def send(id: str) -> int:
        files = parquet_files(source, storage_options)
        with progress_of(trainer, f"import {table}") as watch:
            client = optimizer.cluster.client
            options: dict[str, Any] = {
                "columns": dict(columns or {}),
                "time": int(data_time(optimizer, time)),
            }
            if feature is not None:
                are_strings = known.features.are_strings.get(feature)
                named = {"name": feature, "is_salted": known.salt, "are_strings": are_strings}
                options |= {"feature": named, "row_class": known.of_feature(feature).row_class}
            return read_files(
                client, "import.parquet", table, files, options, storage_options, watch, id=id
            )

    asked = table, replace, str(source), repr(columns), feature, time
    return _import(optimizer, "import_parquet", send, *asked)


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
    known = _known(optimizer, "import_arrays", table)
    if feature is not None and "key" in arrays:
        arrays = {**arrays, "key": keys_of_values(known, feature, arrays["key"])}

    def send(id: str) -> int:
        cluster, at = optimizer.cluster, data_time(optimizer, time)
        row_class = None if feature is None else known.of_feature(feature).row_class
        return send_rows(
            cluster.client,
            table,
            arrays,
            time=at,
            pool=cluster.pool,
            id=id,
            row_class=row_class,
        )

    asked = [table, replace, feature, time, *arrays, *(arrays[name] for name in arrays)]
    return _import(optimizer, "import_arrays", send, *asked)


def remove_rows(
    trainer: Trainer | DistributedOptimizer,
    table: str | Table,
    values: Any,
    *,
    feature: str | None = None,
) -> int:
    """Remove rows; every worker calls it, with the same values. The next delta and export tell that
    they have gone, as of rows that expire; training makes a row again when its value occurs.
    Returns how many there were: values without a row are none. What a filter has counted of a value
    before it has a row goes too, but from a sketch.

    Args:
        values: n values of the feature as training takes them, integers or strings, or one.
        feature: None: the values are the keys of rows, as `TableView(table).top` tells them.

    Raises:
        BadRequest: a feature that does not read the table; values that are strings where training
            took integers, or the reverse; keys that are none of a table with `salt`; within a pass
            on a device. ResourceExhausted, Unavailable, DeadlineExceeded, Corruption: of some rows
            on SSD; others may have gone, and a repetition removes the rest.
    """
    optimizer = optimizer_of(trainer)
    known = _known(optimizer, "remove_rows", table.name if isinstance(table, Table) else table)
    values = [values] if isinstance(values, (str, int, np.integer)) else values
    if feature is not None:
        keys = keys_of_values(known, feature, values)
    else:
        keys = _plain_keys(known, values)

    def act() -> dict[str, Any]:
        return {"rows": expiry_calls.remove(optimizer.cluster.client, known.name, keys)}

    removed = on_first_worker(optimizer, "remove_rows", act, known.name, keys)["rows"]
    optimizer.mode.forget(known.name, keys)
    return int(removed)


def _plain_keys(table: Table, values: Any) -> Keys:
    column, are_strings = column_of("key", values)
    if not are_strings:
        keys = keys_of_column("key", column, salted=False)
        if not table.salt or len(keys) == 0 or keys.max() >= IDS_BELOW:
            return keys
    raise BadRequest(
        f"remove_rows: expected keys of table {table.name!r}"
        f"{', which salt spreads over all of 64 bits' if table.salt else ', integers'}, found"
        f" {values!r:.60}; feature= says whose values they are"
    )


def _known(optimizer: DistributedOptimizer, what: str, table: str) -> Table:
    for known in optimizer.tables:
        if known.name == table:
            return known
    names = [known.name for known in optimizer.tables]
    raise BadRequest(f"{what}: expected the name of a table among {names}, found {table!r}")


def _import(
    optimizer: DistributedOptimizer, name: str, send: Callable[[str], int], *asked: Any
) -> int:
    """send: sends rows for the import of an id. asked: the table, whether its rows are replaced,
    and what else is common to all workers.
    """
    table, replace, *_ = asked

    def act() -> dict[str, Any]:
        with importing(optimizer.cluster.client, [table], replace=replace) as id:
            return {"rows": send(id)}

    return int(on_first_worker(optimizer, name, act, *asked)["rows"])


def export_parquet(
    trainer: Trainer | DistributedOptimizer,
    path: str | os.PathLike[str],
    *,
    tables: Sequence[str] | None = None,
    feature: str | None = None,
    values: Any = None,
    state: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> dict[str, int]:
    """Write tables to PATH/TABLE/part-*.parquet; returns how many rows each has.

    Args:
        path: a new folder on storage that all processes share, or a location such as
            s3://bucket/key, where a file _SUCCESS comes last.
        tables: default all.
        feature, values: export the rows of these distinct values of a feature alone, integers or
            strings as training takes them, from one table. The column `key` then has the values,
            from which `import_parquet(feature=)` makes the same rows. Values without a row are left
            out.
        state: also write the update rules' state.

    Raises:
        BadRequest: a folder that is there or cannot be written; unknown tables, several with
            values; a feature that does not read the table, or values that training does not take.
    """
    optimizer = optimizer_of(trainer)
    names = list(tables or [table.name for table in optimizer.tables])
    chosen = [_known(optimizer, "export_parquet", name) for name in names]
    if (feature is None) != (values is None) or (feature is not None and len(chosen) != 1):
        raise BadRequest(
            "export_parquet: expected feature and values together, of one table, found feature"
            f" {feature!r}, {'no' if values is None else 'with'} values, and tables {names}"
        )
    rows = None if feature is None else FeatureRows.of(chosen[0], feature, values)
    storage = dict(storage_options or {})
    options = {"state": state, "storage_options": storage}

    def write(table: str, folder: str) -> int:
        if rows is not None:
            return write_rows(optimizer.cluster, rows, folder, state=state, options=storage)
        # Each export into one location is another one, which no kept answer of the last is for.
        body = {"table": table, "folder": folder, "id": uuid.uuid4().hex, **options}
        servers = optimizer.cluster.client.servers
        replies = servers.everywhere("export.parquet", body, timeout_s=TIMEOUT_S)
        return sum(int(reply.body["rows"]) for reply in replies)

    def act() -> dict[str, Any]:
        with new_folder(path, storage_options) as folder:
            return {name: write(name, f"{folder}/{name}") for name in names}

    asked = [*names, state, feature, None if rows is None else rows.keys]
    return on_first_worker(optimizer, "export_parquet", act, *asked)


class FeatureRows(NamedTuple):
    """N distinct values of a feature and their keys. table: as the feature reads it."""

    table: Table
    values: pa.Array
    keys: Keys

    @classmethod
    def of(cls, table: Table, feature: str, values: Any) -> FeatureRows:
        """Raises BadRequest: a feature by which no module reads the table; values that training
        does not take, missing ones, or one given twice; rows that may have a head alone, which
        nobody can tell from outside.
        """
        if table.schema.head_class is not None:
            raise BadRequest(
                f"export_parquet: expected a table without embedx_threshold with values of"
                f" {feature!r}, found {table.name!r}; without values its keys are exported"
            )
        keys = keys_of_values(table, feature, values)
        if len(np.unique(keys)) < len(keys):
            raise BadRequest(
                f"export_parquet: expected distinct values of {feature!r}, found one twice"
            )
        return cls(table.of_feature(feature), _importable(table, feature, values), keys)


def _importable(table: Table, feature: str, values: Any) -> pa.Array:
    """The values as integers or strings, which `import_parquet` takes: numbers of other kinds and
    times as the integers that they are in training. Raises BadRequest: lists, or bytes that are no
    text.
    """
    if isinstance(values, Strings):
        values = values.decode()
    if isinstance(values, Ragged) or is_bags(values):
        raise _not_single(feature, "bags")
    if isinstance(values, torch.Tensor):
        return pa.array(keys_of_column(feature, values, salted=False).view(np.int64))
    array = arrow_of(feature, values)
    if isinstance(array, pa.DictionaryArray):
        array = array.dictionary_decode()
    kind = array.type
    if pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return array
    if not len(array):
        return array.cast(pa.large_string() if table.features.are_strings.get(feature) else "int64")
    if is_text(kind):
        try:
            return array.cast(pa.large_binary()).cast(pa.large_string())
        except pa.ArrowInvalid as error:
            raise BadRequest(
                f"export_parquet: expected values of {feature!r} as text in UTF-8, found {kind}:"
                f" {error}"
            ) from error
    if without_list(kind) != kind:
        raise _not_single(feature, str(kind))
    return pa.array(keys_of_column(feature, values, salted=False).view(np.int64))


def _not_single(feature: str, kind: str) -> BadRequest:
    return BadRequest(
        f"export_parquet: expected values of {feature!r} one by one, integers or strings, found"
        f" {kind}"
    )


def write_rows(
    cluster: Cluster, rows: FeatureRows, folder: str, *, state: bool, options: Mapping[str, Any]
) -> int:
    """Write the rows of the values that have one, in their order; returns how many. options: of
    storage, for a location of fsspec.
    """
    table = rows.table
    core = make_core_table(table.schema)
    layout = RowLayout.of(table.schema, core)
    arrow = arrow_schema(layout, state=state)
    arrow = arrow.set(0, pa.field("key", rows.values.type, nullable=False))
    how = Reading(
        client=cluster.client, table=table.name, row_bytes=layout.row_bytes, pool=cluster.pool
    )
    path, num_rows = f"{folder}/part-000-00000.parquet", 0
    if "://" not in folder:
        options = {"auto_mkdir": True}
    with (
        writing(f"export: cannot write {folder}"),
        fsspec.open(path, "wb", **options) as file,
        pq.ParquetWriter(file, arrow) as writer,
    ):
        for begin in range(0, len(rows.keys), ROWS_PER_GROUP):
            is_present, wide = read_now(how, rows.keys[begin : begin + ROWS_PER_GROUP])
            present = np.flatnonzero(is_present)
            values = rows.values.take(pa.array(present + begin))
            num_weights = np.full(len(present), table.dim)
            writer.write_batch(record_batch(arrow, layout, values, num_weights, wide[present]))
            num_rows += len(present)
    return num_rows
