"""Estimates of the bytes that a table needs, from the core's layout of rows and index.

They estimate `_core.Table.bytes`, which counts memory taken from the system, and the files of a
checkpoint. Both are within 5 % of measured values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import NormalDist
from typing import Any

import pyarrow as pa

from trireme import _core
from trireme.checkpoint.format.row_files import RowColumns
from trireme.errors import BadRequest
from trireme.rows.core_table import make_core_table
from trireme.rows.wide_rows import RowLayout
from trireme.table import TableSchema

MARKS_BYTES = 8 * _core.NUM_BUCKETS
LINE_BYTES, LINE_SLOTS, LOAD_PERCENT = 64, 12, 82  # core/store/index.h
LINES_MIN, DOUBLED_MAX = 3, 24  # smallest growth of a bucket, and up to where it doubles: index.cc
PENDING_KEY_BYTES = 16 * (16 + 23) / 32  # core/table/pending_counts.h: between 16 and 23
PENDING_KEY_FILE_BYTES = 16
QUANTILES = 33


@dataclass(frozen=True)
class Need:
    """The bytes that one server needs for its part of a table.

    Attributes:
        num_rows: rows here.
        num_buckets: buckets here, of 4096.
        num_streams: of training data: one per worker.
        num_pending: keys that an exact CountFilter counts here.
        head_share: share of the rows that have a head only; the policy must have such rows.
        shares: for a schema with several dims, the share of the other rows that has each dim;
            empty: all have the largest.
    """

    schema: TableSchema
    num_rows: int
    num_buckets: int = _core.NUM_BUCKETS
    num_streams: int = 1
    num_pending: int = 0
    head_share: float = 0.0
    shares: tuple[float, ...] = ()

    @staticmethod
    def on_one_of(num_servers: int, schema: TableSchema, num_rows: int, **values: Any) -> Need:
        """The need of the server with the most buckets; values: of the whole table. Raises
        BadRequest: too many rows for a server.
        """
        whole = Need(schema, num_rows, **values)
        num_buckets = math.ceil(_core.NUM_BUCKETS / num_servers)
        share = num_buckets / _core.NUM_BUCKETS
        rows, pending = math.ceil(num_rows * share), math.ceil(whole.num_pending * share)
        if rows > whole.rows_max:
            raise BadRequest(
                f"size: expected at most {whole.rows_max:,} rows of table {schema.name!r} on a"
                f" server, found {rows:,}; give --server_num"
                f" {math.ceil(num_rows / whole.rows_max)} or more"
            )
        return replace(whole, num_rows=rows, num_buckets=num_buckets, num_pending=pending)

    @cached_property
    def table(self) -> _core.Table:
        """An empty table of the schema."""
        return make_core_table(self.schema)

    @cached_property
    def layout(self) -> RowLayout:
        return RowLayout.of(self.schema, self.table)

    @property
    def rows_max(self) -> int:
        """Largest number of rows: row numbers have 32 bits, some of which are the row class."""
        bits = 32 - (len(self.table.class_bytes) - 1).bit_length()
        return (1 << bits) - 2

    @property
    def row_bytes(self) -> float:
        """Mean bytes of a row in memory, without the index."""
        whole, head = self._mean(self.table.class_bytes), self.table.class_bytes[-1]
        return whole + self.head_share * (head - whole)

    def _mean(self, of_classes: Sequence[float]) -> float:
        """Mean over the rows that are not a head only."""
        dims = self.schema.dims
        shares = self.shares or [float(dim == max(dims)) for dim in dims]
        return sum(share * value for share, value in zip(shares, of_classes, strict=False))

    def parts_of_row(self) -> dict[str, float]:
        """Mean bytes of a row by part, without the index."""
        share, dim = 1 - self.head_share, self._mean(self.schema.dims)
        whole = self._mean(self.table.class_bytes)
        statistics = self.layout.statistics_type.itemsize
        weights = dim * (4 if self.schema.dtype == "float32" else 2)
        planes = self.table.state_planes
        state = 4 * (self.layout.state_floats - planes * (self.layout.dim - dim))
        sizes = {
            "key": 8,
            "weights": share * weights,
            "state": share * state,
            "heads": self.head_share * (self.table.class_bytes[-1] - 8 - statistics),
            "statistics": statistics,
            "alignment": share * (whole - 8 - weights - state - statistics),
        }
        return {name: float(size) for name, size in sizes.items() if size}

    @property
    def rows(self) -> float:
        return self.num_rows * self.row_bytes

    @cached_property
    def index(self) -> float:
        return self.num_buckets * LINE_BYTES * _mean_lines(self.num_rows / self.num_buckets)

    @property
    def index_max(self) -> float:
        """Bytes of the index when every bucket has just grown."""
        return self.num_rows * LINE_BYTES / (LINE_SLOTS * LOAD_PERCENT / 100) * 9 / 8

    @property
    def marks(self) -> int:
        return self.num_streams * MARKS_BYTES

    @property
    def pending(self) -> float:
        """Bytes of the admission counts of keys without a row."""
        return self._pending(PENDING_KEY_BYTES)

    def _pending(self, bytes_of_key: float) -> float:
        sketch_bytes = (self.schema.admission or {}).get("sketch_bytes")
        if sketch_bytes is None:
            return self.num_pending * bytes_of_key
        return float(sketch_bytes) * self.num_buckets / _core.NUM_BUCKETS

    @property
    def memory(self) -> float:
        return self.rows + self.index + self.marks + self.pending + self.table.bytes

    @cached_property
    def file_row_bytes(self) -> int:
        """Bytes of a row in a checkpoint."""
        return sum(_cell_bytes(field.type) for field in RowColumns.of(self.layout).schema)

    @property
    def checkpoint(self) -> float:
        return self.num_rows * self.file_row_bytes + self._pending(PENDING_KEY_FILE_BYTES)

    def delta(self, share: float) -> float:
        """Bytes of a delta checkpoint of a share of the rows, with the pending counts."""
        return self.num_rows * share * self.file_row_bytes + self._pending(PENDING_KEY_FILE_BYTES)


def _mean_lines(mean_rows: float) -> float:
    """Mean number of lines of a bucket. Rows per bucket are Poisson, approximated as normal."""
    spread = NormalDist(mean_rows, math.sqrt(mean_rows)) if mean_rows else None
    if spread is None:
        return 0.0
    quantiles = [spread.inv_cdf((i + 0.5) / QUANTILES) for i in range(QUANTILES)]
    return sum(_lines(max(round(rows), 0)) for rows in quantiles) / QUANTILES


def _lines(num_rows: int) -> int:
    """Lines of a bucket that has grown row by row, as in Index::reserve."""
    needed = math.ceil(num_rows * 100 / (LINE_SLOTS * LOAD_PERCENT))
    lines = 0
    while lines < needed:
        least = lines + LINES_MIN
        if least < DOUBLED_MAX:
            lines = min(max(2 * lines, least), DOUBLED_MAX)
        else:
            lines = max(lines * 9 // 8, least)
    return lines


def _cell_bytes(kind: pa.DataType) -> int:
    if pa.types.is_fixed_size_list(kind):
        return int(kind.list_size) * _cell_bytes(kind.value_type)
    return int(kind.bit_width) // 8
