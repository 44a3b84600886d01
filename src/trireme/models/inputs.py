"""The inputs of click models: sparse features and dense numbers, in several forms.

Shapes: B examples, F sparse features or ids, J dense numbers, D floats per row.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trireme.data.batch import Batch, Ragged
from trireme.data.schema import Dense, Label, Schema, Sparse
from trireme.errors import BadRequest
from trireme.nn import Embedding, EmbeddingBag
from trireme.table import Table

CRITEO_FEATURES = tuple(f"C{i}" for i in range(1, 27))


class _ClickInputs(nn.Module):
    """Looks up the sparse features and reads the dense column.

    Args:
        rows: table of the features.
        features: names of the F sparse features.
        num_dense: width J of the dense column, 0 for none.
        dense: name of the dense column.
        padding_key: this id has no row; see EmbeddingBag.
    """

    def __init__(
        self,
        rows: Table,
        *,
        features: Sequence[str] = CRITEO_FEATURES,
        num_dense: int = 13,
        dense: str = "dense",
        padding_key: int | None = None,
    ) -> None:
        super().__init__()
        self._dense, self._num_dense = dense, num_dense
        self.embedding = EmbeddingBag(rows, features=list(features), padding_key=padding_key)
        self.num_inputs, self.dim = len(features) + num_dense, rows.width
        self.width = len(features) * rows.width + num_dense

    def _dense_numbers(self, batch: Batch) -> Tensor:
        return numbers_of(batch, self._dense, self._num_dense)


class Concatenated(_ClickInputs):
    """Rows of all features side by side, then the dense numbers: (B, F*D + J)."""

    def forward(self, batch: Batch) -> Tensor:
        x: Tensor = self.embedding(batch).flatten(1)
        return torch.cat([x, self._dense_numbers(batch)], 1) if self._num_dense else x


class Weighted(_ClickInputs):
    """A linear model: bias + one weight per id (dim 1) + one per dense number: (B,)."""

    def __init__(self, rows: Table, **inputs: Any) -> None:
        super().__init__(rows, **inputs)
        self.bias = nn.Parameter(torch.zeros(1))
        self.weights = nn.Parameter(torch.zeros(self._num_dense)) if self._num_dense else None

    def forward(self, batch: Batch) -> Tensor:
        x: Tensor = self.embedding(batch).sum((1, 2)) + self.bias
        return x if self.weights is None else x + self._dense_numbers(batch) @ self.weights


class FeatureVectors(_ClickInputs):
    """One vector per input: (B, F + J, D). The vector of a dense number is the number times a
    learned vector.
    """

    def __init__(self, rows: Table, **inputs: Any) -> None:
        super().__init__(rows, **inputs)
        self.vectors: nn.Parameter | None = None
        if self._num_dense:
            vectors = torch.empty(self._num_dense, rows.width)
            self.vectors = nn.Parameter(vectors.uniform_(-0.05, 0.05))

    def forward(self, batch: Batch) -> Tensor:
        x: Tensor = self.embedding(batch)
        if self.vectors is None:
            return x
        return torch.cat([x, self._dense_numbers(batch)[:, :, None] * self.vectors], 1)


class ValuedVectors(nn.Module):
    """The rows of the ids of one column, each times the value beside it: (B, F, D).

    Args:
        rows: table of the ids.
        num_fields: F, ids of every example.
        ids: their column. values: dense column of their values.
        padding_key: this id has no row.
    """

    def __init__(
        self,
        rows: Table,
        *,
        num_fields: int,
        ids: str = "feat_idx",
        values: str = "feat_value",
        padding_key: int | None = None,
    ) -> None:
        super().__init__()
        self.embedding = Embedding(rows, features=ids, padding_key=padding_key)
        self.num_inputs, self.ids, self.values = num_fields, ids, values

    def forward(self, batch: Batch) -> Tensor:
        """Raises BadRequest: examples without exactly num_fields ids and values."""
        values_BF = numbers_of(batch, self.values, self.num_inputs)
        expect_sizes(batch, self.ids, self.num_inputs)
        rows_ND: Tensor = self.embedding(batch)
        return rows_ND.view(*values_BF.shape, -1) * values_BF[:, :, None]


def valued_schema(num_fields: int) -> Schema:
    """What PaddleRec's readers for ValuedVectors yield."""
    return Schema([Label("label"), Sparse("feat_idx"), Dense("feat_value", num_fields)])


class IdVectors(nn.Module):
    """The rows of the N ids of one column: (B, N, D)."""

    def __init__(self, rows: Table, *, num_inputs: int, column: str = "ids") -> None:
        super().__init__()
        self.embedding = Embedding(rows, features=column)
        self.column, self.num_inputs, self.dim = column, num_inputs, rows.width

    def forward(self, batch: Batch) -> Tensor:
        """Raises BadRequest: another number of ids."""
        expect_sizes(batch, self.column, self.num_inputs)
        rows_ND: Tensor = self.embedding(batch)
        return rows_ND.view(-1, self.num_inputs, self.dim)


class Vocabularies(nn.Module):
    """Features whose ids are numbered anew for each of them, so each has a table of its own: the
    rows of one id of each, side by side, (B, W), W the sum of the dims.

    dim: that of each table, where all have the same one.

    tables: by feature. padded: the features whose key 0 is padding.
    """

    def __init__(self, tables: Mapping[str, Table], padded: Collection[str] = ()) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            EmbeddingBag(table, features=name, padding_key=0 if name in padded else None)
            for name, table in tables.items()
        )
        self.num_inputs = len(tables)
        self.width = sum(table.width for table in tables.values())
        self.dim = self.width // self.num_inputs

    def forward(self, batch: Batch) -> Tensor:
        return torch.cat([part(batch).squeeze(1) for part in self.parts], 1)


@dataclass(frozen=True)
class SplitIds:
    """Makes one column for each of `names` of a column that has their ids, one of each."""

    column: str
    names: tuple[str, ...]

    def __call__(self, batch: Batch) -> Batch:
        """Raises BadRequest: another number of ids."""
        ids_FB = ids_of(batch, self.column, len(self.names)).T.contiguous()
        places = torch.arange(ids_FB.shape[1] + 1)
        split = {name: Ragged(own, places) for name, own in zip(self.names, ids_FB, strict=True)}
        return Batch({**batch.columns, **split}, batch.bags)


def tensor_of(batch: Batch, name: str) -> Tensor:
    """A column with a first dimension B. Raises BadRequest: it is ragged, or of strings."""
    column = batch[name]
    if not isinstance(column, Tensor):
        raise BadRequest(f"tensor_of: expected {name!r} as Tensor, found {type(column).__name__}")
    return column


def numbers_of(batch: Batch, name: str, width: int) -> Tensor:
    """A (B, width) column of numbers. Raises BadRequest: another column."""
    column = tensor_of(batch, name)
    if column.shape[1:] != (width,):
        raise BadRequest(
            f"numbers_of: expected {width} numbers in {name!r} of every example, found a column of"
            f" shape {tuple(column.shape)}"
        )
    return column


def ragged_of(batch: Batch, name: str) -> Ragged:
    """A column of bags. Raises BadRequest: another column."""
    column = batch[name]
    if not isinstance(column, Ragged):
        raise BadRequest(f"ragged_of: expected {name!r} as Ragged, found {type(column).__name__}")
    return column


def expect_sizes(batch: Batch, name: str, size: int) -> None:
    """Raise BadRequest for a column in which an example has another number of ids."""
    sizes_B = ragged_of(batch, name).offsets.diff()
    if torch.compiler.is_compiling():  # a graph cannot look at values
        return
    if (differs := sizes_B != size).any():
        i = int(differs.int().argmax())
        raise BadRequest(
            f"expect_sizes: expected {size} ids in {name!r} of every example, found"
            f" {int(sizes_B[i])} in example {i}"
        )


def expect_same_sizes(batch: Batch, names: Sequence[str], factors: Sequence[int] = ()) -> None:
    """Raise BadRequest where an example has not as many ids in one column as in the others, or not
    that many times as many as in the first: what is laid side by side belongs together.

    factors: of the columns behind the first, default 1.
    """
    first, *others = (ragged_of(batch, name).offsets.diff() for name in names)
    if torch.compiler.is_compiling():  # a graph cannot look at values
        return
    for name, sizes_B, factor in zip(names[1:], others, factors or [1] * len(others), strict=True):
        if (differs := sizes_B != factor * first).any():
            i = int(differs.int().argmax())
            share = "as many" if factor == 1 else f"{factor} times as many"
            raise BadRequest(
                f"expect_same_sizes: expected {share} ids in {name!r} as in {names[0]!r} of every"
                f" example, found {int(sizes_B[i])} and {int(first[i])} in example {i}"
            )


def ids_of(batch: Batch, name: str, width: int) -> Tensor:
    """The (B, width) ids of a column of bags of the same size. Raises BadRequest: other bags."""
    expect_sizes(batch, name, width)
    column = ragged_of(batch, name)
    return column.values[int(column.offsets[0]) : int(column.offsets[-1])].view(-1, width)


def with_items(batch: Batch, name: str, items: Tensor) -> Batch:
    """The batch with a column of items, all of them as if they were of its first example."""
    ends = torch.full((batch.num_examples + 1,), len(items))
    ends[0] = 0
    return Batch({**batch.columns, name: Ragged(items, ends)}, batch.bags)


def first_is_right(batch: Batch) -> Batch:
    """Adds "place" to a batch: of each example the first candidate is the right one."""
    return Batch({**batch.columns, "place": torch.zeros(batch.num_examples)}, batch.bags)


class Numbers(nn.Module):
    """A dense column alone: (B, width)."""

    def __init__(self, column: str, width: int) -> None:
        super().__init__()
        self.column, self.width = column, width

    def forward(self, batch: Batch) -> Tensor:
        return numbers_of(batch, self.column, self.width)
