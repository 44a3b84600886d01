"""DIN: the click on a candidate item, by attention of the candidate over the user's history.

Source: Zhou et al., "Deep Interest Network for Click-Through Rate Prediction", KDD 2018.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trireme.config import Config
from trireme.data.batch import Batch
from trireme.data.schema import Label, Schema, Sparse
from trireme.models.columns import expect_same_sizes, ragged_of
from trireme.models.hyper_parameters import HyperParameters, click_recipe
from trireme.models.layers import TargetAttention, mlp
from trireme.nn import Embedding, EmbeddingBag
from trireme.table import Table
from trireme.train.recipe import Recipe

HISTORY = ("hist_item_seq", "hist_cat_seq")
TARGET = ("target_item", "target_cat")
MORE = ("mask", "target_item_seq", "target_cat_seq")
_ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "sigmoid": nn.Sigmoid}


class DIN(nn.Module):
    """logit = MLP(attended history, candidate, their product).

    Key 0 is padding in both tables: a history may be padded with it, or be empty.

    Args:
        items, categories: tables of item ids and of category ids.
        history: columns of the item and category ids of a history; ragged, as many of each.
        target: columns of the item and category id of the candidate.
        attention: widths of the hidden layers of the attention.
        layers: widths of the hidden layers after it.
        activation: of the attention.
    """

    def __init__(
        self,
        items: Table,
        categories: Table,
        *,
        history: tuple[str, str] = HISTORY,
        target: tuple[str, str] = TARGET,
        attention: Sequence[int] = (80, 40),
        layers: Sequence[int] = (80, 40),
        activation: type[nn.Module] = nn.Sigmoid,
    ) -> None:
        super().__init__()
        self.history = history
        pairs = list(zip((items, categories), history, target, strict=True))
        self.events = nn.ModuleList(
            Embedding(table, features=past, padding_key=0) for table, past, _ in pairs
        )
        self.candidate = nn.ModuleList(
            EmbeddingBag(table, features=now, padding_key=0) for table, _, now in pairs
        )
        dim = items.width + categories.width
        self.attention = TargetAttention(dim, layers=attention, activation=activation)
        self.mlp = mlp([3 * dim, *layers, 1])

    def forward(self, batch: Batch) -> Tensor:
        """(B,) logits.

        Raises:
            BadRequest: a history is not ragged, or has not as many items as categories.
        """
        expect_same_sizes(batch, self.history)
        events = torch.cat([part(batch) for part in self.events], 1)
        candidate = torch.cat([part(batch).squeeze(1) for part in self.candidate], 1)
        interest = self.attention(candidate, events, ragged_of(batch, self.history[0]).offsets)
        logits: Tensor = self.mlp(torch.cat([interest, candidate, interest * candidate], 1))
        return logits.squeeze(1)


def create(config: Config) -> Recipe:
    """Keys: those of trireme.models.hyper_parameters for the optimizer, and

    item_emb_size, cat_emb_size: floats per row of the tables "item" and "category", default 64.
    act: activation of the attention, sigmoid (default) or relu.
    fc_sizes: widths of the hidden layers after the attention, default 80, 40.

    use_DataLoader: the inputs have PaddleRec's three more at their end: the mask, and the candidate
        repeated along the history. The model does not need them: key 0 is what the mask marks.

    Inputs: hist_item_seq, hist_cat_seq, target_item, target_cat, label.
    """
    hyper = HyperParameters(config)
    model = DIN(
        hyper.table("item", dim=hyper.whole("item_emb_size", 64)),
        hyper.table("category", dim=hyper.whole("cat_emb_size", 64)),
        layers=hyper.sizes("fc_sizes", (80, 40)),
        activation=hyper.choice("act", "sigmoid", _ACTIVATIONS),
    )
    more = MORE if hyper.flag("use_DataLoader", False) else ()
    schema = Schema([*map(Sparse, (*HISTORY, *TARGET)), Label("label"), *map(Sparse, more)])
    return click_recipe(model, hyper, label="label", schema=schema)
