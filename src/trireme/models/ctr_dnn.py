"""CTR-DNN: embedding rows of all features side by side with the dense ones, through an MLP to one
logit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from trireme.data.batch import Batch
from trireme.models.mlp import mlp
from trireme.nn import EmbeddingBag
from trireme.optim import Adam, Rule
from trireme.table import Table

CRITEO_FEATURES = tuple(f"C{i}" for i in range(1, 27))


class CtrDnn(nn.Module):
    """The model of PaddleRec's models/rank/dnn; defaults are its, and Criteo's columns.

    Args:
        features: sparse features, F of them, in one table.
        num_dense: width of the column "dense", 0 for none.
        dim: floats per row, D.
        layers: widths of the hidden layers.
        optimizer: update rule of the rows; default Adam, as PaddleRec's.
    """

    def __init__(
        self,
        *,
        features: Sequence[str] = CRITEO_FEATURES,
        num_dense: int = 13,
        dim: int = 9,
        layers: Sequence[int] = (512, 256, 128, 32),
        optimizer: Rule | None = None,
        table: str = "embedding",
    ) -> None:
        super().__init__()
        self.num_dense = num_dense
        rows = Table(table, dim=dim, optimizer=optimizer or Adam(lr=1e-3))
        self.embedding = EmbeddingBag(rows, features=list(features))
        self.mlp = mlp([len(features) * dim + num_dense, *layers, 1])

    def forward(self, batch: Batch) -> Tensor:
        """(B,) logits."""
        x = self.embedding(batch).flatten(1)
        if self.num_dense:
            x = torch.cat([x, cast(Tensor, batch["dense"])], 1)
        logits: Tensor = self.mlp(x)
        return logits.squeeze(1)
