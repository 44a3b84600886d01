"""Columns in memory, such as those of a DataFrame, as a stream of batches."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from trireme.data.array_columns import ArrayColumns, described, named_columns
from trireme.data.batch import Batch, check_stream
from trireme.data.schema import Schema
from trireme.data.user_columns import columns_of
from trireme.errors import BadRequest, check_counts, check_flags, check_kind

BATCH_SIZE = 512
"""Examples per batch, unless said otherwise."""
_END = 256  # examples of each end by which data is compared


class ArrayDataset:
    """Batches of examples given as columns: a DataFrame, an Arrow table, or arrays by name.

    Iterating reads everything once, in another order each time if shuffled; `stream` reads one of
    several parts, or continues from a position. The order of an epoch depends on the number of
    examples, the seed and the epoch alone; streams cut it into parts of equal size.

    Args:
        columns: a DataFrame of pandas or polars, an Arrow table, or name -> N values: an array, a
            tensor, a list, Ragged. Columns that the schema does not name are not read.
            Label, Weight: (N,) finite numbers (weights not negative); Dense: (N,) or (N, dim)
            finite numbers. Sparse: (N,) one value per example, or lists of them: integers are keys
            as they are (64 bits), strings are hashed (see trireme.data.strings), and so are
            integers with hashed=True, as decimal strings; None, NaN and "" make an empty bag. Or
            Ragged, N bags of keys, maybe with weights. InsId, Content: N strings.
        schema: the fields to read; without a text format. None: all columns, by their kinds:
            numbers and times are `Number`, strings and lists are `Sparse`, lists of fractions
            `Dense`; strings called ins_id are `InsId`.
        batch_size: examples per batch; the last one of a stream may have fewer.
        shuffle: another order of the examples in every epoch, by `seed`.
        drop_last: leave out the last batch of a stream if it is short.

    Raises:
        DataError: a column is missing, of another length, or holds a value of another kind.
        BadRequest: an argument out of range.

    Threads: any for streams; one at a time for iterating, which counts epochs.
    """

    def __init__(
        self,
        columns: Any,
        *,
        schema: Schema | None = None,
        batch_size: int = BATCH_SIZE,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        if schema is not None:
            check_kind("ArrayDataset", "schema", schema, Schema, "a Schema([...])")
        check_counts("ArrayDataset", batch_size=batch_size)
        check_counts("ArrayDataset", low=0, seed=seed)
        check_flags("ArrayDataset", shuffle=shuffle, drop_last=drop_last)
        columns, are_strings = named_columns(columns), dict[str, bool | None]()
        if schema is None:
            schema, columns, are_strings = described(columns)
        if schema.format is not None:
            raise BadRequest(
                "ArrayDataset: expected tr.data.Schema(fields), without a format of files,"
                f" found one of {type(schema.format).__name__}"
            )
        self.schema = schema
        self.batch_size = batch_size
        self.drop_last = drop_last
        self._columns = ArrayColumns(schema, columns, are_strings)
        self.num_examples = self._columns.num_examples
        self._seed = seed if shuffle else None
        self._epoch = 0

    def __repr__(self) -> str:
        return (
            f"ArrayDataset({self.num_examples} examples, batch_size={self.batch_size},"
            f" columns {', '.join(self.schema.names)})"
        )

    @property
    def cut(self) -> str:
        """What a batch's examples depend on."""
        order = "in their order" if self._seed is None else f"shuffled with seed={self._seed}"
        rows = torch.arange(self.num_examples)
        ends, digest = torch.cat([rows[:_END], rows[-_END:]]), xxhash.xxh32()
        for part in self._columns.parts(ends):
            digest.update(part.numpy().tobytes())
        return (
            f"{self.num_examples} examples (XXH32 {digest.hexdigest()} of both ends) {order},"
            f" batch_size={self.batch_size}, drop_last={self.drop_last}"
        )

    def __len__(self) -> int:
        """Number of batches of one pass over all examples."""
        full, rest = divmod(self.num_examples, self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def __iter__(self) -> ArrayStream:
        epoch, self._epoch = self._epoch, self._epoch + 1
        return self.stream(0, 1, epoch=epoch)

    def stream(
        self, index: int, num_streams: int, *, start: tuple[int, ...] | None = None, epoch: int = 0
    ) -> ArrayStream:
        """Stream `index` of `num_streams`: every example in exactly one, sizes equal to within 1.

        Args:
            start: the `position` of a batch of this stream and epoch: the stream continues after
                that batch. None or (): from its beginning.
            epoch: determines the order if shuffled; any number >= 0.

        Raises:
            BadRequest: index, num_streams, start or epoch out of range.
        """
        check_stream("ArrayDataset", index, num_streams, epoch)
        begin, end = (self.num_examples * i // num_streams for i in (index, index + 1))
        start = tuple(start or (0,))
        if len(start) != 1 or not 0 <= start[0] <= end - begin:
            raise BadRequest(
                f"ArrayDataset.stream: expected a position (examples up to {end - begin},), "
                f"found {start}"
            )
        return ArrayStream(self, self._order(epoch)[begin:end], index, start[0])

    def _order(self, epoch: int) -> Tensor:
        if self._seed is None:
            return torch.arange(self.num_examples)
        return torch.from_numpy(
            np.random.default_rng([self._seed, epoch]).permutation(self.num_examples)
        )


class ArrayStream(Iterator[Batch]):
    """The batches of one stream; made by ArrayDataset.stream.

    position: after the latest batch returned.

    Threads: one at a time.
    """

    def __init__(self, dataset: ArrayDataset, order: Tensor, index: int, start: int) -> None:
        self.position = (start,)
        self._dataset = dataset
        self._order = order
        self._index = index

    def __next__(self) -> Batch:
        (begin,) = self.position
        rows_B = self._order[begin : begin + self._dataset.batch_size]
        is_short = len(rows_B) < self._dataset.batch_size
        if len(rows_B) == 0 or (is_short and self._dataset.drop_last):
            raise StopIteration
        batch = self._dataset._columns.batch(rows_B)
        self.position = (begin + len(rows_B),)
        batch.stream, batch.position = self._index, self.position
        return batch

    def or_no_examples(self) -> Iterable[Batch]:
        """This stream, or a batch without examples if the whole stream has no batch."""
        size = len(self._order)
        is_short = self._dataset.drop_last and size < self._dataset.batch_size
        return self if size and not is_short else [self._dataset._columns.batch(self._order[:0])]

    def fraction_read(self) -> float:
        """The fraction of the stream that has been returned, 0 to 1."""
        return self.position[0] / len(self._order) if len(self._order) else 1.0


def as_dataset(data: Any, *, shuffle: bool = False) -> Any:
    """Columns in memory as a dataset; anything else as it is. shuffle: anew in every epoch. Raises
    BadRequest: a path, a single column, or nothing that can be iterated.
    """
    if isinstance(data, (str, bytes, os.PathLike)):
        raise BadRequest(
            f"data: expected a dataset, batches, or columns by name, found {data!r};"
            " tr.data.QueueDataset reads files, and pandas.read_csv makes a DataFrame"
        )
    if hasattr(data, "iloc") and not hasattr(data, "columns"):  # a Series of pandas
        raise BadRequest(
            "data: expected a DataFrame, or columns by name, found a Series, which is one column or"
            " row; data[['name']] and data[:1] are DataFrames"
        )
    if isinstance(data, type):
        raise BadRequest(
            "data: expected a dataset, batches, or columns by name, found the class"
            f" {data.__name__}; make one: {data.__name__}(...)"
        )
    if columns_of(data) is not None:
        return ArrayDataset(data, shuffle=shuffle)
    if not (hasattr(data, "__iter__") or hasattr(data, "__getitem__") or hasattr(data, "stream")):
        raise BadRequest(
            "data: expected a dataset, batches, or columns by name, found"
            f" {type(data).__name__}, which cannot be iterated"
        )
    return data
