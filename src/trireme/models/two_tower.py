"""Two-tower recall: vectors of users and items, with a high product where they fit. Item vectors
are written once, as an index, in which the nearest ones to a user are searched.

Source: Yi et al., "Sampling-Bias-Corrected Neural Modeling for Large Corpus Item Recommendations",
RecSys 2019.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trireme.config import Config
from trireme.data.batch import Batch, Column, Ragged
from trireme.data.schema import Dense, Schema, Sparse
from trireme.errors import BadRequest
from trireme.models.columns import tensor_of
from trireme.models.hyper_parameters import HyperParameters
from trireme.models.inputs import Concatenated
from trireme.models.layers import mlp
from trireme.table import Table
from trireme.train.loop.scoring import column_of
from trireme.train.recipe import Recipe

USER = ("user_id",)
ITEM = ("item_id", "item_cat")


class Tower(nn.Module):
    """The vector of a user or of an item: MLP(rows), of length 1. Exported as a model by itself.

    layers: widths of the layers; the last one is that of the vector.
    """

    def __init__(self, rows: Table, *, features: Sequence[str], layers: Sequence[int]) -> None:
        super().__init__()
        self.inputs = Concatenated(rows, features=features, num_dense=0)
        self.mlp = mlp([self.inputs.width, *layers])

    def forward(self, batch: Batch) -> Tensor:
        """(B, D) vectors of length 1."""
        return nn.functional.normalize(self.mlp(self.inputs(batch)), dim=1)


class TwoTower(nn.Module):
    """Scores of every user of the batch for every item of the batch.

    Args:
        users, items: tables of the features.
        user_features, item_features: sparse features.
        layers: widths of the layers of each tower; the last one is that of the vectors.
        temperature: divides the products of vectors.
    """

    def __init__(
        self,
        users: Table,
        items: Table,
        *,
        user_features: Sequence[str] = USER,
        item_features: Sequence[str] = ITEM,
        layers: Sequence[int] = (64, 32),
        temperature: float = 0.1,
    ) -> None:
        super().__init__()
        self.user = Tower(users, features=user_features, layers=layers)
        self.item = Tower(items, features=item_features, layers=layers)
        self.temperature = temperature

    def forward(self, batch: Batch) -> Tensor:
        """(B, B) logits: of the user of example i and the item of example j."""
        logits: Tensor = self.user(batch) @ self.item(batch).T / self.temperature
        return logits


@dataclass(frozen=True)
class InBatchSoftmax:
    """The loss of choosing the item of the example among the items of the batch.

    Popular items are in a batch more often than rare ones: each logit is corrected by the logarithm
    of its item's frequency (logQ). The same item in another example is not a wrong choice.

    item: column of the item id, one per example.
    share: dense column of width 1: the fraction of all examples that have this item.
    """

    item: str = ITEM[0]
    share: str = "item_share"

    def __call__(self, logits: Tensor, batch: Batch) -> Tensor:
        """The mean cross entropy of (B, B) logits.

        Raises:
            BadRequest: examples without an item, or with several.
        """
        share_B1 = tensor_of(batch, self.share)
        ids = self._ids(batch)
        same = (ids[:, None] == ids).fill_diagonal_(False)
        logits = (logits - share_B1.clamp(min=1e-9).log().T).masked_fill(same, -torch.inf)
        return nn.functional.cross_entropy(logits, torch.arange(len(logits), device=logits.device))

    def _ids(self, batch: Batch) -> Tensor:
        column = column_of(batch, self.item, "InBatchSoftmax")
        ids: Column | None = column
        if isinstance(column, Ragged):
            is_one_each = bool((column.offsets.diff() == 1).all())
            ids = column.values[column.offsets[:-1]] if is_one_each else None
        if not isinstance(ids, Tensor) or ids.shape != (batch.num_examples,):
            raise BadRequest(
                f"InBatchSoftmax: expected one id in {self.item!r} of each of "
                f"{batch.num_examples} examples, found {column}"
            )
        return ids


def create(config: Config) -> Recipe:
    """Keys: those of trireme.models.hyper_parameters for the optimizer, sparse_feature_dim (default
    16), and

    fc_sizes: widths of the layers of each tower, default 64, 32.
    temperature: of the scores, default 0.1.
    user_features, item_features: names of the inputs, default user_id; and item_id, item_cat. The
        first item feature is the item id.

    Inputs: those of users, of items, and item_share.
    """
    hyper = HyperParameters(config, sparse_feature_dim=16)
    user = hyper.names("user_features", USER)
    item = hyper.names("item_features", ITEM)
    model = TwoTower(
        hyper.table("user"),
        hyper.table("item"),
        user_features=user,
        item_features=item,
        layers=hyper.sizes("fc_sizes", (64, 32), least=1),
        temperature=hyper.number("temperature", 0.1),
    )
    return hyper.recipe(
        model,
        InBatchSoftmax(item[0]),
        schema=Schema([*map(Sparse, (*user, *item)), Dense("item_share", 1)]),
    )
