"""Slot-DNN: an MLP over hundreds of sum-pooled ragged features of one table: PaddleRec's
models/rank/slot_dnn, for online learning.

Its shape is that of Covington et al., "Deep Neural Networks for YouTube Recommendations", RecSys
2016.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from trireme import optim
from trireme.config import Config
from trireme.data.batch import Batch
from trireme.data.schema import Label, Schema, Show, Sparse
from trireme.initializer import TailUniform
from trireme.models.hyper_parameters import HyperParameters, click_recipe
from trireme.models.inputs import Concatenated
from trireme.models.layers import mlp
from trireme.nn import CVM
from trireme.policy import UNSET_ACCESSOR, ShowClick, SparseAccessor
from trireme.table import Table
from trireme.train.recipe import Recipe

SLOT_FEATURES = tuple(str(i) for i in range(2, 302))


class SlotDnn(nn.Module):
    """logit = MLP(the sum of each feature's rows), clipped to +-15.

    Key 0 is padding in the table. If it pulls shows and clicks, nn.CVM makes inputs of them.
    features: ragged features. layers: widths of the hidden layers.
    """

    def __init__(
        self,
        rows: Table,
        *,
        features: Sequence[str] = SLOT_FEATURES,
        layers: Sequence[int] = (512, 256, 128),
    ) -> None:
        super().__init__()
        self.inputs = Concatenated(rows, features=features, num_dense=0, padding_key=0)
        self.width = rows.width
        self.cvm = CVM() if rows.schema.pulls_statistics else None
        self.mlp = mlp([self.inputs.width, *layers, 1], gain=0.2)

    def forward(self, batch: Batch) -> Tensor:
        """(B,) logits."""
        x: Tensor = self.inputs(batch)
        if self.cvm is not None:
            x = self.cvm(x.view(x.shape[0], -1, self.width)).flatten(1)
        logits: Tensor = self.mlp(x)
        return logits.squeeze(1).clamp(-15.0, 15.0)


def create(config: Config) -> Recipe:
    """Keys: those of trireme.models.hyper_parameters for the optimizer (of the dense part;
    learning_rate: default 5e-6) and sparse_feature_dim, and

    slot_num: ragged features, default 300: "2" to "301".
    layer_sizes: widths of the hidden layers, default those of fc_sizes, default 512, 256, 128.

    Inputs: show, click, the features; rows count the shows and clicks of these columns. Unless
    table_parameters says otherwise, rows learn and expire as Fleet's: FleetAdagrad with learning
    rate 0.05, initial_g2sum 3.0, weights within +-10; SparseAccessor with Fleet's Python defaults.
    """
    hyper = HyperParameters(config, **{"optimizer.learning_rate": 5e-6})
    features = tuple(str(i) for i in range(2, 2 + hyper.whole("slot_num", 300)))
    show_click = ShowClick("show", "click")
    rows = hyper.table(
        show_click=show_click,
        policy=SparseAccessor(show_click=show_click, **UNSET_ACCESSOR),
        optimizer=optim.FleetAdagrad(lr=0.05, initial_g2sum=3.0, bounds=(-10.0, 10.0)),
        initializer=TailUniform(-1e-4, 1e-4),
        absent="zeros",
    )
    layers = hyper.sizes("layer_sizes", hyper.sizes("fc_sizes", (512, 256, 128)))
    model = SlotDnn(rows, features=features, layers=layers)
    schema = Schema([Show("show"), Label("click"), *map(Sparse, features)])
    return click_recipe(model, hyper, schema=schema)
