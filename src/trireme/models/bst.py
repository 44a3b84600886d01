"""BST: a transformer over the history and the candidate item.

Source: Chen et al., "Behavior Sequence Transformer for E-commerce Recommendation in Alibaba",
DLP-KDD 2019.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trireme.config import Config
from trireme.data.batch import Batch
from trireme.data.schema import Label, Schema, Sparse
from trireme.models.hyper_parameters import HyperParameters, click_recipe
from trireme.models.layers import TransformerLayer, mlp
from trireme.models.sequences import EventRows
from trireme.nn import EmbeddingBag
from trireme.table import Table
from trireme.train.recipe import Recipe

USER = "userid"
HISTORY = ("history", "cate", "position")
TARGET = ("target", "target_cate", "target_position")


class BST(nn.Module):
    """logit = MLP(row of the user, what the transformer makes of the candidate).

    The transformer sees, for each event and for the candidate, the rows of item, category and
    position side by side. An event whose item is 0 is padding and not looked at.

    Args:
        users: table of the users.
        parts: tables of items, categories and positions; the dims add up to W.
        length: events of a history; the ones behind are left out.
        num_layers, heads, inner: layers of the transformer, heads of each, a divisor of W, and
            width of its hidden layer.
        layers: widths of the MLP's hidden layers.
        dropout: within the transformer, in training.
    """

    def __init__(
        self,
        users: Table,
        parts: tuple[Table, Table, Table],
        *,
        length: int = 50,
        num_layers: int = 1,
        heads: int = 6,
        inner: int = 512,
        layers: Sequence[int] = (1024, 512, 256),
        dropout: float = 0.2,
    ) -> None:
        super().__init__()
        self.user = EmbeddingBag(users, features=USER)
        # The items say what is padding: 0 may well be a category or a position.
        paddings = (0, None, None)
        self.events = EventRows(parts, HISTORY, length=length, padding_keys=paddings)
        self.candidate = nn.ModuleList(
            EmbeddingBag(table, features=name, padding_key=padding)
            for table, name, padding in zip(parts, TARGET, paddings, strict=True)
        )
        width = self.events.width
        self.transformer = nn.ModuleList(
            TransformerLayer(width, heads=heads, inner=inner, dropout=dropout)
            for _ in range(num_layers)
        )
        self.mlp = mlp([users.width + width, *layers, 1], activation=nn.LeakyReLU)

    def forward(self, batch: Batch) -> Tensor:
        """(B,) logits."""
        events = self.events(batch)
        candidate_B1W = torch.cat([part(batch) for part in self.candidate], 2)
        x = torch.cat([events.rows, candidate_B1W], 1)
        is_there = nn.functional.pad(events.is_there, (0, 1), value=True)
        for layer in self.transformer:
            x = layer(x, is_there)
        logits: Tensor = self.mlp(torch.cat([self.user(batch).squeeze(1), x[:, -1]], 1))
        return logits.squeeze(1)


def create(config: Config) -> Recipe:
    """Keys: those of trireme.models.hyper_parameters for the optimizer, and

    item_emb_size, cat_emb_size, position_emb_size: floats per row of the tables "item", "category"
        and "position", default 96.
    d_model: their sum, and floats per row of the table "user".
    max_len: events of a history, default 50.
    n_encoder_layers, n_head, d_inner_hid: layers of the transformer, default 1; heads, default 6;
        width of its hidden layer, default 512. d_key, d_value: the width of a head.
    fc_sizes: widths of the hidden layers behind it, default 1024, 512, 256.
    dropout_rate: within the transformer, default 0.2; prepostprocess_dropout is the same.

    Inputs: label, userid, history, cate, position, target, target_cate, target_position.

    Raises BadRequest: widths that do not fit, or two dropouts.
    """
    hyper = HyperParameters(config)
    keys = {"item": "item_emb_size", "category": "cat_emb_size", "position": "position_emb_size"}
    parts = [hyper.table(name, dim=hyper.whole(key, 96)) for name, key in keys.items()]
    width, heads = sum(table.width for table in parts), hyper.whole("n_head", 6)
    hyper.fixed("d_model", width, "the sum of " + ", ".join(keys.values()))
    for key in ("d_key", "d_value"):
        hyper.fixed(key, width // heads, f"the {width} of an event by n_head {heads}")
    item, category, position = parts
    dropout = hyper.share("dropout_rate", 0.2)
    hyper.fixed("prepostprocess_dropout", dropout, "as dropout_rate")
    model = BST(
        hyper.table("user", dim=width),
        (item, category, position),
        length=hyper.whole("max_len", 50),
        num_layers=hyper.whole("n_encoder_layers", 1),
        heads=heads,
        inner=hyper.whole("d_inner_hid", 512),
        layers=hyper.sizes("fc_sizes", (1024, 512, 256)),
        dropout=dropout,
    )
    schema = Schema([Label("label"), *map(Sparse, (USER, *HISTORY, *TARGET))])
    return click_recipe(model, hyper, label="label", schema=schema)
