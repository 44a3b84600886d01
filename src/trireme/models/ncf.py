"""NCF: whether a user takes an item, by the products of their vectors, an MLP, or both.

Source: He et al., "Neural Collaborative Filtering", WWW 2017.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trireme.config import Config
from trireme.data.batch import Batch
from trireme.data.schema import Label, Schema, Sparse
from trireme.errors import BadRequest
from trireme.initializer import Normal
from trireme.models.hyper_parameters import HyperParameters, click_recipe
from trireme.models.layers import mlp
from trireme.nn import EmbeddingBag
from trireme.table import Table
from trireme.train.recipe import Recipe

# PaddleRec's names of the models: whether they have products, and whether they have an MLP.
_MODES = {"NCF_NeuMF": (True, True), "NCF_GMF": (True, False), "NCF_MLP": (False, True)}


class NCF(nn.Module):
    """logit = linear(p * q, MLP(s, t)), of the rows (p, s) of the user and (q, t) of the item.

    Args:
        users, items: tables of dim factors + D: a vector for the products, then one for the MLP.
        factors: width of the vectors of the products; 0 for none.
        layers: widths of the MLP's layers; empty for no MLP, with D = 0.
        user, item: columns of their ids, one each.

    Raises BadRequest: tables of different dims, or without floats for a part.
    """

    def __init__(
        self,
        users: Table,
        items: Table,
        *,
        factors: int = 8,
        layers: Sequence[int] = (32, 16, 8),
        user: str = "user_id",
        item: str = "item_id",
    ) -> None:
        super().__init__()
        rest = users.width - factors
        if items.width != users.width or rest < 0 or bool(rest) != bool(layers):
            raise BadRequest(
                f"NCF: expected tables of one dim, {factors}{' + D' if layers else ''}, found"
                f" {users.width} and {items.width}"
            )
        self.factors = factors
        self.user = EmbeddingBag(users, features=user)
        self.item = EmbeddingBag(items, features=item)
        self.mlp = mlp([2 * rest, *layers], activates_last=True) if layers else None
        self.head = mlp([factors + (layers[-1] if layers else 0), 1])

    def forward(self, batch: Batch) -> Tensor:
        """(B,) logits."""
        user, item = self.user(batch).squeeze(1), self.item(batch).squeeze(1)
        parts = [user[:, : self.factors] * item[:, : self.factors]]
        if self.mlp is not None:
            parts.append(self.mlp(torch.cat([user[:, self.factors :], item[:, self.factors :]], 1)))
        logits: Tensor = self.head(torch.cat(parts, 1))
        return logits.squeeze(1)


def create(config: Config) -> Recipe:
    """Keys: those of trireme.models.hyper_parameters for the optimizer, and

    mode: NCF_NeuMF (default), NCF_GMF (products alone) or NCF_MLP.
    mf_dim: width of the vectors of the products, default 8.
    fc_layers: inputs of the MLP, half of them of the user, and widths of its layers; default 64,
        32, 16, 8.

    Inputs: user_id, item_id, label. Tables: "user" and "item", whose rows start as
    Normal(std=0.01).

    Raises BadRequest: another mode, or an odd number of inputs.
    """
    hyper = HyperParameters(config)
    has_products, has_mlp = hyper.choice("mode", "NCF_NeuMF", _MODES)
    factors = hyper.whole("mf_dim", 8) if has_products else 0
    width, *layers = hyper.sizes("fc_layers", (64, 32, 16, 8), least=2)
    if width % 2:
        raise BadRequest(
            f"hyper_parameters.fc_layers: expected an even number of inputs, found {width}"
        )
    dim = factors + (width // 2 if has_mlp else 0)
    model = NCF(
        hyper.table("user", dim=dim, initializer=Normal(std=0.01)),
        hyper.table("item", dim=dim, initializer=Normal(std=0.01)),
        factors=factors,
        layers=layers if has_mlp else (),
    )
    schema = Schema([Sparse("user_id"), Sparse("item_id"), Label("label")])
    return click_recipe(model, hyper, label="label", schema=schema)
