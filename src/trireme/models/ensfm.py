"""ENSFM: a factorization machine of users and items that learns from all pairs, without sampling.

Source: Chen et al., "Efficient Non-Sampling Factorization Machines for Optimal Context-Aware
Recommendation", WWW 2020.

Shapes: B users, V items, F fields, N items that were taken, D floats of a vector, P = D + 2.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trireme.config import Config
from trireme.data.batch import Batch
from trireme.data.schema import Label, Schema, Sparse
from trireme.errors import BadRequest
from trireme.initializer import Normal
from trireme.metrics import TopK
from trireme.models.columns import (
    ALL_ITEMS,
    examples_of,
    expect_within,
    ragged_of,
    tensor_of,
    values_of,
    with_items,
)
from trireme.models.hyper_parameters import HyperParameters
from trireme.models.sequences import SequenceRows, kept
from trireme.nn import Embedding
from trireme.table import Table
from trireme.train.recipe import Evaluation, Recipe

USER, ITEMS, TAKEN, NUM_ITEMS, PLACES = "user", "items", "taken", "num_items", "taken_places"


class ENSFM(nn.Module):
    """score(user, item) = bias + own(user) + own(item) + <h, u * v>.

    u and v are the sums of the vectors of the user's and of the item's fields; own is the sum of
    the fields' weights, plus <s, sum over pairs of fields of their product>.

    Columns: "user", the fields of a user; "all_items", those of all items, and "taken_places",
    which items a user took; ItemList adds both.

    Args:
        users, items: tables of dim 1 + D, the weight of a field, then its vector.
        user_fields, item_fields: how many fields a user has at most, and each item.
    """

    def __init__(
        self, users: Table, items: Table, *, user_fields: int = 4, item_fields: int = 2
    ) -> None:
        super().__init__()
        self.user = SequenceRows(users, column=USER, length=user_fields, padding_key=None)
        self.items = Embedding(items, features=ALL_ITEMS)
        self.item_fields = item_fields
        dim = users.width - 1
        self.between, self.within = (nn.Parameter(torch.full((dim,), 0.01)) for _ in range(2))
        self.bias = nn.Parameter(torch.zeros(1))

    def vectors(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(B, P) and (V, P), whose products are the scores."""
        user_BD, user_B1 = self._fields(self.user(batch).rows)
        item_VD, item_V1 = self._fields(self.items(batch).unflatten(0, (-1, self.item_fields)))
        users = [self.between * user_BD, self.bias + user_B1, torch.ones_like(user_B1)]
        return torch.cat(users, 1), torch.cat([item_VD, torch.ones_like(item_V1), item_V1], 1)

    def _fields(self, rows_NFD: Tensor) -> tuple[Tensor, Tensor]:
        """Sums of the vectors, (N, D), and what fields say by themselves, (N, 1)."""
        weights_NF, vectors_NFD = rows_NFD[:, :, 0], rows_NFD[:, :, 1:]
        sum_ND = vectors_NFD.sum(1)
        pairs_ND = (sum_ND.square() - vectors_NFD.square().sum(1)) / 2
        return sum_ND, (weights_NF.sum(1) + pairs_ND @ self.within)[:, None]

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Sums over items, (B,): "all_squares", of the squares of the scores of all; "taken" and
        "taken_squares", of the scores of those taken, and of their squares.
        """
        users_BP, items_VP = self.vectors(batch)
        all_squares = ((users_BP @ (items_VP.T @ items_VP)) * users_BP).sum(1)
        taken_N = values_of(batch, PLACES)
        examples_N = examples_of(ragged_of(batch, PLACES).offsets, taken_N.shape[0])
        scores_N = (users_BP[examples_N] * items_VP[taken_N]).sum(1)
        zeros = torch.zeros_like(all_squares)
        return {
            "all_squares": all_squares,
            "taken": zeros.index_add(0, examples_N, scores_N),
            "taken_squares": zeros.index_add(0, examples_N, scores_N.square()),
        }


class Scores(nn.Module):
    """The (B, V) scores of all items."""

    def __init__(self, model: ENSFM) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> Tensor:
        users_BP, items_VP = self.model.vectors(batch)
        return users_BP @ items_VP.T


@dataclass(frozen=True)
class AllPairsLoss:
    """The squared error of all scores, for an item taken 1, with weight 1; for another one 0, with
    this weight; without what does not depend on the scores (eq. 8 of the paper). Mean over users.
    """

    weight: float

    def __call__(self, outputs: dict[str, Tensor], _: Batch) -> Tensor:
        taken = (1 - self.weight) * outputs["taken_squares"] - 2 * outputs["taken"]
        return (self.weight * outputs["all_squares"] + taken).mean()


@dataclass(frozen=True)
class ItemList:
    """Adds "all_items" to a batch, and "taken_places" if it says what was taken.

    Each example of PaddleRec's reader has the fields of all items, of which those of the first one
    are read, without the last item, which stands for none: a longer list of items taken is filled
    up with its place.
    """

    fields: int
    has_taken: bool = True

    def __call__(self, batch: Batch) -> Batch:
        """Raises BadRequest: the items have another number of fields, or are not as many as said;
        what was taken is none of them.
        """
        items = ragged_of(batch, ITEMS)
        ids = items.values[int(items.offsets[0]) : int(items.offsets[1])]
        num, rest = divmod(len(ids), self.fields)
        num -= 1
        if rest or num < 1:
            raise BadRequest(
                f"ItemList: expected {self.fields} fields of each item, as"
                f" hyper_parameters.item_fields, found {len(ids)} ids in {ITEMS!r}"
            )
        batch = with_items(batch, ALL_ITEMS, ids[: num * self.fields])
        if not self.has_taken:
            return batch
        if (num_said := int(tensor_of(batch, NUM_ITEMS).flatten()[0])) != num:
            raise BadRequest(
                f"ItemList: expected {num_said} items and one more in {ITEMS!r}, as {NUM_ITEMS!r}"
                f" says, found {num + 1}"
            )
        expect_within(batch, TAKEN, num_said + 1, f"{NUM_ITEMS!r} says")
        places = kept(ragged_of(batch, TAKEN), lambda place: place < num)
        return Batch({**batch.columns, PLACES: places}, batch.bags)


def create(config: Config) -> Recipe:
    """Keys: those of trireme.models.hyper_parameters for the optimizer, and

    mf_dim: floats of a vector; rows of the tables "user" and "item" have one more. Default 64.
    negative_weight: weight of the items that were not taken, default 0.5.
    user_fields, item_fields: ids of a user, default 4, and of an item, default 2.
    runner.mode: what the reader yields: train (default) or else.

    Inputs: user, items, taken, num_items: ids of the fields of a user, and of all items and one
    more, places of the items taken among them, and how many items there are. An evaluation has the
    same, and is about the items taken; of another mode, it has user and items, and computes the
    scores of all items.
    """
    hyper = HyperParameters(config)
    fields = hyper.whole("item_fields", 2)
    users, items = (
        hyper.table(name, dim=1 + hyper.whole("mf_dim", 64), initializer=Normal(std=0.01))
        for name in ("user", "item")
    )
    model = ENSFM(users, items, user_fields=hyper.whole("user_fields", 4), item_fields=fields)
    has_taken = config.get("runner.mode", "train") == "train"
    user_and_items = [Sparse(USER), Sparse(ITEMS)]
    schema = Schema([*user_and_items, Sparse(TAKEN), Label(NUM_ITEMS)])
    return hyper.recipe(
        model,
        AllPairsLoss(hyper.number("negative_weight", 0.5, may_be_zero=True)),
        schema=schema,
        prepare=ItemList(fields),
        evaluation=Evaluation(
            model=Scores(model),
            metrics=[TopK(k, label=PLACES) for k in (5, 10, 20)] if has_taken else [],
            schema=schema if has_taken else Schema(user_and_items),
            prepare=ItemList(fields, has_taken),
        ),
    )
