"""Writing the row files of a table, as row_files.py describes them."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trireme import _core
from trireme.checkpoint.format.arrow_arrays import to_arrow
from trireme.checkpoint.format.row_files import BUCKET_LINES, MARKS, PLACES, REMOVED, RowColumns
from trireme.protocol.wire import Array
from trireme.storage.checked_file import written
from trireme.storage.storage import Storage

# Of a batch. A thread that writes holds a batch twice, as the table returned its buckets and as
# columns; and the chosen rows once more, where not all are.
BATCH_BYTES = 2 << 20
BUCKETS_PER_BATCH_MAX = 512

# (n,) records of the layout's statistics -> (n,) whether to save the row.
ChooseRows = Callable[[Array], npt.NDArray[np.bool_]]


@dataclass(frozen=True)
class RowWriter:
    """Writes buckets of a table, each with the content of one moment. `since`, `removed_since`: as
    in snapshot_columns. `choose`: which rows to write; None: all. `stays`: rows on SSD stay there,
    and their places are written to a third file, `stem`.places.arrow.
    """

    rows: _core.Table
    columns: RowColumns
    since: int
    removed_since: int
    choose: ChooseRows | None
    stays: bool = False

    def write(
        self,
        storage: Storage,
        stem: str,
        low: int,
        high: int,
        buckets_per_batch: int,
        note: Callable[[int], None],
    ) -> tuple[dict[str, Any], int]:
        """Write buckets low..high to `stem`.arrow and `stem`.buckets.arrow; returns their RowFiles
        in JSON, and the version since which all removed keys are in them. `buckets_per_batch` grows
        while batches are small. `note` is called with the number of buckets of each batch.
        """
        num_rows = num_removed = removed_since = 0
        first = low
        with (
            written(storage, f"{stem}.arrow") as (rows_file, rows_entry),
            written(storage, f"{stem}.buckets.arrow") as (buckets_file, buckets_entry),
            _arrow_file(rows_file, self.columns.schema) as rows,
            _arrow_file(buckets_file, BUCKET_LINES) as buckets,
            ExitStack() as more,
        ):
            places = None
            if self.stays:
                places_file, places_entry = more.enter_context(
                    written(storage, f"{stem}.places.arrow")
                )
                places = more.enter_context(_arrow_file(places_file, PLACES))
            while first <= high:
                count = min(buckets_per_batch, high + 1 - first)
                snapshot = _core.snapshot_columns(
                    *(self.rows, first, count, self.since, self.removed_since),
                    *(self.columns.widths, self.stays),
                )
                batch, counts = self._row_batch(snapshot)
                if batch.num_rows:
                    rows.write_batch(batch)
                buckets.write_batch(_bucket_batch(snapshot, first, counts))
                if places is not None:
                    places.write_batch(_place_batch(snapshot, first, count))
                num_rows += batch.num_rows
                num_removed += len(snapshot.removed)
                removed_since = max(removed_since, snapshot.removed_since)
                note(count)
                first += count
                arrays: list[Array] = [snapshot.pending, snapshot.removed, *snapshot.columns]
                arrays.append(snapshot.places)
                if sum(array.nbytes for array in arrays) < BATCH_BYTES // 2:
                    buckets_per_batch = min(2 * buckets_per_batch, BUCKETS_PER_BATCH_MAX)
                del snapshot, batch, arrays  # before the next is made
        files = {
            "low": low,
            "high": high,
            "num_rows": num_rows,
            "num_removed": num_removed,
            "rows": dict(rows_entry),
            "buckets": dict(buckets_entry),
        }
        if self.stays:
            files["places"] = dict(places_entry)
        return files, removed_since

    def _row_batch(self, snapshot: _core.BucketColumns) -> tuple[pa.RecordBatch, Array]:
        """The chosen rows, and how many each bucket has."""
        schema, counts = self.columns.schema, snapshot.num_rows
        arrays: list[Array] = [snapshot.keys, snapshot.classes, *snapshot.columns]
        if self.choose is not None and len(snapshot.keys):
            mask = self.choose(self.columns.statistics_of(snapshot))
            arrays = [array.reshape(len(mask), -1)[mask] for array in arrays]
            bucket_of_row = np.repeat(np.arange(len(counts)), counts)
            counts = np.bincount(bucket_of_row[mask], minlength=len(counts)).astype(np.uint32)
        num_rows = int(counts.sum())
        columns = [_column(f.type, num_rows, a) for f, a in zip(schema, arrays, strict=True)]
        return pa.RecordBatch.from_arrays(columns, schema=schema), counts


@contextmanager
def _arrow_file(file: Any, schema: pa.Schema) -> Iterator[Any]:
    with pa.PythonFile(file, mode="w") as sink, pa.ipc.new_file(sink, schema) as writer:
        yield writer


def _column(kind: pa.DataType, num_rows: int, values: Array) -> pa.Array:
    """The memory of the values as a column, without a copy."""
    buffer = pa.py_buffer(values)
    if not pa.types.is_fixed_size_list(kind):
        return pa.Array.from_buffers(kind, num_rows, [None, buffer])
    floats = pa.Array.from_buffers(kind.value_type, num_rows * kind.list_size, [None, buffer])
    return pa.FixedSizeListArray.from_arrays(floats, type=kind)


def _bucket_batch(snapshot: _core.BucketColumns, first: int, counts: Array) -> pa.RecordBatch:
    num_buckets = len(counts)
    marks = pa.StructArray.from_arrays(
        [to_arrow(snapshot.streams), to_arrow(snapshot.sequences)], fields=list(MARKS.value_type)
    )
    return pa.RecordBatch.from_arrays(
        [
            to_arrow(np.arange(first, first + num_buckets, dtype=np.uint16)),
            to_arrow(np.ascontiguousarray(counts, np.uint32)),
            pa.ListArray.from_arrays(to_arrow(snapshot.mark_offsets), marks, type=MARKS),
            pa.LargeBinaryArray.from_buffers(
                pa.large_binary(),
                num_buckets,
                [None, pa.py_buffer(snapshot.pending_offsets), pa.py_buffer(snapshot.pending)],
            ),
            pa.LargeListArray.from_arrays(
                to_arrow(snapshot.removed_offsets), to_arrow(snapshot.removed), type=REMOVED
            ),
        ],
        schema=BUCKET_LINES,
    )


def _place_batch(snapshot: _core.BucketColumns, first: int, num_buckets: int) -> pa.RecordBatch:
    buffers = [None, pa.py_buffer(snapshot.place_offsets), pa.py_buffer(snapshot.places)]
    return pa.RecordBatch.from_arrays(
        [
            to_arrow(np.arange(first, first + num_buckets, dtype=np.uint16)),
            pa.LargeBinaryArray.from_buffers(pa.large_binary(), num_buckets, buffers),
        ],
        schema=PLACES,
    )
