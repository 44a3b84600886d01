"""xDeepFM: products of the vectors of two, three and more inputs, a linear model and an MLP, all
over the same rows.

Source: Lian et al., "xDeepFM: Combining Explicit and Implicit Feature Interactions for Recommender
Systems", KDD 2018.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trireme.config import Config
from trireme.data.batch import Batch
from trireme.models.hyper_parameters import HyperParameters, click_recipe
from trireme.models.inputs import FeatureVectors
from trireme.models.layers import CompressedInteraction, mlp
from trireme.table import Table
from trireme.train.recipe import Recipe


class XDeepFM(nn.Module):
    """logit = bias + weights of the inputs + linear(CIN(vectors)) + MLP(vectors).

    The table has dim 1 + D: the weight of an id, then its vector. layers: widths of the hidden
    layers; interaction: vectors that each layer of the CIN makes; for the other arguments see
    trireme.models.inputs.
    """

    def __init__(
        self,
        rows: Table,
        *,
        layers: Sequence[int] = (400, 400),
        interaction: Sequence[int] = (200, 200, 200),
        **inputs: Any,
    ) -> None:
        super().__init__()
        self.fields = FeatureVectors(rows, **inputs)
        self.bias = nn.Parameter(torch.zeros(1))
        self.cin = CompressedInteraction(self.fields.num_inputs, interaction)
        self.cin_weights = nn.Linear(sum(interaction), 1, bias=False)
        self.mlp = mlp([self.fields.num_inputs * (rows.width - 1), *layers, 1])

    def forward(self, batch: Batch) -> Tensor:
        """(B,) logits."""
        fields = self.fields(batch)
        weights, vectors = fields[:, :, 0], fields[:, :, 1:]
        deep = self.cin_weights(self.cin(vectors)) + self.mlp(vectors.flatten(1))
        logits: Tensor = self.bias + weights.sum(1) + deep.squeeze(1)
        return logits


def create(config: Config) -> Recipe:
    """Keys: those of trireme.models.hyper_parameters, and

    layer_sizes_dnn: widths of the MLP's hidden layers, default fc_sizes, else 400, 400.
    layer_sizes_cin: vectors of each layer of the CIN, default 200, 200, 200.
    """
    hyper = HyperParameters(config)
    model = XDeepFM(
        hyper.table(dim=1 + hyper.dim),
        layers=hyper.sizes("layer_sizes_dnn", hyper.sizes("fc_sizes", (400, 400))),
        interaction=hyper.sizes("layer_sizes_cin", (200, 200, 200), least=1),
        **hyper.inputs(),
    )
    return click_recipe(model, hyper)
