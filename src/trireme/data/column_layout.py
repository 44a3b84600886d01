"""The columns of a schema in the core: their order, and conversion of batches to and from it."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trireme import _core
from trireme.data.batch import Bags, Batch, Column, Strings
from trireme.data.schema import Content, Dense, InsId, Schema, Sparse
from trireme.errors import BadRequest, Internal


class ColumnLayout:
    """Order of the columns in a store: fields of numbers, then of strings, then sparse features.

    Threads: any; immutable.
    """

    def __init__(self, schema: Schema) -> None:
        self._schema, fields = schema, schema.fields
        self._numbers = [f for f in fields if not isinstance(f, (InsId, Content, Sparse))]
        self._strings = [f.name for f in fields if isinstance(f, (InsId, Content))]
        self._sparse = schema.sparse
        self._names = [*(f.name for f in self._numbers), *self._strings, *self._sparse]
        self.ins_id = next(
            (self._strings.index(f.name) for f in fields if isinstance(f, InsId)), None
        )
        """Number of the ins_id among the fields of strings; None without one."""

    def new_store(self, *, has_weights: bool) -> _core.ColumnStore:
        """An empty store. has_weights: each value of a sparse feature has a weight."""
        dims = [f.dim if isinstance(f, Dense) else 1 for f in self._numbers]
        return _core.ColumnStore(dims, len(self._strings), len(self._sparse), has_weights)

    def numbers_of(self, names: Iterable[str]) -> list[int]:
        """The store's numbers of these columns, ascending. Raises BadRequest for unknown names."""
        names = set(names)
        if unknown := names - set(self._names):
            raise BadRequest(
                f"InMemoryDataset.slots_shuffle: expected names out of {', '.join(self._names)}, "
                f"found {', '.join(sorted(unknown))}"
            )
        return [number for number, name in enumerate(self._names) if name in names]

    @property
    def all_numbers(self) -> list[int]:
        return list(range(len(self._names)))

    def append(self, store: _core.ColumnStore, batch: Batch, pool: _core.Pool) -> None:
        """Add the examples of a batch of this schema."""
        if batch.bags is not None and batch.bags.names != self._sparse:
            raise Internal(
                f"ColumnLayout.append: expected the features {self._sparse}, "
                f"found {batch.bags.names}"
            )
        store.append(
            batch.num_examples,
            [_array(batch.columns[field.name]) for field in self._numbers],
            [_texts(batch.columns[name]) for name in self._strings],
            *_bags(batch.bags),
            pool,
        )

    def batch(self, store: _core.ColumnStore, begin: int, end: int, pool: _core.Pool) -> Batch:
        """Examples begin .. end - 1."""
        return to_batch(self._schema, store.batch(begin, end, pool))


def to_batch(schema: Schema, columns: tuple[Any, ...]) -> Batch:
    """The columns of the core as a batch.

    Args:
        columns: numbers, strings, keys, offsets and weights; see _core.TextParser.take.
    """
    numbers, strings, keys, offsets, weights = columns
    numbers_left, strings_left = iter(numbers), iter(strings)
    named: dict[str, Column] = {}
    for field in schema.not_sparse:
        if isinstance(field, (InsId, Content)):
            named[field.name] = Strings(*map(torch.from_numpy, next(strings_left)))
        elif isinstance(field, Dense):
            named[field.name] = torch.from_numpy(next(numbers_left))
        else:
            named[field.name] = torch.from_numpy(next(numbers_left)).view(-1)
    if not schema.sparse:
        return Batch(named)
    bags = Bags(
        schema.sparse,
        torch.from_numpy(keys),
        torch.from_numpy(offsets),
        None if weights is None else torch.from_numpy(weights),
    )
    return Batch(named, bags, hashed=schema.hashed)


def _array(column: Column) -> NDArray[np.float32]:
    assert isinstance(column, Tensor)
    return np.ascontiguousarray(column.numpy())


def _texts(column: Column) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    assert isinstance(column, Strings)
    return column.data.numpy(), column.offsets.numpy()


def _bags(
    bags: Bags | None,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32] | None]:
    """Keys, offsets and weights as the store takes them."""
    if bags is None:
        return np.empty(0, np.int64), np.zeros(1, np.int64), None
    weights = None if bags.weights is None else bags.weights.numpy()
    return bags.values.numpy(), bags.offsets.numpy(), weights
