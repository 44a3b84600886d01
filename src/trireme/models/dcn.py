"""DCN: cross layers with one vector of weights each, beside an MLP.

Source: Wang et al., "Deep & Cross Network for Ad Click Predictions", ADKDD 2017.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trireme.config import Config
from trireme.data.batch import Batch
from trireme.models.hyper_parameters import HyperParameters, click_recipe
from trireme.models.inputs import Concatenated
from trireme.models.layers import VectorCrossLayer, mlp
from trireme.table import Table
from trireme.train.recipe import Recipe


class DCN(nn.Module):
    """logit = linear(cross(x), MLP(x)); x: rows and dense numbers side by side.

    num_cross: cross layers. layers: widths of the MLP's layers; for the other arguments see
    trireme.models.inputs.
    """

    def __init__(
        self,
        rows: Table,
        *,
        num_cross: int = 6,
        layers: Sequence[int] = (1024, 1024),
        **inputs: Any,
    ) -> None:
        super().__init__()
        self.inputs = Concatenated(rows, **inputs)
        width = self.inputs.width
        self.cross = nn.ModuleList(VectorCrossLayer(width) for _ in range(num_cross))
        self.mlp = mlp([width, *layers], activates_last=True)
        self.head = mlp([layers[-1] + width, 1])

    def forward(self, batch: Batch) -> Tensor:
        """(B,) logits."""
        x0 = x = self.inputs(batch)
        for layer in self.cross:
            x = layer(x0, x)
        logits: Tensor = self.head(torch.cat([x, self.mlp(x0)], 1))
        return logits.squeeze(1)


@dataclass(frozen=True)
class PenalizedLogLoss:
    """The log loss plus l2 times the squared norm of the weights of the cross layers."""

    model: DCN
    l2: float

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels)
        norms = [layer.get_parameter("weight").square().sum() for layer in self.model.cross]
        return loss + self.l2 * torch.stack(norms).sum()


def create(config: Config) -> Recipe:
    """Keys: those of trireme.models.hyper_parameters, and

    fc_sizes: widths of the MLP's layers, default 1024, 1024.
    cross_num: cross layers, default 6.
    l2_reg_cross: what the squared norm of the cross layers' weights costs, default nothing.

    Key 0 is padding, as in PaddleRec's dcn.
    """
    hyper = HyperParameters(config)
    model = DCN(
        hyper.table(),
        num_cross=hyper.whole("cross_num", 6),
        layers=hyper.sizes("fc_sizes", (1024, 1024), least=1),
        padding_key=0,
        **hyper.inputs(),
    )
    if hyper.get("l2_reg_cross") is None:
        return click_recipe(model, hyper)
    l2 = hyper.number("l2_reg_cross", 1, may_be_zero=True)
    return click_recipe(model, hyper, loss=PenalizedLogLoss(model, l2))
