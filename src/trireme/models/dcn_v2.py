"""DCNv2: cross layers, which multiply the inputs with each other, and an MLP.

Source: Wang et al., "DCN V2: Improved Deep & Cross Network and Practical Lessons for Web-scale
Learning to Rank Systems", WWW 2021.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trireme.config import Config
from trireme.data.batch import Batch
from trireme.errors import BadRequest
from trireme.models.hyper_parameters import HyperParameters, click_recipe
from trireme.models.inputs import Concatenated
from trireme.models.layers import CrossLayer, CrossMixture, mlp
from trireme.table import Table
from trireme.train.recipe import Recipe


class DCNv2(nn.Module):
    """logit = linear(MLP(cross(x))) if stacked, else linear(cross(x), MLP(x)); x: rows and dense
    numbers side by side.

    Args, besides those of trireme.models.inputs:
        num_cross: cross layers.
        rank: of their matrices; None for full matrices.
        experts: low-rank matrices that a layer mixes; None for one matrix. Needs a rank.
        stacked: the MLP is on top of the cross layers instead of beside them.
        layers: widths of the MLP's layers.
    """

    def __init__(
        self,
        rows: Table,
        *,
        num_cross: int = 2,
        rank: int | None = None,
        experts: int | None = None,
        stacked: bool = False,
        layers: Sequence[int] = (768, 768),
        **inputs: Any,
    ) -> None:
        super().__init__()
        if experts is not None and rank is None:
            raise BadRequest(f"DCNv2: expected a rank with {experts} experts, found none")
        self.stacked = stacked
        self.inputs = Concatenated(rows, **inputs)
        width = self.inputs.width
        self.cross = nn.ModuleList(
            CrossLayer(width, rank)
            if rank is None or experts is None
            else CrossMixture(width, rank, experts)
            for _ in range(num_cross)
        )
        self.mlp = mlp([width, *layers], activates_last=True)
        self.head = mlp([layers[-1] + (0 if stacked else width), 1])

    def forward(self, batch: Batch) -> Tensor:
        """(B,) logits."""
        x0 = x = self.inputs(batch)
        for layer in self.cross:
            x = layer(x0, x)
        x = self.mlp(x) if self.stacked else torch.cat([x, self.mlp(x0)], 1)
        logits: Tensor = self.head(x)
        return logits.squeeze(1)


def create(config: Config) -> Recipe:
    """Keys: those of trireme.models.hyper_parameters, and

    fc_sizes: widths of the MLP's layers, default 768, 768.
    cross_num: cross layers, default 2.
    is_Stacked: the MLP on top of the cross layers, default true.
    use_low_rank_mixture: mix low-rank cross layers, default true, with low_rank (256) and
        num_experts (4).
    """
    hyper = HyperParameters(config)
    is_mixture = hyper.flag("use_low_rank_mixture", True)
    model = DCNv2(
        hyper.table(),
        num_cross=hyper.whole("cross_num", 2),
        stacked=hyper.flag("is_Stacked", True),
        layers=hyper.sizes("fc_sizes", (768, 768), least=1),
        rank=hyper.whole("low_rank", 256) if is_mixture else None,
        experts=hyper.whole("num_experts", 4) if is_mixture else None,
        **hyper.inputs(),
    )
    return click_recipe(model, hyper)
