"""The rows of some values of a feature as a Parquet file that has the values in place of keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from trireme.data.arrow_columns import is_text, without_list
from trireme.data.batch import Ragged, Strings
from trireme.data.user_columns import arrow_of, is_bags
from trireme.errors import BadRequest, writing
from trireme.interchange.formats.parquet import arrow_schema, record_batch
from trireme.job.cluster import Cluster
from trireme.nn.ids import keys_of_column, keys_of_values
from trireme.protocol.routing import Keys
from trireme.rows.core_table import make_core_table
from trireme.rows.wide_rows import RowLayout
from trireme.table import Table
from trireme.worker.whole_rows import Reading, read_now

ROWS_PER_GROUP = 1 << 16


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
