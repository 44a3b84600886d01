"""Wide & Deep: a linear model of the features beside an MLP over their embedding rows.

Source: Cheng et al., "Wide & Deep Learning for Recommender Systems", DLRS 2016.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from trireme.data.batch import Batch
from trireme.models.ctr_dnn import CRITEO_FEATURES
from trireme.models.mlp import mlp
from trireme.nn import EmbeddingBag
from trireme.optim import Adagrad, Adam, Rule
from trireme.table import Table


class WideDeep(nn.Module):
    """logit = linear(dense, one weight per id) + MLP(dense, rows).

    Args:
        features: sparse features of both parts, F of them. Crossed features are columns like any
            other.
        num_dense: width of the column "dense", 0 for none.
        dim: floats per row of the deep part, D.
        layers: widths of the hidden layers.
        wide, deep: update rules of the two tables.
        salt: give every feature its own key space in both tables.
    """

    def __init__(
        self,
        *,
        features: Sequence[str] = CRITEO_FEATURES,
        num_dense: int = 13,
        dim: int = 9,
        layers: Sequence[int] = (400, 400, 400),
        wide: Rule | None = None,
        deep: Rule | None = None,
        salt: bool = False,
    ) -> None:
        super().__init__()
        self.num_dense = num_dense
        names = list(features)
        wide_rows = Table("wide", dim=1, optimizer=wide or Adagrad(lr=0.01), salt=salt)
        deep_rows = Table("deep", dim=dim, optimizer=deep or Adam(lr=1e-3), salt=salt)
        self.wide = EmbeddingBag(wide_rows, features=names)
        self.deep = EmbeddingBag(deep_rows, features=names)
        self.mlp = mlp([len(names) * dim + num_dense, *layers, 1])
        self.linear = nn.Linear(num_dense, 1) if num_dense else None

    def forward(self, batch: Batch) -> Tensor:
        """(B,) logits."""
        wide = self.wide(batch).sum((1, 2))
        x = self.deep(batch).flatten(1)
        if self.linear is not None:
            dense = cast(Tensor, batch["dense"])
            wide = wide + self.linear(dense).squeeze(1)
            x = torch.cat([x, dense], 1)
        deep: Tensor = self.mlp(x)
        logits: Tensor = wide + deep.squeeze(1)
        return logits
