"""LR: logistic regression, one weight per id and per dense number: the baseline of the others.

Source: McMahan et al., "Ad Click Prediction: a View from the Trenches", KDD 2013.
"""

from typing import Any

from torch import Tensor, nn

from trireme.config import Config
from trireme.data.batch import Batch
from trireme.models.hyper_parameters import HyperParameters, click_recipe
from trireme.models.inputs import Weighted
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


def create(config: Config) -> Recipe:
    """Keys: those of trireme.models.hyper_parameters except sparse_feature_dim, which is 1."""
    hyper = HyperParameters(config)
    return click_recipe(LR(hyper.table(dim=1), **hyper.inputs()), hyper)
