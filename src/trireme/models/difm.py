"""DIFM: a factorization machine whose inputs are weighed anew in each example, by an MLP over
their numbers and by self-attention among their vectors.

Source: Lu et al., "A Dual Input-aware Factorization Machine for CTR Prediction", IJCAI 2020; the
factors of an example are N times a softmax, as in its predecessor IFM (Yu et al., IJCAI 2019): the
paper itself takes the sums of both parts as they are.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trireme.config import Config
from trireme.data.batch import Batch
from trireme.errors import BadRequest
from trireme.models.columns import tensor_of
from trireme.models.hyper_parameters import HyperParameters, click_recipe
from trireme.models.layers import SelfAttention, mlp, sum_of_products
from trireme.nn import EmbeddingBag
from trireme.table import Table
from trireme.train.recipe import Recipe


class DIFM(nn.Module):
    """logit = bias + sum of m_i w_i + sum over i<j of m_i m_j <v_i, v_j>, with N factors m =
    N * softmax(MLP(vectors) + linear(attention(vectors))).

    The N inputs are the features and, if there are dense numbers, one more, whose weight is a
    linear map of them and whose vector is an MLP of them.

    Args:
        rows: table of dim 1 + D: the weight w of an id, then its vector v.
        features, num_dense, dense: see trireme.models.inputs.
        layers: widths of the hidden layers of the MLP that makes factors.
        dense_layers: widths of the hidden layers that make the vector of the dense numbers.
        head_width, heads: of the attention.
    """

    def __init__(
        self,
        rows: Table,
        *,
        features: Sequence[str],
        num_dense: int = 0,
        dense: str = "dense",
        layers: Sequence[int] = (256, 256),
        dense_layers: Sequence[int] = (256,),
        head_width: int = 8,
        heads: int = 4,
    ) -> None:
        super().__init__()
        self.dense = dense
        self.embedding = EmbeddingBag(rows, features=list(features))
        dim = rows.width - 1
        self.bias = nn.Parameter(torch.zeros(1))
        self.dense_weight = nn.Linear(num_dense, 1, bias=False) if num_dense else None
        self.dense_vector = mlp([num_dense, *dense_layers, dim]) if num_dense else None
        num = len(features) + (1 if num_dense else 0)
        self.by_numbers = mlp([num * dim, *layers, num])
        self.attention = SelfAttention(dim, head_width * heads, heads=heads)
        self.by_vectors = mlp([num * head_width * heads, num])

    def forward(self, batch: Batch) -> Tensor:
        """(B,) logits."""
        rows = self.embedding(batch)
        weights, vectors = rows[:, :, 0], rows[:, :, 1:]
        if self.dense_weight is not None and self.dense_vector is not None:
            numbers = tensor_of(batch, self.dense)
            weights = torch.cat([weights, self.dense_weight(numbers)], 1)
            vectors = torch.cat([vectors, self.dense_vector(numbers)[:, None]], 1)
        relevance = self.by_numbers(vectors.flatten(1))
        relevance = relevance + self.by_vectors(self.attention(vectors).flatten(1))
        # N times the softmax: an FM, where all inputs are equally relevant.
        factors_BN = torch.softmax(relevance, 1) * relevance.shape[1]
        pairs = sum_of_products(vectors * factors_BN[:, :, None])
        logits: Tensor = self.bias + (weights * factors_BN).sum(1) + pairs
        return logits


def create(config: Config) -> Recipe:
    """Keys: those of trireme.models.hyper_parameters, and

    fen_layers_size: widths of the MLP that makes the factors, with the number of inputs as the last
        one; default 256, 256 and that.
    dense_layers_size: widths of the layers for the dense numbers, with sparse_feature_dim as the
        last one; default 256 and that.
    att_factor_dim, att_head_num: width of a head of the attention, default 8, and heads, default 4.

    Raises BadRequest: another last width.
    """
    hyper = HyperParameters(config)
    inputs = hyper.inputs()
    num = len(inputs["features"]) + (1 if inputs["num_dense"] else 0)
    widths = {}
    for key, default, last in (
        ("fen_layers_size", (256, 256, num), num),
        ("dense_layers_size", (256, hyper.dim), hyper.dim),
    ):
        *widths[key], last_found = hyper.sizes(key, default, least=1)
        if last_found != last:
            raise BadRequest(
                f"hyper_parameters.{key}: expected {last} as the last, found {last_found}"
            )
    model = DIFM(
        hyper.table(dim=1 + hyper.dim),
        layers=widths["fen_layers_size"],
        dense_layers=widths["dense_layers_size"],
        head_width=hyper.whole("att_factor_dim", 8),
        heads=hyper.whole("att_head_num", 4),
        **inputs,
    )
    return click_recipe(model, hyper)
