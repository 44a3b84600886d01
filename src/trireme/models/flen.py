"""FLEN: features in a few fields (user, item, context), whose sums are multiplied with each other.

Source: Chen et al., "FLEN: Leveraging Field for Scalable CTR Prediction", 2019; without its
Dicefactor, a dropout of pairs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trireme.config import Config
from trireme.data.batch import Batch
from trireme.data.schema import Label, Schema, Sparse
from trireme.models.hyper_parameters import HyperParameters, click_recipe
from trireme.models.layers import mlp
from trireme.nn import EmbeddingBag
from trireme.table import Table
from trireme.train.recipe import Recipe

FIELD_SIZES = (13, 3, 6)


class FLEN(nn.Module):
    """logit = weights of the ids + linear(relu(linear(h)), MLP(vectors)), with the vector
    h = sum over fields m<n of r_mn e_m * e_n + sum over m of s_m (e_m * e_m - sum of v_i * v_i),

    where e_m is the sum of the vectors v_i of the features of field m, and r and s are learned.

    Args:
        rows: table of dim 1 + D: the weight of an id, then its vector v.
        fields: names of the features of each of the M fields.
        layers: widths of the MLP's layers.
    """

    def __init__(
        self, rows: Table, *, fields: Sequence[Sequence[str]], layers: Sequence[int] = (64, 32)
    ) -> None:
        super().__init__()
        features = [name for field in fields for name in field]
        self.embedding = EmbeddingBag(rows, features=features)
        self.sizes = [len(field) for field in fields]
        num, dim = len(fields), rows.width - 1
        self.between = nn.Parameter(torch.ones(num * (num - 1) // 2))
        self.within = nn.Parameter(torch.ones(num))
        self.interaction = mlp([dim, dim], activates_last=True)
        self.mlp = mlp([len(features) * dim, *layers], activates_last=True)
        self.head = mlp([dim + layers[-1], 1])

    def forward(self, batch: Batch) -> Tensor:
        """(B,) logits."""
        rows = self.embedding(batch)
        vectors = rows[:, :, 1:]
        fields = vectors.split(self.sizes, 1)
        sums_BMD = torch.stack([field.sum(1) for field in fields], 1)
        squares_BMD = torch.stack([field.square().sum(1) for field in fields], 1)
        num = len(fields)
        first, second = torch.triu_indices(num, num, offset=1, device=rows.device)
        between_BPD = sums_BMD[:, first] * sums_BMD[:, second]
        h_BD = (between_BPD * self.between[:, None]).sum(1)
        h_BD = h_BD + ((sums_BMD.square() - squares_BMD) * self.within[:, None]).sum(1)
        deep = self.head(torch.cat([self.interaction(h_BD), self.mlp(vectors.flatten(1))], 1))
        logits: Tensor = rows[:, :, 0].sum(1) + deep.squeeze(1)
        return logits


def create(config: Config) -> Recipe:
    """Keys: those of trireme.models.hyper_parameters for the optimizer, sparse_feature_dim (default
    32), and

    field_sizes: features of each field, default 13 of the user, 3 of the item, 6 of the context,
        as in PaddleRec's flen. sparse_num_field, sparse_inputs_slots: their number, and their sum.
    layer_sizes_dnn: widths of the MLP's layers, default 64, 32.

    Inputs: id, which is not used, the features 1 to 22, click.

    Raises BadRequest: another number of fields, or sum.
    """
    hyper = HyperParameters(config, sparse_feature_dim=32)
    sizes = hyper.sizes("field_sizes", FIELD_SIZES, least=1)
    for key, expected in (("sparse_num_field", len(sizes)), ("sparse_inputs_slots", sum(sizes))):
        hyper.fixed(key, expected, f"for field_sizes {', '.join(map(str, sizes))}")
    names = iter([str(i) for i in range(1, sum(sizes) + 1)])
    fields = [[next(names) for _ in range(size)] for size in sizes]
    model = FLEN(
        hyper.table(dim=1 + hyper.dim),
        fields=fields,
        layers=hyper.sizes("layer_sizes_dnn", (64, 32), least=1),
    )
    features = [name for field in fields for name in field]
    return click_recipe(
        model, hyper, schema=Schema([Sparse("id"), *map(Sparse, features), Label("click")])
    )
