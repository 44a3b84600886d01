"""How click models see an example of sparse features and dense numbers: three blocks.

Shapes: B examples, F sparse features, J dense numbers, D floats per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from trireme.data.batch import Batch
from trireme.nn import EmbeddingBag
from trireme.table import Table

CRITEO_FEATURES = tuple(f"C{i}" for i in range(1, 27))


class Concatenated(nn.Module):
    """Rows of all features side by side, then the dense numbers: (B, F*D + J).

    Args:
        rows: the table of the features.
        features: sparse features, F of them.
        num_dense: width J of the dense column, 0 for none.
        dense: name of the dense column.
        padding_key: this id has no row; see EmbeddingBag.
    """

    def __init__(
        self,
        rows: Table,
        *,
        features: Sequence[str],
        num_dense: int = 0,
        dense: str = "dense",
        padding_key: int | None = None,
    ) -> None:
        super().__init__()
        self.dense = dense if num_dense else None
        self.width = len(features) * rows.width + num_dense
        self.embedding = EmbeddingBag(rows, features=list(features), padding_key=padding_key)

    def forward(self, batch: Batch) -> Tensor:
        x: Tensor = self.embedding(batch).flatten(1)
        return x if self.dense is None else torch.cat([x, cast(Tensor, batch[self.dense])], 1)


class Weighted(nn.Module):
    """A linear model, bias + one weight per id + one per dense number: (B,).

    Args:
        rows: the table of the weights, of dim 1.
        features, num_dense, dense: as for Concatenated.
    """

    def __init__(
        self, rows: Table, *, features: Sequence[str], num_dense: int = 0, dense: str = "dense"
    ) -> None:
        super().__init__()
        self.dense = dense if num_dense else None
        self.embedding = EmbeddingBag(rows, features=list(features))
        self.bias = nn.Parameter(torch.zeros(1))
        self.weights = nn.Parameter(torch.zeros(num_dense)) if num_dense else None

    def forward(self, batch: Batch) -> Tensor:
        x: Tensor = self.embedding(batch).sum((1, 2)) + self.bias
        if self.dense is None or self.weights is None:
            return x
        return x + cast(Tensor, batch[self.dense]) @ self.weights


class Fields(nn.Module):
    """One vector per input, F + J of them: (B, F + J, D). That of a dense number is the number
    times a vector of its own, which the model learns like any parameter.

    Args:
        rows: the table of the features.
        features, num_dense, dense: as for Concatenated.
    """

    def __init__(
        self, rows: Table, *, features: Sequence[str], num_dense: int = 0, dense: str = "dense"
    ) -> None:
        super().__init__()
        self.dense = dense if num_dense else None
        self.num_fields = len(features) + num_dense
        self.embedding = EmbeddingBag(rows, features=list(features))
        self.vectors: nn.Parameter | None = None
        if num_dense:
            self.vectors = nn.Parameter(torch.empty(num_dense, rows.width).uniform_(-0.05, 0.05))

    def forward(self, batch: Batch) -> Tensor:
        x: Tensor = self.embedding(batch)
        if self.dense is None or self.vectors is None:
            return x
        return torch.cat([x, cast(Tensor, batch[self.dense])[:, :, None] * self.vectors], 1)
