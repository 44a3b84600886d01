"""IPRec: the click on a package, an article with its publisher and the friends who read it, by what
a user's friends, articles and publishers say of the user, and packages like it of the package.

Source: Li et al., "Package Recommendation with Intra- and Inter-Package Attention Networks", SIGIR
2021.

PaddleRec's network masks, in most of its attentions, what is there in place of what is not, and has
an L2 penalty of 1e-5.

Shapes: B examples, P packages of each (the candidate, the user's, neighbours by publisher and by
friends), F friends of a package, N of any such sequence, D floats per row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from trireme.config import Config
from trireme.data.batch import Batch
from trireme.data.schema import Label, Schema, Sparse
from trireme.models.columns import ids_of, tensor_of
from trireme.models.hyper_parameters import HyperParameters, click_recipe
from trireme.models.layers import BatchNorm, mlp
from trireme.models.sequences import SequenceRows, Sequences, shares_of
from trireme.nn import Embedding, EmbeddingBag
from trireme.table import Table
from trireme.train.loop.scoring import column_of
from trireme.train.recipe import Recipe

CANDIDATE = ("user", "item", "biz", "friends")
USERS = ("user_items", "user_bizs", "user_friends")
PACKAGES = ("user_packages", "pack_neighbors_b", "pack_neighbors_f")
# Of all packages: their articles and publishers (B, P), their friends (B, P * F).
PARTS = ("pack_items", "pack_bizs", "pack_friends")


@dataclass(frozen=True)
class Sizes:
    """friends: F. items, users: of the user's articles (and publishers), and friends. packages: of
    the user, and neighbours by publisher and by friends.
    """

    friends: int = 20
    items: int = 99
    users: int = 220
    packages: tuple[int, int, int] = (50, 20, 20)


class UserAttention(nn.Module):
    """A sum of N vectors with shares by a user: softmax(u tanh(w relu(norm(W (user, vector)))))."""

    def __init__(self, dim: int, dropout: float, *, normalized: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(2 * dim, dim, bias=False)
        self.norm = BatchNorm(dim) if normalized else None
        self.dropout = nn.Dropout(dropout)
        self.score = mlp([dim, 1])
        self.factor = nn.Parameter(torch.ones(1))

    def forward(self, users_BD: Tensor, vectors_BND: Tensor, is_there_BN: Tensor) -> Tensor:
        pairs = torch.cat([users_BD[:, None].expand_as(vectors_BND), vectors_BND], 2)
        x = self.layer(pairs)
        if self.norm is not None:
            x = self.norm(x.flatten(0, 1)).view_as(x)
        scores_BN = torch.tanh(self.score(self.dropout(torch.relu(x)))).squeeze(2) * self.factor
        return torch.einsum("bn,bnd->bd", shares_of(scores_BN, is_there_BN), vectors_BND)


class FriendInfluence(nn.Module):
    """The sum of the friends of a package, each as relevant as the article says: K views of it.

    (N, D) articles, (N, F, D) friends -> (N, K, D).
    """

    def __init__(self, dim: int, views: int) -> None:
        super().__init__()
        self.views = views
        self.friend, self.item = (nn.Linear(dim, views * dim, bias=False) for _ in range(2))
        self.by_item, self.by_friend = (
            nn.Parameter(torch.randn(views, dim) / dim**0.5) for _ in range(2)
        )
        self.bias, self.factor = nn.Parameter(torch.zeros(views)), nn.Parameter(torch.ones(views))

    def forward(self, items_ND: Tensor, friends: Sequences) -> Tensor:
        friends_NFKD = self.friend(friends.rows).unflatten(2, (self.views, -1))
        items_NKD = self.item(items_ND).unflatten(1, (self.views, -1))
        by_item_NK = torch.einsum("nkd,kd->nk", items_NKD, self.by_item)
        by_friend_NFK = torch.einsum("nfkd,kd->nfk", friends_NFKD, self.by_friend)
        scores = torch.tanh(by_item_NK[:, None] + by_friend_NFK + self.bias) * self.factor
        shares_NFK = shares_of(scores, friends.is_there[:, :, None])
        return torch.einsum("nfk,nfkd->nkd", shares_NFK, friends_NFKD)


class PackageVectors(nn.Module):
    """The (B, P, D) vectors of packages as a user sees them: of friends, article, publisher, and
    the products of these, a sum with shares by the user.
    """

    def __init__(self, dim: int, views: int, dropout: float) -> None:
        super().__init__()
        self.influence = FriendInfluence(dim, views)
        self.views = UserAttention(dim, dropout, normalized=False)
        self.parts = UserAttention(dim, dropout)

    def forward(self, users_BD: Tensor, items: Tensor, bizs: Tensor, friends: Sequences) -> Tensor:
        """Articles and publishers: (B, P, D). Friends: (B, P * F, D)."""
        num = items.shape[1]
        users = users_BD[:, None].expand_as(items).flatten(0, 1)
        a, b = items.flatten(0, 1), bizs.flatten(0, 1)
        own = Sequences(*(torch.unflatten(part, 1, (num, -1)).flatten(0, 1) for part in friends))
        views = self.influence(a, own)
        f = self.views(users, views, views.new_ones(views.shape[:2], dtype=torch.bool))
        parts = torch.stack([f, a, b, f * a, f * b, a * b, f * a * b], 1)
        return torch.unflatten(self.parts(users, parts, (parts != 0).any(2)), 0, (-1, num))


class PackageGate(nn.Module):
    """The sum of the packages that are there, each times a gate of it and the vector: (B, D)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.vector, self.package = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim)

    def forward(self, vector_BD: Tensor, packages_BPD: Tensor, is_there_BP: Tensor) -> Tensor:
        gates = torch.sigmoid(self.vector(vector_BD)[:, None] + self.package(packages_BPD))
        return (gates * packages_BPD * is_there_BP[:, :, None]).sum(1)


class IPRec(nn.Module):
    """logit = MLP(user, package, their product), of what each is with its neighbours.

    Key 0 is padding in all tables. Columns: "user"; USERS; PARTS, which SplitPackages makes.

    users, items, publishers: tables of the same dim. views: K of FriendInfluence.
    """

    def __init__(
        self,
        users: Table,
        items: Table,
        publishers: Table,
        *,
        sizes: Sizes | None = None,
        views: int = 4,
        layers: Sequence[int] = (64, 32),
        dropout: float = 0.4,
    ) -> None:
        super().__init__()
        self.sizes, dim = sizes or Sizes(), users.width
        self.user = EmbeddingBag(users, features="user", padding_key=0)
        pairs = (
            (items, self.sizes.items),
            (publishers, self.sizes.items),
            (users, self.sizes.users),
        )
        self.history = nn.ModuleList(
            SequenceRows(table, column=name, length=length)
            for name, (table, length) in zip(USERS, pairs, strict=True)
        )
        self.parts = nn.ModuleList(
            Embedding(table, features=name, padding_key=0)
            for name, table in zip(PARTS, (items, publishers, users), strict=True)
        )
        self.of_history = nn.ModuleList(UserAttention(dim, dropout) for _ in USERS)
        self.of_kinds = UserAttention(dim, dropout)
        self.join = nn.Linear(2 * dim, dim, bias=False)
        self.packages = PackageVectors(dim, views, dropout)
        self.gates = nn.ModuleList(PackageGate(dim) for _ in PACKAGES)
        self.dropout, self.mlp = nn.Dropout(dropout), mlp([3 * dim, *layers, 1])

    def forward(self, batch: Batch) -> Tensor:
        """(B,) logits."""
        user_BD = self._user(batch)
        items, bizs, friends = (part(batch) for part in self.parts)
        ids, friend_ids = (tensor_of(batch, PARTS[place]) for place in (0, 2))
        packages = self.packages(user_BD, items, bizs, Sequences(friends, friend_ids != 0))
        num = [1, *self.sizes.packages]
        candidate, *others = torch.split(packages, num, 1)
        _, *are_there = torch.split(ids != 0, num, 1)
        candidate_BD = candidate.squeeze(1)
        bases = (user_BD, candidate_BD, candidate_BD)
        user, by_publisher, by_friend = (
            gate(base, part, is_there)
            for gate, base, part, is_there in zip(self.gates, bases, others, are_there, strict=True)
        )
        user, package = user_BD + user, candidate_BD + by_publisher + by_friend
        logits: Tensor = self.mlp(self.dropout(torch.cat([user, package, user * package], 1)))
        return logits.squeeze(1)

    def _user(self, batch: Batch) -> Tensor:
        """What articles, publishers and friends say of the user, beside the own row."""
        user_BD = self.user(batch).squeeze(1)
        kinds = torch.stack(
            [
                attention(user_BD, *part(batch))
                for attention, part in zip(self.of_history, self.history, strict=True)
            ],
            1,
        )
        said_BD = self.of_kinds(user_BD, kinds, (kinds != 0).any(2))
        return torch.relu(self.join(torch.cat([said_BD, user_BD], 1)))


@dataclass(frozen=True)
class SplitPackages:
    """Makes PARTS of the candidate and of PACKAGES, of which each has an article, a publisher and
    F friends.
    """

    sizes: Sizes

    def __call__(self, batch: Batch) -> Batch:
        """Raises BadRequest: columns of other sizes."""
        width = 2 + self.sizes.friends
        candidate = [ids_of(batch, name, 1) for name in ("item", "biz")]
        candidate.append(ids_of(batch, "friends", self.sizes.friends))
        packages = [torch.cat(candidate, 1)[:, None]]
        for name, num in zip(PACKAGES, self.sizes.packages, strict=True):
            packages.append(ids_of(batch, name, num * width).view(-1, num, width))
        items, bizs, friends = torch.split(torch.cat(packages, 1), [1, 1, self.sizes.friends], 2)
        parts = (items.flatten(1), bizs.flatten(1), friends.flatten(1))
        kept = {name: column_of(batch, name, "IPRec") for name in ("user", *USERS)}
        return Batch({**batch.columns, **kept, **dict(zip(PARTS, parts, strict=True))})


def create(config: Config) -> Recipe:
    """Keys: those of trireme.models.hyper_parameters for the optimizer, and

    hidden_units: floats per row of the tables "user", "item" and "publisher", default 64.
    f_max_len: friends of a package, default 20. u_max_i, u_max_f: articles, and friends, of a user,
        default 99, 220.
    u_max_pack, pack_max_nei_b, pack_max_nei_f: packages of a user, neighbours by publisher and by
        friends; default 50, 20, 20.
    k: views of the influence of friends, default 4. dropout_rate: default 0.4.

    Inputs: user, item, biz, friends; user_items, user_bizs, user_friends; user_packages,
    pack_neighbors_b, pack_neighbors_f; label.
    """
    hyper = HyperParameters(config)
    packages = (("u_max_pack", 50), ("pack_max_nei_b", 20), ("pack_max_nei_f", 20))
    user, by_publisher, by_friend = (hyper.whole(key, default) for key, default in packages)
    sizes = Sizes(
        friends=hyper.whole("f_max_len", 20),
        items=hyper.whole("u_max_i", 99),
        users=hyper.whole("u_max_f", 220),
        packages=(user, by_publisher, by_friend),
    )
    dim = hyper.whole("hidden_units", 64)
    users, items, publishers = (hyper.table(n, dim=dim) for n in ("user", "item", "publisher"))
    model = IPRec(
        users,
        items,
        publishers,
        sizes=sizes,
        views=hyper.whole("k", 4),
        dropout=hyper.share("dropout_rate", 0.4),
    )
    schema = Schema([*map(Sparse, (*CANDIDATE, *USERS, *PACKAGES)), Label("label")])
    recipe = click_recipe(model, hyper, label="label", schema=schema)
    return replace(recipe, prepare=SplitPackages(sizes))
