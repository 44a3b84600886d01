"""FFM: a factorization machine in which an input has another vector for each field that it meets.

Source: Juan et al., "Field-aware Factorization Machines for CTR Prediction", RecSys 2016.
"""

from typing import Any

import torch
from torch import Tensor, nn

from trireme.config import Config
from trireme.data.batch import Batch
from trireme.errors import BadRequest
from trireme.models.hyper_parameters import HyperParameters, click_recipe
from trireme.models.inputs import FeatureVectors
from trireme.table import Table
from trireme.train.recipe import Recipe


class FFM(nn.Module):
    """logit = bias + sum of w_i x_i + sum over i<j of <v_ij, v_ji> x_i x_j.

    Each of the N inputs, features and dense numbers, is a field of its own. The table has dim
    1 + N * D: the weight w of an id, then its vectors v for each of the N fields. For the other
    arguments see trireme.models.inputs.

    Raises BadRequest: another dim.
    """

    def __init__(self, rows: Table, **inputs: Any) -> None:
        super().__init__()
        self.fields = FeatureVectors(rows, **inputs)
        if rows.width <= 1 or (rows.width - 1) % self.fields.num_inputs:
            raise BadRequest(
                f"FFM: expected a table of dim 1 + {self.fields.num_inputs} * D, found {rows.width}"
            )
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, batch: Batch) -> Tensor:
        """(B,) logits."""
        fields = self.fields(batch)
        num = self.fields.num_inputs
        vectors_BNND = fields[:, :, 1:].unflatten(2, (num, -1))
        products_BNN = (vectors_BNND * vectors_BNND.transpose(1, 2)).sum(3)
        # Each pair is there twice, and the products of inputs with themselves are on the diagonal.
        own = products_BNN.diagonal(dim1=1, dim2=2).sum(1)
        pairs = (products_BNN.sum((1, 2)) - own) / 2
        logits: Tensor = self.bias + fields[:, :, 0].sum(1) + pairs
        return logits


def create(config: Config) -> Recipe:
    """Keys: those of trireme.models.hyper_parameters. sparse_feature_dim, default 4, is the width
    of each of the vectors.
    """
    hyper = HyperParameters(config, sparse_feature_dim=4)
    inputs = hyper.inputs()
    num = len(inputs["features"]) + inputs["num_dense"]
    return click_recipe(FFM(hyper.table(dim=1 + num * hyper.dim), **inputs), hyper)
