"""Wide & Deep: a linear model of the features beside an MLP over their embedding rows.

Source: Cheng et al., "Wide & Deep Learning for Recommender Systems", DLRS 2016.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from trireme.config import Config
from trireme.data.batch import Batch
from trireme.initializer import Uniform
from trireme.models.hyper_parameters import HyperParameters, click_recipe
from trireme.models.inputs import Concatenated, Weighted
from trireme.models.layers import mlp
from trireme.table import Table
from trireme.train.recipe import Recipe


class WideDeep(nn.Module):
    """logit = linear(ids, dense) + MLP(rows, dense).

    wide, deep: tables of the linear part, with dim 1, and of the MLP. layers: widths of the hidden
    layers. Crossed features are columns like any other; see trireme.models.inputs for the rest.
    """

    def __init__(
        self, wide: Table, deep: Table, *, layers: Sequence[int] = (400, 400, 400), **inputs: Any
    ) -> None:
        super().__init__()
        self.wide = Weighted(wide, **inputs)
        self.deep = Concatenated(deep, **inputs)
        self.mlp = mlp([self.deep.width, *layers, 1])

    def forward(self, batch: Batch) -> Tensor:
        """(B,) logits."""
        logits: Tensor = self.wide(batch) + self.mlp(self.deep(batch)).squeeze(1)
        return logits


def create(config: Config) -> Recipe:
    """Keys: those of trireme.models.hyper_parameters, and fc_sizes, the widths of the hidden layers
    (default 400, 400, 400). Tables: "wide" and "embedding", whose rows start within +-1, as in
    PaddleRec's wide_deep (init_range).
    """
    hyper = HyperParameters(config)
    model = WideDeep(
        hyper.table("wide", dim=1),
        hyper.table(initializer=Uniform(-1.0, 1.0)),
        layers=hyper.sizes("fc_sizes", (400, 400, 400)),
        **hyper.inputs(),
    )
    return click_recipe(model, hyper)
