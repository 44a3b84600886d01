"""FAT-DeepFFM: attention to the field-aware vectors of the inputs, and an MLP over their products.

Source: Zhang et al., "FAT-DeepFFM: Field Attentive Deep Field-aware Factorization Machine", 2019.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from trireme.config import Config
from trireme.data.batch import Batch
from trireme.errors import BadRequest
from trireme.models.hyper_parameters import HyperParameters, click_recipe
from trireme.models.inputs import FeatureVectors
from trireme.models.layers import mlp
from trireme.table import Table
from trireme.train.recipe import Recipe


class FATDeepFFM(nn.Module):
    """logit = bias + sum of all u_ij + MLP(u_ij * u_ji of all pairs i < j), element by element.

    u_ij = a_ij v_ij, where v_ij is the vector of input i for field j, and a = relu(W relu(V m)),
    with m_ij the largest element of v_ij: the attention. Each of the N inputs, features and dense
    numbers, is a field of its own. The table has dim N * D. layers: widths of the MLP's hidden
    layers, with dropout behind each of them. For the other arguments see trireme.models.inputs.

    PaddleRec's net has dropout behind the MLP's logit too, and a decay of its weights of 1e-7.

    Raises BadRequest: another dim.
    """

    def __init__(
        self,
        rows: Table,
        *,
        layers: Sequence[int] = (1600, 1600),
        dropout: float = 0.5,
        **inputs: Any,
    ) -> None:
        super().__init__()
        self.fields = FeatureVectors(rows, **inputs)
        num = self.fields.num_inputs
        if rows.width % num:
            raise BadRequest(f"FATDeepFFM: expected a table of dim {num} * D, found {rows.width}")
        *hidden, last = mlp([num * num, num * num, num * num])
        # Weights that are all 0 would have no gradient, and the vectors none from them.
        nn.init.ones_(cast(nn.Linear, last).bias)
        self.attention = nn.Sequential(*hidden, last, nn.ReLU())
        self.bias = nn.Parameter(torch.zeros(1))
        sizes = [num * (num - 1) // 2 * (rows.width // num), *layers, 1]
        self.mlp = mlp(sizes, dropouts=[dropout] * len(layers))

    def forward(self, batch: Batch) -> Tensor:
        """(B,) logits."""
        num = self.fields.num_inputs
        vectors_BNND = self.fields(batch).unflatten(2, (num, -1))
        weights_BNN = self.attention(vectors_BNND.amax(3).flatten(1)).unflatten(1, (num, num))
        scaled_BNND = vectors_BNND * weights_BNN[:, :, :, None]
        first, second = torch.triu_indices(num, num, offset=1, device=scaled_BNND.device)
        x = (scaled_BNND[:, first, second] * scaled_BNND[:, second, first]).flatten(1)
        logits: Tensor = self.bias + scaled_BNND.sum((1, 2, 3)) + self.mlp(x).squeeze(1)
        return logits


def create(config: Config) -> Recipe:
    """Keys: those of trireme.models.hyper_parameters, and layer_sizes_dnn, the widths of the MLP's
    hidden layers (default 1600, 1600). sparse_feature_dim, default 10, is the width of each of the
    vectors; a row has one for each input.
    """
    hyper = HyperParameters(config, sparse_feature_dim=10)
    inputs = hyper.inputs()
    num = len(inputs["features"]) + inputs["num_dense"]
    layers = hyper.sizes("layer_sizes_dnn", (1600, 1600))
    return click_recipe(
        FATDeepFFM(hyper.table(dim=num * hyper.dim), layers=layers, **inputs), hyper
    )
