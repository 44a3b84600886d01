"""The inputs of click models: sparse features and dense numbers, in several forms.

Shapes: B examples, F sparse features or ids, J dense numbers, D floats per row.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trireme.data.batch import Batch
from trireme.data.schema import Dense, Label, Schema, Sparse
from trireme.models.columns import expect_sizes, numbers_of
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


class Numbers(nn.Module):
    """A dense column alone: (B, width)."""

    def __init__(self, column: str, width: int) -> None:
        super().__init__()
        self.column, self.width = column, width

    def forward(self, batch: Batch) -> Tensor:
        return numbers_of(batch, self.column, self.width)
