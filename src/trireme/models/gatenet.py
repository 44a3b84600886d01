"""GateNet: gates on the rows of the features, and on the hidden layers of an MLP.

Source: Huang et al., "GateNet: Gating-Enhanced Deep Network for Click-Through Rate Prediction",
2020.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trireme.config import Config
from trireme.data.batch import Batch
from trireme.models.hyper_parameters import HyperParameters, click_recipe
from trireme.models.inputs import Concatenated
from trireme.models.layers import mlp
from trireme.table import Table
from trireme.train.recipe import Recipe


class GateNet(nn.Module):
    """logit = MLP(gated rows, dense), with a gate after each hidden layer.

    The gate of a row e of feature f is the number sigmoid(<w_f, e>); that of a hidden layer a is
    the vector tanh(W a).

    Args, besides those of trireme.models.inputs:
        layers: widths of the hidden layers.
        gates_rows, gates_hidden: whether there are these gates.
    """

    def __init__(
        self,
        rows: Table,
        *,
        layers: Sequence[int] = (400, 400, 400),
        gates_rows: bool = True,
        gates_hidden: bool = True,
        **inputs: Any,
    ) -> None:
        super().__init__()
        self.inputs = Concatenated(rows, **inputs)
        dim, sizes = rows.width, (self.inputs.width, *layers)
        num_features = len(self.inputs.embedding.features)
        self.row_gates_FD: nn.Parameter | None = None
        if gates_rows:
            self.row_gates_FD = nn.Parameter(torch.randn(num_features, dim) / math.sqrt(dim))
        self.num_rows = num_features * dim
        self.hidden = nn.ModuleList(map(mlp, itertools.pairwise(sizes)))
        self.gates = nn.ModuleList(mlp([size, size]) for size in layers if gates_hidden)
        self.head = mlp([sizes[-1], 1])

    def forward(self, batch: Batch) -> Tensor:
        """(B,) logits."""
        x = self.inputs(batch)
        if self.row_gates_FD is not None:
            rows, dense = x[:, : self.num_rows], x[:, self.num_rows :]
            rows_BFD = rows.unflatten(1, self.row_gates_FD.shape)
            gates_BF1 = torch.sigmoid((rows_BFD * self.row_gates_FD).sum(2, keepdim=True))
            x = torch.cat([(rows_BFD * gates_BF1).flatten(1), dense], 1)
        for layer, gate in itertools.zip_longest(self.hidden, self.gates):
            x = torch.relu(layer(x))
            x = x if gate is None else x * torch.tanh(gate(x))
        logits: Tensor = self.head(x)
        return logits.squeeze(1)


def create(config: Config) -> Recipe:
    """Keys: those of trireme.models.hyper_parameters, and

    fc_sizes: widths of the hidden layers, default 400, 400, 400.
    use_embedding_gate, use_hidden_gate: the gates, default true.
    """
    hyper = HyperParameters(config)
    model = GateNet(
        hyper.table(),
        layers=hyper.sizes("fc_sizes", (400, 400, 400)),
        gates_rows=hyper.flag("use_embedding_gate", True),
        gates_hidden=hyper.flag("use_hidden_gate", True),
        **hyper.inputs(),
    )
    return click_recipe(model, hyper)
