"""The rows of some values of a feature as a Parquet file that has the values in place of keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trireme.data.user_columns import arrow_of
from trireme.errors import BadRequest, writing
from trireme.interchange.formats.parquet import arrow_schema, record_batch
from trireme.job.cluster import Cluster
from trireme.nn.ids import keys_of_values
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
        array = arrow_of(feature, np.asarray(values) if hasattr(values, "numpy") else values)
        if isinstance(array, pa.DictionaryArray):
            array = array.dictionary_decode()
        return cls(table.of_feature(feature), array, keys)


def write_rows(
    cluster: Cluster,
    rows: FeatureRows,
    folder: str,
    *,
    state: bool,
    options: Mapping[str, Any],
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
