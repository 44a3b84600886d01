"""The columns of a checkpoint's row files: Arrow IPC, a file with a column per part of a row, and
beside it a file with a line per bucket. docs/format/checkpoint.md specifies both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from trireme import _core
from trireme.protocol.core_table import make_core_table
from trireme.protocol.wide_rows import RowLayout
from trireme.protocol.wire import Array
from trireme.table import TableSchema


def _required(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind, nullable=False)


MARKS = pa.list_(
    _required(
        "item",
        pa.struct([_required("stream", pa.int64()), _required("sequence", pa.uint64())]),
    )
)
REMOVED = pa.large_list(_required("item", pa.uint64()))
BUCKET_LINES = pa.schema(
    [
        _required("bucket", pa.uint16()),
        _required("num_rows", pa.uint32()),
        _required("marks", MARKS),
        _required("pending", pa.large_binary()),
        _required("removed", REMOVED),
    ]
)


@dataclass(frozen=True)
class RowColumns:
    """The parts of a wide row as columns of a file, after `key` and `row_class`.

    widths: bytes of each column.
    """

    schema: pa.Schema
    widths: tuple[int, ...]
    statistics: np.dtype[Any]

    @classmethod
    def of(cls, layout: RowLayout) -> RowColumns:
        fields = [_required("key", pa.uint64()), _required("row_class", pa.uint8())]
        widths = []
        for name, size in (("weights", layout.dim), ("state", layout.state_floats)):
            if size > 0:  # DuckDB has no arrays of length 0
                fields.append(_required(name, pa.list_(pa.float32(), size)))
                widths.append(4 * size)
        statistics = layout.statistics_type
        for name in statistics.names or ():
            fields.append(_required(name, pa.from_numpy_dtype(statistics[name])))
            widths.append(statistics[name].itemsize)
        return cls(pa.schema(fields), tuple(widths), statistics)

    @classmethod
    def of_schema(cls, schema: TableSchema) -> RowColumns:
        return cls.of(RowLayout.of(schema, make_core_table(schema)))

    def statistics_of(self, snapshot: _core.BucketColumns) -> Array:
        """(n,) records."""
        names = self.statistics.names or ()
        records = np.empty(len(snapshot.keys), self.statistics)
        for name, column in zip(names, snapshot.columns[-len(names) :], strict=True):
            records[name] = column.view(self.statistics[name])
        return records
