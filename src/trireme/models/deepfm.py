"""DeepFM: a factorization machine and an MLP over the same rows.

Source: Guo et al., "DeepFM: A Factorization-Machine based Neural Network for CTR Prediction",
IJCAI 2017.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trireme.config import Config
from trireme.data.batch import Batch
from trireme.models.hyper_parameters import HyperParameters, click_recipe
from trireme.models.inputs import FeatureVectors
from trireme.models.layers import mlp, sum_of_products
from trireme.table import Table
from trireme.train.recipe import Recipe


class DeepFM(nn.Module):
    """logit = FM(ids, dense) + MLP(the vectors of the same FM).

    The table has dim 1 + D: the weight of an id, then its vector. layers: widths of the hidden
    layers; for the other arguments see trireme.models.inputs.
    """

    def __init__(
        self, rows: Table, *, layers: Sequence[int] = (400, 400, 400), **inputs: Any
    ) -> None:
        super().__init__()
        self.fields = FeatureVectors(rows, **inputs)
        self.bias = nn.Parameter(torch.zeros(1))
        self.mlp = mlp([self.fields.num_inputs * (rows.width - 1), *layers, 1])

    def forward(self, batch: Batch) -> Tensor:
        """(B,) logits."""
        fields = self.fields(batch)
        weights, vectors = fields[:, :, 0], fields[:, :, 1:]
        shallow = self.bias + weights.sum(1) + sum_of_products(vectors)
        logits: Tensor = shallow + self.mlp(vectors.flatten(1)).squeeze(1)
        return logits


def create(config: Config) -> Recipe:
    """Keys: those of trireme.models.hyper_parameters, and fc_sizes, the widths of the hidden layers
    (default 400, 400, 400).
    """
    hyper = HyperParameters(config)
    layers = hyper.sizes("fc_sizes", (400, 400, 400))
    model = DeepFM(hyper.table(dim=1 + hyper.dim), layers=layers, **hyper.inputs())
    return click_recipe(model, hyper)
