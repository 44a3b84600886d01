"""LR: logistic regression, one weight per id and per dense number: the baseline of the others.

Source: McMahan et al., "Ad Click Prediction: a View from the Trenches", KDD 2013.
"""

from typing import Any

import torch
from torch import Tensor, nn

from trireme.config import Config
from trireme.data.batch import Batch
from trireme.initializer import Normal
from trireme.models.hyper_parameters import HyperParameters, click_recipe
from trireme.models.inputs import ValuedVectors, Weighted, valued_schema
from trireme.table import Table
from trireme.train.recipe import Recipe


class LR(nn.Module):
    """logit = bias + the weights of the ids + dense . w. The table has dim 1; for the rest see
    trireme.models.inputs.
    """

    def __init__(self, rows: Table, **inputs: Any) -> None:
        super().__init__()
        self.linear = Weighted(rows, **inputs)

    def forward(self, batch: Batch) -> Tensor:
        """(B,) logits."""
        logits: Tensor = self.linear(batch)
        return logits


class ValuedLR(nn.Module):
    """logit = bias + sum over the fields of a weight per id times the value beside it.

    rows: table of the weights, of dim 1. Key 0 is padding. For the other arguments see
    ValuedVectors (trireme.models.inputs).
    """

    def __init__(self, rows: Table, **inputs: Any) -> None:
        super().__init__()
        self.fields = ValuedVectors(rows, padding_key=0, **inputs)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, batch: Batch) -> Tensor:
        """(B,) logits."""
        logits: Tensor = self.fields(batch).sum((1, 2)) + self.bias
        return logits


def create(config: Config) -> Recipe:
    """Keys: those of trireme.models.hyper_parameters except sparse_feature_dim, which is 1.

    With num_field, as in PaddleRec's logistic_regression, the inputs are label, feat_idx and
    feat_value: that many ids and their values.
    """
    hyper = HyperParameters(config)
    if hyper.get("num_field") is not None:
        num_fields = hyper.whole("num_field", 39)
        model = ValuedLR(hyper.table(dim=1, initializer=Normal(std=0.1)), num_fields=num_fields)
        schema = valued_schema(num_fields)
        return click_recipe(model, hyper, label="label", schema=schema)
    return click_recipe(LR(hyper.table(dim=1), **hyper.inputs()), hyper)
