"""L0-SIGN: a graph of the features of an example, whose edges are the products that matter.

Source: Su et al., "Detecting Beneficial Feature Interactions for Recommender Systems", AAAI 2021.
Edges, and the number of them that is expected, are as in Louizos et al., "Learning Sparse Neural
Networks through L0 Regularization", ICLR 2018, eq. 10 to 12.

PaddleRec's network takes logarithms to the base 2 in place of natural ones, so that what it calls
the number of edges is another number.
"""

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from trireme.config import Config
from trireme.data.batch import Batch
from trireme.data.schema import Dense, Label, Schema, Sparse
from trireme.errors import BadRequest
from trireme.initializer import Normal
from trireme.metrics import AUC
from trireme.models.columns import examples_of, expect_same_sizes, numbers_of, ragged_of, values_of
from trireme.models.hyper_parameters import HyperParameters
from trireme.models.layers import mlp
from trireme.nn import Embedding
from trireme.table import Table
from trireme.train.recipe import Recipe

NODES, EDGES, ENDS = "nodes", "edges", "ends"


class SIGN(nn.Module):
    """scores = linear(mean over the nodes of an example of the mean of s_e z_e over their edges).

    An edge e has two nodes; z_e = MLP(u * v) of the rows of their features, and 0 <= s_e <= 1 is
    from a second table: how much of the edge there is. An edge with s_e = 0 is none. In training
    s_e is random (a hard concrete distribution), so that the number of edges has a gradient.

    Columns: "nodes", the features of an example; "edges", places of the nodes of each edge among
    them, two by two; "ends", the features at these places.

    Args:
        nodes, edges: tables of the features, of dim D each, for z and for s.
        hidden: width of the hidden layer of each MLP.
        temperature, lowest, highest: of s; lowest < 0 and highest > 1.
        dropout: in the MLP of s, in training.

    Raises BadRequest: other bounds.
    """

    def __init__(
        self,
        nodes: Table,
        edges: Table,
        *,
        hidden: int = 32,
        temperature: float = 0.66,
        lowest: float = -0.1,
        highest: float = 1.1,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        if not lowest < 0 < 1 < highest:
            raise BadRequest(
                f"SIGN: expected an interval around 0 and 1, found {lowest} to {highest}"
            )
        self.nodes = Embedding(nodes, features=NODES)
        self.ends = Embedding(edges, features=ENDS)
        self.temperature, self.lowest, self.highest = temperature, lowest, highest
        location = cast(nn.Linear, mlp([hidden, 1])[0])
        with torch.no_grad():  # edges are there at first
            location.weight += 0.2
        begin = mlp([edges.width, hidden], activates_last=True, dropouts=[dropout])
        self.exists = nn.Sequential(*begin, location)
        self.interaction = mlp([nodes.width, hidden, nodes.width])
        self.head = cast(nn.Linear, mlp([nodes.width, 2])[0])
        nn.init.constant_(self.head.bias, 0.5)  # beyond 0 and 1 the loss has no gradient

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """ "scores", (B, 2) for no and yes; "edges", (B,) the expected number of edges of an
        example; "size", (B,) the squares of what its nodes have become, added up.
        """
        rows_ND, begins_B1 = self.nodes(batch), ragged_of(batch, NODES).offsets
        ends_E2D = self.ends(batch).unflatten(0, (-1, 2))
        expect_same_sizes(batch, (EDGES, ENDS))
        begins_B1, edges = begins_B1 - begins_B1[0], ragged_of(batch, EDGES)
        places_E2 = values_of(batch, EDGES).view(-1, 2)
        example_E = examples_of(edges.offsets // 2, places_E2.shape[0])
        places_E2 = places_E2 + begins_B1[example_E, None]
        location_E = self.exists(ends_E2D.prod(1)).squeeze(1).float()
        strength_E = self._strength(location_E)

        sender_ED, receiver_ED = rows_ND[places_E2[:, 0]], rows_ND[places_E2[:, 1]]
        made_ED = self.interaction(sender_ED * receiver_ED).float()
        messages_ED = made_ED * strength_E[:, None]
        sums_ND = torch.zeros_like(rows_ND).index_add(0, places_E2[:, 1], messages_ED)
        is_there_E = (strength_E > 0).to(rows_ND.dtype)
        counts_N = rows_ND.new_zeros(rows_ND.shape[0]).index_add(0, places_E2[:, 1], is_there_E)
        nodes_ND = sums_ND / counts_N.clamp(min=1)[:, None]

        num = begins_B1.shape[0] - 1
        node_example_N = examples_of(begins_B1, rows_ND.shape[0])
        totals_BD = rows_ND.new_zeros(num, rows_ND.shape[1]).index_add(0, node_example_N, nodes_ND)
        scores_B2 = self.head(totals_BD / begins_B1.diff().clamp(min=1)[:, None])
        shift = self.temperature * math.log(-self.lowest / self.highest)
        chance_E = torch.sigmoid(location_E - shift)
        return {
            "scores": scores_B2,
            "edges": rows_ND.new_zeros(num).index_add(0, example_E, chance_E),
            "size": rows_ND.new_zeros(num).index_add(0, node_example_N, nodes_ND.square().sum(1)),
        }

    def _strength(self, location_E: Tensor) -> Tensor:
        """The s of the edges, by the logits that they are there."""
        if self.training:
            uniform = torch.rand_like(location_E).clamp(1e-6, 1 - 1e-6)
            noise = uniform.log() - (1 - uniform).log()
            location_E = (location_E + noise) / self.temperature
        stretched = torch.sigmoid(location_E) * (self.highest - self.lowest) + self.lowest
        return stretched.clamp(0, 1)


@dataclass(frozen=True)
class SignLoss:
    """The squared error of the scores, cut at 0 and 1, and the mean over the examples of their
    edges and sizes, with these weights. PaddleRec takes the mean of all edges and adds up all sizes
    of a batch, both with l0_weight.
    """

    edges: float
    size: float

    def __call__(self, outputs: dict[str, Tensor], batch: Batch) -> Tensor:
        right = numbers_of(batch, "label", 2)
        error = nn.functional.mse_loss(outputs["scores"].clamp(0, 1).to(right.dtype), right)
        penalty = self.edges * outputs["edges"] + self.size * outputs["size"]
        return error + penalty.mean()


def add_click(batch: Batch) -> Batch:
    """The batch with the column "click", 0 or 1, of the pair "label"."""
    label_B2 = numbers_of(batch, "label", 2)
    return Batch({**batch.columns, "click": label_B2[:, 1].contiguous()}, batch.bags)


def create(config: Config) -> Recipe:
    """Keys: those of trireme.models.hyper_parameters for the optimizer, and

    dim: floats per row of the tables "nodes" and "edges", default 8.
    hidden_layer: width of the hidden layers, default 32.
    l0_para: temperature and bounds of s, default 0.66, -0.1, 1.1.
    l0_weight, l2_weight: of edges and of sizes in the loss, default 0.001.
    pred_edges: 1, that edges are learnt. (PaddleRec's reader does not read edges that are given.)

    Inputs: num_nodes (not needed), edges, nodes, ends, and label: 1, 0 for no, 0, 1 for yes.

    Raises BadRequest: another pred_edges, or l0_para that are not three such numbers.
    """
    hyper = HyperParameters(config)
    hyper.fixed("pred_edges", 1)
    dim = hyper.whole("dim", 8)
    temperature, lowest, highest = hyper.numbers("l0_para", (0.66, -0.1, 1.1))
    model = SIGN(
        hyper.table("nodes", dim=dim),
        hyper.table("edges", dim=dim, initializer=Normal(0.2, 0.01)),
        hidden=hyper.whole("hidden_layer", 32),
        temperature=temperature,
        lowest=lowest,
        highest=highest,
    )
    inputs = (Label("num_nodes"), Sparse(EDGES), Sparse(NODES), Sparse(ENDS), Dense("label", 2))
    return hyper.recipe(
        model,
        SignLoss(
            hyper.number("l0_weight", 1e-3, may_be_zero=True),
            hyper.number("l2_weight", 1e-3, may_be_zero=True),
        ),
        schema=Schema(inputs),
        metrics=[AUC(output="scores", label="click")],
        prepare=add_click,
    )
