"""FM: factorization machine, a linear model plus the products of all pairs of inputs.

Source: Rendle, "Factorization Machines", ICDM 2010.
"""

from typing import Any

import torch
from torch import Tensor, nn

from trireme.config import Config
from trireme.data.batch import Batch
from trireme.models.hyper_parameters import HyperParameters, click_recipe
from trireme.models.inputs import FeatureVectors
from trireme.models.layers import sum_of_products
from trireme.table import Table
from trireme.train.recipe import Recipe


class FM(nn.Module):
    """logit = bias + sum of w_i x_i + sum over i<j of <v_i, v_j> x_i x_j.

    The table has dim 1 + D: the weight w of an id, then its vector v. Dense numbers take part like
    ids. For the other arguments see trireme.models.inputs.
    """

    def __init__(self, rows: Table, **inputs: Any) -> None:
        super().__init__()
        self.fields = FeatureVectors(rows, **inputs)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, batch: Batch) -> Tensor:
        """(B,) logits."""
        fields = self.fields(batch)
        logits: Tensor = self.bias + fields[:, :, 0].sum(1) + sum_of_products(fields[:, :, 1:])
        return logits


def create(config: Config) -> Recipe:
    """Keys: those of trireme.models.hyper_parameters."""
    hyper = HyperParameters(config)
    return click_recipe(FM(hyper.table(dim=1 + hyper.dim), **hyper.inputs()), hyper)
