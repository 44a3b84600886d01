"""MHCN: what a user takes, from what the people take whom the user hears in a social network.

Source: Yu et al., "Self-Supervised Multi-Channel Hypergraph Convolutional Network for Social
Recommendation", WWW 2021.

Shapes: U users, of which A are asked for, V items, E pairs of a user and an item taken, C channels,
B examples, D floats per row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trireme.config import Config
from trireme.data.batch import Batch
from trireme.data.schema import Label, Schema
from trireme.initializer import Normal
from trireme.metrics import TopK
from trireme.models.columns import ALL_ITEMS, AllIds, tensor_of
from trireme.models.hyper_parameters import HyperParameters, file_of
from trireme.models.social_graph import SocialGraph, sparse
from trireme.nn import Embedding
from trireme.table import Table
from trireme.train.recipe import Evaluation, Recipe

USER, ITEM, OTHER, ALL_USERS = "user", "item", "other_item", "all_users"
_CHANNELS = 3
_DECAY = 0.001  # PaddleRec's, of all weights


class Hearing(nn.Module):
    """Rows of users, summed for those that hear of them: motif @ x, (U, D) -> (U, D).

    motif: a sparse (U, U) matrix.
    """

    pairs: Tensor
    shares: Tensor

    def __init__(self, motif: Tensor) -> None:
        super().__init__()
        self.size = len(motif)
        # (2, any) and (any,). Every process makes the graph of the data.
        self.register_buffer("pairs", motif.indices(), persistent=False)
        self.register_buffer("shares", motif.values(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        motif = sparse(self.pairs, self.shares, (self.size, self.size))
        with torch.autocast(x.device.type, enabled=False):  # sparse products are of float32
            sums: Tensor = torch.sparse.mm(motif, x.to(motif.dtype))
        return sums


class MHCN(nn.Module):
    """<user, item> of an item that the user took and of another one, with rows of all users and
    items, spread over the graph.

    Columns: "user", "item", "other_item", numbers in the graph; "all_users" and "all_items", which
    AllIds adds.

    Args:
        users, items: tables of dim D.
        num_layers: how often rows are spread.
    """

    taken: Tensor
    weights: Tensor

    def __init__(
        self, users: Table, items: Table, graph: SocialGraph, *, num_layers: int = 2
    ) -> None:
        super().__init__()
        self.users = Embedding(users, features=ALL_USERS)
        self.items = Embedding(items, features=ALL_ITEMS)
        self.num_layers, dim = num_layers, users.width
        self.gates = nn.ModuleList(nn.Linear(dim, dim) for _ in range(_CHANNELS + 1))
        self.own_gates = nn.ModuleList(nn.Linear(dim, dim) for _ in range(_CHANNELS))
        self.relevance = nn.Sequential(
            nn.Linear(dim, dim, bias=False), nn.Linear(dim, 1, bias=False)
        )
        self.motifs = nn.ModuleList(map(Hearing, graph.motifs()))
        # (2, E) and (E,), of the data, as the motifs.
        self.register_buffer("taken", graph.taken, persistent=False)
        self.register_buffer("weights", graph.taken_weights(), persistent=False)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """(B,) "right" and "wrong", the products; in training "contrast", too, the loss of the
        channels, the same for all examples.
        """
        users_UD, items_VD = self.spread(batch)
        rows = users_UD[_numbers(batch, USER)]
        right, wrong = ((rows * items_VD[_numbers(batch, name)]).sum(1) for name in (ITEM, OTHER))
        if not self.training:
            return {"right": right, "wrong": wrong}
        channels = zip(self.own_gates, self.motifs, strict=True)
        losses = [_contrast(_gated(gate, users_UD), motif) for gate, motif in channels]
        contrast = torch.stack(losses).sum().expand(len(right))
        return {"right": right, "wrong": wrong, "contrast": contrast}

    def spread(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Users (U, D) and items (V, D), each the sum of what all layers make of their rows."""
        users_UD, items_VD = self.users(batch), self.items(batch)
        *channels, simple = [_gated(gate, users_UD) for gate in self.gates]
        sums, simple_sum, item_sum = list(channels), simple, items_VD
        for _ in range(self.num_layers):
            mixed_UD = self._mixed(channels) + simple / 2
            channels = [motif(x) for motif, x in zip(self.motifs, channels, strict=True)]
            sums = [total + _unit(x) for total, x in zip(sums, channels, strict=True)]
            simple = self._carried(items_VD, len(users_UD), to=0)
            items_VD = self._carried(mixed_UD, len(items_VD), to=1)
            simple_sum, item_sum = simple_sum + _unit(simple), item_sum + _unit(items_VD)
        return self._mixed(sums) + simple_sum / 2, item_sum

    def _mixed(self, channels: list[Tensor]) -> Tensor:
        """The channels, (U, D) each, with the shares that users give them."""
        x_UCD = torch.stack(channels, 1)
        return (torch.softmax(self.relevance(x_UCD), 1) * x_UCD).sum(1)

    def _carried(self, rows: Tensor, num: int, *, to: int) -> Tensor:
        """Rows of items summed for users (to 0), or of users for items (to 1)."""
        parts_ED = self.weights[:, None] * rows[self.taken[1 - to]]
        sums = torch.zeros(num, rows.shape[1], dtype=parts_ED.dtype, device=rows.device)
        return sums.index_add(0, self.taken[to], parts_ED)


def _numbers(batch: Batch, name: str) -> Tensor:
    return tensor_of(batch, name).long()


def _gated(gate: nn.Module, x: Tensor) -> Tensor:
    return x * torch.sigmoid(gate(x))


def _unit(x: Tensor) -> Tensor:
    return nn.functional.normalize(x, dim=1)


def _contrast(users_UD: Tensor, motif: nn.Module) -> Tensor:
    """The mean over the users of how little a user resembles those it hears of, more than others
    do, and these the whole, more than what is shuffled does (eq. 12 and 13 of the paper).
    """
    near_UD = motif(users_UD)

    def shuffled(x: Tensor) -> Tensor:
        return x[torch.randperm(len(x), device=x.device)]

    def mixed_up(x: Tensor) -> Tensor:
        return shuffled(shuffled(x.T).T)

    log = nn.functional.logsigmoid
    own, other = (users_UD * near_UD).sum(1), (shuffled(users_UD) * near_UD).sum(1)
    none = (mixed_up(near_UD) * users_UD).sum(1)
    whole_D = near_UD.mean(0)
    of_whole = log(near_UD @ whole_D - mixed_up(near_UD) @ whole_D)
    return -(log(own - other) + log(other - none) + of_whole).mean()


class Recommendation(nn.Module):
    """The (B, V) products of "user" with all items; those it took are no answer without
    `also_taken`.
    """

    def __init__(self, model: MHCN, *, also_taken: bool) -> None:
        super().__init__()
        self.model, self.also_taken = model, also_taken

    def forward(self, batch: Batch) -> Tensor:
        users_UD, items_VD = self.model.spread(batch)
        numbers_B = _numbers(batch, USER)
        scores_BV = users_UD[numbers_B] @ items_VD.T
        if self.also_taken:
            return scores_BV
        # Of the users of the batch alone: all users times all items may be more than fits.
        asked_A, own_B = torch.unique(numbers_B, return_inverse=True)
        place_U = torch.full((len(users_UD),), -1, device=scores_BV.device)
        place_U[asked_A] = torch.arange(len(asked_A), device=scores_BV.device)
        users_E, items_E = place_U[self.model.taken[0]], self.model.taken[1]
        is_asked_E = users_E >= 0
        shape = (len(asked_A), scores_BV.shape[1])
        is_taken_AV = torch.zeros(shape, dtype=torch.bool, device=scores_BV.device)
        is_taken_AV[users_E[is_asked_E], items_E[is_asked_E]] = True
        lowest = torch.finfo(scores_BV.dtype).min
        return scores_BV.masked_fill(is_taken_AV[own_B], lowest)


@dataclass(frozen=True)
class PairAndContrastLoss:
    """The log loss of telling the item taken from the other one, plus `share` times the contrast.

    Both are means, over examples and over users; PaddleRec adds up both.
    """

    share: float

    def __call__(self, outputs: dict[str, Tensor], _: Batch) -> Tensor:
        loss = -nn.functional.logsigmoid(outputs["right"] - outputs["wrong"]).mean()
        contrast = outputs.get("contrast")
        return loss if contrast is None else loss + self.share * contrast.mean()


def create(config: Config) -> Recipe:
    """Keys: those of trireme.models.hyper_parameters for the optimizer, and

    num_factors: floats per row of the tables "user" and "item", default 50.
    n_layer: layers, default 2.
    runner.rating_file, runner.relation_file: what users took, and whom they trust.
    runner.is_train: whether the reader yields what users took (default), or what it held back: then
        the items taken are no answers of an evaluation.
    runner.top_k: places of the metric of an evaluation, default 10.

    Inputs: user, item, other_item: numbers in the graph.

    A step computes with the rows of all users and items. Memory grows with the pairs of users that
    have an item in common.

    Raises BadRequest: no files.
    """
    hyper, runner = HyperParameters(config), HyperParameters(config, "runner")
    files = [file_of(config, f"runner.{key}") for key in ("rating_file", "relation_file")]
    graph = SocialGraph.read(*files)
    users, items = (
        hyper.table(
            name,
            dim=hyper.whole("num_factors", 50),
            initializer=Normal(std=0.005),
            weight_decay=_DECAY,
        )
        for name in ("user", "item")
    )
    model = MHCN(users, items, graph, num_layers=hyper.whole("n_layer", 2))
    return hyper.recipe(
        model,
        PairAndContrastLoss(0.01),
        optimizer=hyper.optimizer(model, weight_decay=_DECAY),
        schema=Schema(map(Label, (USER, ITEM, OTHER))),
        prepare=(prepare := AllIds({ALL_USERS: len(graph.users), ALL_ITEMS: len(graph.items)})),
        evaluation=Evaluation(
            model=Recommendation(model, also_taken=runner.flag("is_train", True)),
            metrics=[TopK(runner.whole("top_k", 10), label=ITEM)],
            prepare=prepare,
        ),
    )
