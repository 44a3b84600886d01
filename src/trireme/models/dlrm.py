"""DLRM: products of all pairs of vectors: the rows, and one that an MLP makes of dense numbers.

Source: Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation
Systems", 2019.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trireme.config import Config
from trireme.data.batch import Batch
from trireme.errors import BadRequest
from trireme.models.columns import tensor_of
from trireme.models.hyper_parameters import HyperParameters, click_recipe
from trireme.models.inputs import CRITEO_FEATURES
from trireme.models.layers import mlp, pairwise_products
from trireme.nn import EmbeddingBag
from trireme.table import Table
from trireme.train.recipe import Recipe


class DLRM(nn.Module):
    """logit = top(bottom(dense), products of the pairs among rows and bottom(dense)).

    Args, besides those of trireme.models.inputs, with num_dense >= 1:
        bottom: widths of the layers of the dense part; the last one is the dim of the table.
        top: widths of the hidden layers after the products.
    """

    def __init__(
        self,
        rows: Table,
        *,
        features: Sequence[str] = CRITEO_FEATURES,
        num_dense: int = 13,
        dense: str = "dense",
        bottom: Sequence[int] = (512, 256, 64, 16),
        top: Sequence[int] = (512, 256),
    ) -> None:
        super().__init__()
        if num_dense < 1 or bottom[-1] != rows.width:
            raise BadRequest(
                "DLRM: expected a dense column and a bottom that ends with the table's dim "
                f"{rows.width}, found width {num_dense} and {tuple(bottom)}"
            )
        self.dense = dense
        self.embedding = EmbeddingBag(rows, features=list(features))
        self.bottom = mlp([num_dense, *bottom], activates_last=True)
        num_vectors = len(features) + 1
        self.top = mlp([rows.width + num_vectors * (num_vectors - 1) // 2, *top, 1])

    def forward(self, batch: Batch) -> Tensor:
        """(B,) logits."""
        dense_BD = self.bottom(tensor_of(batch, self.dense))
        vectors_BND = torch.cat([dense_BD[:, None], self.embedding(batch)], 1)
        logits: Tensor = self.top(torch.cat([dense_BD, pairwise_products(vectors_BND)], 1))
        return logits.squeeze(1)


def create(config: Config) -> Recipe:
    """Keys: those of trireme.models.hyper_parameters (sparse_feature_dim: default 16), and

    bot_layer_sizes: widths of the dense part, default 512, 256, 64, 16.
    top_layer_sizes: widths after the products, default 512, 256. A last width of 1 or 2 is
        PaddleRec's output layer and left out.
    """
    hyper = HyperParameters(config, sparse_feature_dim=16)
    top = hyper.sizes("top_layer_sizes", (512, 256), least=1)
    model = DLRM(
        hyper.table(),
        bottom=hyper.sizes("bot_layer_sizes", (512, 256, 64, 16), least=1),
        top=top[:-1] if top[-1] <= 2 else top,
        **hyper.inputs(),
    )
    return click_recipe(model, hyper)
