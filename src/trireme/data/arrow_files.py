"""Parquet files and Arrow IPC (Feather) files as record batches of the columns of a schema."""

from collections.abc import Iterable, Iterator
from itertools import accumulate, pairwise

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet

from trireme.data.arrow_columns import why_not
from trireme.data.byte_streams import cannot_read, open_stored
from trireme.data.schema import Schema
from trireme.data.sources import DataFile
from trireme.errors import DataError

_ROWS = 8192  # decoded and converted at a time
_BUFFER_BYTES = 1 << 18  # of each column of a Parquet file


class _ParquetFile:
    def __init__(self, stored: pa.NativeFile, schema: Schema, path: str, threads: int) -> None:
        self._stored = stored
        self._file = pa.parquet.ParquetFile(
            stored, buffer_size=_BUFFER_BYTES, page_checksum_verification=True
        )
        _check_columns(schema, self._file.schema_arrow, path)
        self._names = list(schema.names)
        self._uses_threads = threads > 1
        self.num_rows: int = self._file.metadata.num_rows

    def record_batches(self, begin: int, end: int) -> Iterator[pa.RecordBatch]:
        metadata = self._file.metadata
        sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        for group, first in enumerate(accumulate(sizes[:-1], initial=0)):
            since, until = max(begin - first, 0), min(end - first, sizes[group])
            if since < until:
                batches = self._file.iter_batches(
                    _ROWS, row_groups=[group], columns=self._names, use_threads=self._uses_threads
                )
                yield from _cut(batches, since, until)

    def close(self) -> None:
        self._file.close()
        self._stored.close()


class _IpcFile:
    def __init__(self, stored: pa.NativeFile, schema: Schema, path: str) -> None:
        self._stored = stored
        whole = pa.ipc.open_file(stored)
        _check_columns(schema, whole.schema, path)
        columns = [whole.schema.get_field_index(name) for name in schema.names]
        self._file = pa.ipc.open_file(
            stored, options=pa.ipc.IpcReadOptions(included_fields=columns)
        )
        narrow = pa.ipc.open_file(
            stored, options=pa.ipc.IpcReadOptions(included_fields=columns[:1])
        )
        sizes = [narrow.get_batch(i).num_rows for i in range(narrow.num_record_batches)]
        self._bounds = list(accumulate(sizes, initial=0))
        self.num_rows: int = self._bounds[-1]

    def record_batches(self, begin: int, end: int) -> Iterator[pa.RecordBatch]:
        for number, (first, behind) in enumerate(pairwise(self._bounds)):
            since, until = max(begin - first, 0), min(end, behind) - first
            if since < until:
                batch = self._file.get_batch(number)
                slices = (batch.slice(i, _ROWS) for i in range(0, batch.num_rows, _ROWS))
                yield from _cut(slices, since, until)

    def close(self) -> None:
        self._stored.close()


def _cut(batches: Iterable[pa.RecordBatch], begin: int, end: int) -> Iterator[pa.RecordBatch]:
    """The rows [begin, end) of consecutive batches."""
    first = 0
    for batch in batches:
        since, until = max(begin - first, 0), min(end - first, batch.num_rows)
        if since < until:
            yield batch.slice(since, until - since)
        first += batch.num_rows
        if first >= end:
            break


def open_arrow(file: DataFile, schema: Schema, threads: int) -> _ParquetFile | _IpcFile:
    """An open file; record_batches yields its rows [begin, end) in parts of bounded size. Raises
    DataError: the file cannot be read, or its columns do not fit the schema.
    """
    stored = open_stored(file)
    try:
        if file.path.endswith(".parquet"):
            return _ParquetFile(stored, schema, file.path, threads)
        return _IpcFile(stored, schema, file.path)
    except BaseException as error:
        stored.close()
        if isinstance(error, (pa.ArrowException, OSError)):
            raise cannot_read(file, error) from error
        raise


def next_batch(batches: Iterator[pa.RecordBatch], file: DataFile) -> pa.RecordBatch | None:
    """None at the end. Raises DataError."""
    try:
        return next(batches, None)
    except (pa.ArrowException, OSError) as error:
        raise cannot_read(file, error) from error


def _check_columns(schema: Schema, stored: pa.Schema, path: str) -> None:
    """Raises DataError that shows the schema and the columns of the file, if they do not fit."""
    wrong = []
    for field in schema.fields:
        kinds = [stored.field(i).type for i in stored.get_all_field_indices(field.name)]
        if len(kinds) != 1:
            wrong.append(f"{field.name!r}: expected one column, found {len(kinds)}")
        elif (expected := why_not(field, kinds[0])) is not None:
            wrong.append(f"{field.name!r}: expected {expected}, found {kinds[0]}")
    if wrong:
        columns = ", ".join(f"{column.name}: {column.type}" for column in stored)
        raise DataError(f"{path}: {'; '.join(wrong)}\n{schema}\nthe file has: {columns}")
