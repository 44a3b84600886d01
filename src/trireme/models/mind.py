"""MIND: several vectors of interests of a user, made of the history by dynamic routing; an item is
recalled by the nearest of them.

Source: Li et al., "Multi-Interest Network with Dynamic Routing for Recommendation at Tmall", CIKM
2019.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from trireme.config import Config
from trireme.data.batch import Batch
from trireme.data.schema import Label, Schema, Sparse
from trireme.initializer import Uniform
from trireme.metrics import TopK
from trireme.models.columns import (
    ALL_ITEMS,
    AllIds,
    Draws,
    expect_within,
    ids_of,
    ragged_of,
    values_of,
    with_items,
)
from trireme.models.hyper_parameters import HyperParameters
from trireme.models.layers import mlp
from trireme.models.sequences import SequenceRows, kept
from trireme.nn import Embedding, EmbeddingBag
from trireme.table import Table
from trireme.train.recipe import Evaluation, Recipe

HISTORY, TARGET, SAMPLED = "hist_item", "target_item", "sampled_items"
_ANSWERS = "eval_item"
_SEED = 2019


class Interests(nn.Module):
    """The (B, K, D) interests of users: capsules to which the events of a history are routed, and
    a layer with ReLU behind them.

    Routing begins with weights that are drawn once, the same in every process.

    Args:
        items: table of the items, whose key 0 is padding.
        size: D of the interests. num_interests: K. num_rounds: of the routing, at least 1.
        length: events of a history; the ones behind are left out.
        spread: standard deviation of the first weights.
    """

    first_weights: Tensor

    def __init__(
        self,
        items: Table,
        *,
        size: int,
        num_interests: int = 4,
        num_rounds: int = 3,
        length: int = 20,
        spread: float = 1.0,
    ) -> None:
        super().__init__()
        self.events = SequenceRows(items, column=HISTORY, length=length)
        self.map = nn.Parameter(torch.randn(items.width, size) / math.sqrt(items.width))
        self.layer = mlp([size, size])
        self.num_rounds = num_rounds
        draw = torch.Generator().manual_seed(_SEED)
        first_KL = spread * torch.randn(num_interests, length, generator=draw)
        self.register_buffer("first_weights", first_KL, persistent=False)

    def forward(self, batch: Batch) -> Tensor:
        rows, is_there = self.events(batch)
        behaviour_BLD = rows @ self.map
        fixed_BLD = behaviour_BLD.detach()  # gradients go through the last round alone
        agreement_BKL = self.first_weights.expand(rows.shape[0], -1, -1)
        for _ in range(self.num_rounds - 1):
            capsules_BKD = squash(_shares(agreement_BKL, is_there) @ fixed_BLD)
            agreement_BKL = agreement_BKL + capsules_BKD @ fixed_BLD.transpose(1, 2)
        interests = squash(_shares(agreement_BKL, is_there) @ behaviour_BLD)
        return torch.relu(self.layer(interests))


def _shares(agreement_BKL: Tensor, is_there_BL: Tensor) -> Tensor:
    """How much of each event goes to which capsule: a softmax over the capsules."""
    return torch.softmax(agreement_BKL, 1) * is_there_BL[:, None]


def squash(capsules: Tensor) -> Tensor:
    """The vectors along the last axis, with lengths n^2 / (1 + n^2) in place of n."""
    norm = capsules.square().sum(-1, keepdim=True)
    return capsules * norm / (1 + norm) / (norm + 1e-8).sqrt()


class MIND(nn.Module):
    """Products of a user with the item that followed, and with sampled items.

    The vector of the user is the sum of the interests, each with a share of the softmax of
    <interest, item> to the power `power`, of the item that followed.

    Columns: "hist_item"; "target_item", one each; "sampled_items", the same for all examples, which
    SampledItems adds.

    The paper gives a user the more interests the longer the history is; here all have as many.
    """

    def __init__(self, items: Table, interests: Interests, *, power: float = 1.0) -> None:
        super().__init__()
        self.interests, self.power = interests, power
        self.target = EmbeddingBag(items, features=TARGET, padding_key=0)
        self.sampled = Embedding(items, features=SAMPLED, padding_key=0)

    def forward(self, batch: Batch) -> Tensor:
        """(B, 1 + S) products: with the item that followed, then with S sampled ones."""
        interests_BKD, target_B1D = self.interests(batch), self.target(batch)
        products_BK = (interests_BKD * target_B1D).sum(2)
        # A negative product keeps its sign, whatever the power.
        sharpened = products_BK.sign() * products_BK.abs().pow(self.power)
        user_BD = (torch.softmax(sharpened, 1)[:, :, None] * interests_BKD).sum(1)
        right_B1 = (user_BD * target_B1D.squeeze(1)).sum(1, keepdim=True)
        return torch.cat([right_B1, user_BD @ self.sampled(batch).T], 1)


def log_uniform(items: Tensor, num_items: int) -> Tensor:
    """The probability that a draw is each of these items: log((i + 1) / i) / log(num_items)."""
    return torch.log1p(1 / items.double()).float() / math.log(num_items)


@dataclass(frozen=True)
class SampledItems:
    """Adds "sampled_items" to a batch: draws of the items 1 to num_items - 1, for all its examples.

    A small id is drawn more often (log_uniform), as ids by falling frequency are in use. The
    paper does not say how it draws.
    """

    num_items: int
    num_draws: int
    draws: Draws = field(default_factory=Draws)

    def __call__(self, batch: Batch) -> Batch:
        # float64: of many items float32 would leave out most.
        draws = torch.from_numpy(self.draws.of(batch).random(self.num_draws))
        items = torch.exp(draws * math.log(self.num_items)).long()
        return with_items(batch, SAMPLED, items.clamp(1, self.num_items - 1))


@dataclass(frozen=True)
class SampledSoftmax:
    """The loss of choosing the item that followed among it and the sampled ones.

    Each product is corrected by the logarithm of how often its item is expected among the draws. A
    draw of the item that followed is no wrong choice.
    """

    num_items: int

    def __call__(self, products: Tensor, batch: Batch) -> Tensor:
        """Raises BadRequest: examples without an item that followed, with several, or with one
        that is never drawn.
        """
        expect_within(batch, TARGET, self.num_items, "hyper_parameters.item_count says", least=1)
        target, sampled = ids_of(batch, TARGET, 1).squeeze(1), values_of(batch, SAMPLED)
        chances = [log_uniform(ids, self.num_items) * len(sampled) for ids in (target, sampled)]
        right = products[:, :1] - chances[0].log()[:, None]
        wrong = products[:, 1:] - chances[1].log()
        wrong = wrong.masked_fill(target[:, None] == sampled, -torch.inf)
        return -torch.log_softmax(torch.cat([right, wrong], 1), 1)[:, 0].mean()


class Recall(nn.Module):
    """The scores of all items for each user: the largest product with an interest: (B, V).

    Columns: "hist_item"; "all_items", which AllItems adds. Item 0, the padding, is never an answer.
    """

    def __init__(self, items: Table, interests: Interests) -> None:
        super().__init__()
        self.interests = interests
        self.items = Embedding(items, features=ALL_ITEMS, padding_key=0)

    def forward(self, batch: Batch) -> Tensor:
        items_VD: Tensor = self.items(batch)
        interests_BKD: Tensor = self.interests(batch)
        scores = interests_BKD[:, 0] @ items_VD.T
        for interest_BD in interests_BKD.unbind(1)[1:]:  # all at once would be K times the memory
            scores = torch.maximum(scores, interest_BD @ items_VD.T)
        scores[:, 0] = torch.finfo(scores.dtype).min
        return scores


@dataclass(frozen=True)
class AllItems:
    """Adds "all_items" to a batch, the items 0 to num_items - 1, and removes the padding, item 0,
    from its answers.
    """

    num_items: int

    def __call__(self, batch: Batch) -> Batch:
        """Raises BadRequest: an answer that is no item."""
        expect_within(batch, _ANSWERS, self.num_items, "hyper_parameters.item_count says")
        answers = kept(ragged_of(batch, _ANSWERS), lambda item: item != 0)
        add = AllIds({ALL_ITEMS: self.num_items})
        return add(Batch({**batch.columns, "answers": answers}, batch.bags))


def _evaluation(items: Table, interests: Interests, num_items: int) -> Evaluation:
    return Evaluation(
        model=Recall(items, interests),
        metrics=[TopK(k, label="answers") for k in (20, 50)],
        schema=Schema([Sparse(HISTORY), Label("seq_len"), Sparse(_ANSWERS)]),
        prepare=AllItems(num_items),
    )


def create(config: Config) -> Recipe:
    """Keys: those of trireme.models.hyper_parameters for the optimizer, and

    item_count: one more than the largest item id, default 100000. Item 0 is padding.
    embedding_dim: floats per row of the table "item", and of an interest; default 64. hidden_size,
        if there is one, is the same.
    neg_samples: items that are sampled for a batch, default 100. maxlen: of histories, default 30.
    pow_p: power of the attention, default 1.
    capsual.max_k, capsual.iters, capsual.init_std: number of interests, default 4; rounds of the
        routing, default 3; spread of its first weights, default 1.

    Inputs: hist_item, target_item, seq_len (not needed: key 0 is padding). Of an evaluation:
    hist_item, seq_len, eval_item, and it is among all items.

    Raises BadRequest: embedding_dim and hidden_size differ.
    """
    hyper = HyperParameters(config)
    num_items, dim = hyper.whole("item_count", 100_000, least=2), hyper.whole("embedding_dim", 64)
    hyper.fixed("hidden_size", dim, "as embedding_dim: interests are multiplied with rows of items")
    bound = math.sqrt(6 / (num_items + dim))
    items = hyper.table("item", dim=dim, initializer=Uniform(-bound, bound))
    interests = Interests(
        items,
        size=dim,
        num_interests=hyper.whole("capsual.max_k", 4),
        num_rounds=hyper.whole("capsual.iters", 3),
        length=hyper.whole("maxlen", 30),
        spread=hyper.number("capsual.init_std", 1.0),
    )
    model = MIND(items, interests, power=hyper.number("pow_p", 1.0))
    return hyper.recipe(
        model,
        SampledSoftmax(num_items),
        schema=Schema([Sparse(HISTORY), Sparse(TARGET), Label("seq_len")]),
        prepare=SampledItems(num_items, hyper.whole("neg_samples", 100)),
        evaluation=_evaluation(items, interests, num_items),
    )
