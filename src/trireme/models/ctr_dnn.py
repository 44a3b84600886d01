"""CTR-DNN: embedding rows of all features side by side with the dense ones, through an MLP to one
logit.

Source: the deep part of Covington et al., "Deep Neural Networks for YouTube Recommendations",
RecSys 2016; sizes and initial weights are those of PaddleRec's models/rank/dnn.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from trireme.config import Config
from trireme.data.batch import Batch
from trireme.initializer import Uniform
from trireme.models.hyper_parameters import HyperParameters, click_recipe
from trireme.models.inputs import Concatenated
from trireme.models.layers import mlp
from trireme.table import Table
from trireme.train.recipe import Recipe


class CtrDnn(nn.Module):
    """logit = MLP(rows, dense). layers: widths of the hidden layers; for the other arguments see
    trireme.models.inputs.
    """

    def __init__(
        self, rows: Table, *, layers: Sequence[int] = (512, 256, 128, 32), **inputs: Any
    ) -> None:
        super().__init__()
        self.inputs = Concatenated(rows, **inputs)
        self.mlp = mlp([self.inputs.width, *layers, 1])

    def forward(self, batch: Batch) -> Tensor:
        """(B,) logits."""
        logits: Tensor = self.mlp(self.inputs(batch))
        return logits.squeeze(1)


def create(config: Config) -> Recipe:
    """Keys: those of trireme.models.hyper_parameters, and fc_sizes, the widths of the hidden layers
    (default 512, 256, 128, 32). Rows start within +-1, as in PaddleRec's dnn (init_range).
    """
    hyper = HyperParameters(config)
    layers = hyper.sizes("fc_sizes", (512, 256, 128, 32))
    return click_recipe(
        CtrDnn(hyper.table(initializer=Uniform(-1.0, 1.0)), layers=layers, **hyper.inputs()), hyper
    )
