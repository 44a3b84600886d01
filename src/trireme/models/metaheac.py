"""MetaHeac: from the campaigns of the past, how to learn from a few users whom a new one reaches.

Source: Zhu et al., "Learning to Expand Audience via Meta Hybrid Experts and Critics for
Recommendation and Advertising", KDD 2021.

Shapes: B examples, F features, L ids of a feature at most, S sets of users.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from trireme.config import Config
from trireme.data.batch import Batch, Column, Ragged
from trireme.data.schema import Schema, Sparse
from trireme.errors import BadRequest
from trireme.metrics import AUC
from trireme.models.columns import ragged_of, tensor_of
from trireme.models.hyper_parameters import HyperParameters
from trireme.models.layers import mlp
from trireme.models.meta_learning import IS_QUERY, TASK, Weights, sgd, tasks_of
from trireme.nn import Embedding
from trireme.table import Table
from trireme.train.recipe import Evaluation, Recipe

_PARTS = ("static", "dynamic", "ad")


LABEL = "label"
# The most ids of each dynamic feature; the shorter ones are padded.
LONGEST = (10, 10, 10, 5, 5, 5, 5)


@dataclass(frozen=True)
class Tasks:
    """Makes examples with features of what PaddleRec's readers yield: "support" and "query", the
    ids of several users of each of `num_tasks` tasks, and their labels.

    The ids of a task are, one kind after the other: static features of all its users, dynamic ones
    padded to LONGEST, how many of these are there, and features of the ad.
    """

    num_tasks: int
    num_static: int
    num_ad: int

    def __call__(self, batch: Batch) -> Batch:
        """Raises BadRequest: numbers of ids and labels that do not fit."""
        parts: list[list[Tensor]] = []
        sizes, labels = [], []
        for number, is_query, ids, label in self._sets(batch):
            widths = (self.num_static, sum(LONGEST), len(LONGEST), self.num_ad)
            if len(ids) != len(label) * sum(widths):
                raise BadRequest(
                    f"Tasks: expected {sum(widths)} ids of each of {len(label)} users, found"
                    f" {len(ids)} of all"
                )
            kinds = torch.split(ids, [len(label) * width for width in widths])
            parts.append([one.view(len(label), -1) for one in kinds])
            sizes.append((number, is_query, len(label)))
            labels.append(label)
        static, dynamic, lengths, ad = (torch.cat(kind) for kind in zip(*parts, strict=True))
        counts = torch.tensor([size for *_, size in sizes])
        task, is_query_S = torch.tensor([two for *two, _ in sizes]).unbind(1)
        columns: dict[str, Column] = {
            LABEL: torch.cat(labels).float(),
            TASK: task.repeat_interleave(counts),
            IS_QUERY: is_query_S.repeat_interleave(counts).float(),
            **_single("static", static),
            **_padded(dynamic, lengths),
            **_single("ad", ad),
        }
        return Batch(columns)

    def _sets(self, batch: Batch) -> Iterator[tuple[int, int, Tensor, Tensor]]:
        """The users of each task to learn from, then to judge by: the task's number, which of the
        two, ids and labels.
        """
        for example, task in itertools.product(range(batch.num_examples), range(self.num_tasks)):
            for is_query, part in enumerate(("support", "query")):
                both = []
                for name in (part, f"{part}_label"):
                    values, offsets = ragged_of(batch, name)[:2]
                    own = values[int(offsets[example]) : int(offsets[example + 1])]
                    if len(own) % self.num_tasks:
                        raise BadRequest(
                            f"Tasks: expected as many values in {name!r} of each of"
                            f" {self.num_tasks} tasks, found {len(own)} of all"
                        )
                    both.append(own.view(self.num_tasks, -1)[task])
                yield example * self.num_tasks + task, is_query, both[0], both[1]


def _single(kind: str, ids_BF: Tensor) -> dict[str, Ragged]:
    places = torch.arange(len(ids_BF) + 1)
    return {f"{kind}_{i}": Ragged(ids, places) for i, ids in enumerate(ids_BF.T.contiguous())}


def _padded(ids: Tensor, lengths_BF: Tensor) -> dict[str, Ragged]:
    """The dynamic features without padding."""
    columns = {}
    for i, ids_BL in enumerate(torch.split(ids, list(LONGEST), 1)):
        length_B = lengths_BF[:, i].clamp(0, LONGEST[i])
        is_there_BL = torch.arange(LONGEST[i]) < length_B[:, None]
        ends = nn.functional.pad(length_B.cumsum(0), (1, 0))
        columns[f"dynamic_{i}"] = Ragged(ids_BL[is_there_BL], ends)
    return columns


class ExpertsAndCritics(nn.Module):
    """p = sum over critics of share times sigmoid(linear(x)), and x the sum over experts of share
    times relu(MLP(vectors of the user)).

    Both shares are softmax(MLP(mean of the user's vectors, vectors of the ad)). PaddleRec's experts
    leave out the layers behind the first.

    Args:
        dim: D. num_user, num_ad: vectors of the user and of the ad.
        num_experts, num_critics: how many.
        layers: widths of the layers of each expert; the last is also that of the hidden layers for
            the shares.
    """

    def __init__(
        self,
        dim: int,
        *,
        num_user: int,
        num_ad: int,
        num_experts: int = 8,
        num_critics: int = 5,
        layers: Sequence[int] = (64, 64),
    ) -> None:
        super().__init__()
        self.num_user, size = num_user, layers[-1]
        self.experts = nn.ModuleList(mlp([num_user * dim, *layers]) for _ in range(num_experts))
        self.critics = mlp([size, num_critics])
        self.expert_shares, self.critic_shares = (
            mlp([(num_ad + 1) * dim, size, num]) for num in (num_experts, num_critics)
        )

    def forward(self, vectors_BFD: Tensor) -> Tensor:
        """(B,) logits of the vectors of user and ad."""
        user_BFD, ad = vectors_BFD[:, : self.num_user], vectors_BFD[:, self.num_user :]
        judged = torch.cat([user_BFD.mean(1, keepdim=True), ad], 1).flatten(1)
        experts_BEH = torch.relu(torch.stack([one(user_BFD.flatten(1)) for one in self.experts], 1))
        shares_BE = torch.softmax(self.expert_shares(judged), 1)
        critics_BC = self.critics(torch.einsum("be,beh->bh", shares_BE, experts_BEH))
        shares_BC = torch.log_softmax(self.critic_shares(judged), 1)
        yes, no = (
            torch.logsumexp(shares_BC + nn.functional.logsigmoid(sign * critics_BC), 1)
            for sign in (1, -1)
        )
        return yes - no


class MetaHeac(nn.Module):
    """The logits of the queries of each task, by a copy of rows and net that has learnt from the
    task's other examples. Those have logits 0.

    A row is the mean of the ids of a feature. In training a copy makes one step of gradient
    descent; else it learns with Adam for some epochs.

    Columns: a feature for each table, "label", and those of trireme.models.meta_learning.

    Args:
        tables: by feature, those of the user first, all of dim D.
        net: makes logits of the vectors of the features.
        lr: of the step. test_lr, epochs, batch_size: of the epochs.
    """

    def __init__(
        self,
        tables: dict[str, Table],
        net: ExpertsAndCritics,
        *,
        lr: float = 2e-4,
        test_lr: float = 1e-3,
        epochs: int = 2,
        batch_size: int = 32,
    ) -> None:
        super().__init__()
        self.features, self.net = tuple(tables), net
        self.rows = nn.ModuleList(Embedding(table, features=f) for f, table in tables.items())
        self.lr, self.test_lr, self.epochs, self.batch_size = lr, test_lr, epochs, batch_size

    def forward(self, batch: Batch) -> Tensor:
        """(B,) logits."""
        labels = tensor_of(batch, LABEL)
        weights: Weights = dict(self.net.named_parameters())
        bags = {}
        for name, part in zip(self.features, self.rows, strict=True):
            weights[name], bags[name] = _distinct(part(batch), ragged_of(batch, name))

        def logits_of(now: Weights, examples: Tensor) -> Tensor:
            pool = nn.functional.embedding_bag
            vectors = [pool(places, now[name], begins) for name, (places, begins) in bags.items()]
            net = {name: now[name] for name, _ in self.net.named_parameters()}
            logits: Tensor = functional_call(self.net, net, (torch.stack(vectors, 1)[examples],))
            return logits

        def loss_of(now: Weights, examples: Tensor) -> Tensor:
            log_loss = nn.functional.binary_cross_entropy_with_logits
            return log_loss(logits_of(now, examples), labels[examples])

        out = torch.zeros_like(labels)
        for known, asked in tasks_of(batch):
            if self.training:
                step = functools.partial(loss_of, examples=known)
                adapted = sgd(step, weights, lr=self.lr, steps=1)
            else:
                adapted = self._fit(loss_of, weights, known)
            out = out.index_copy(0, asked, logits_of(adapted, asked).to(out.dtype))
        return out

    def _fit(
        self, loss_of: Callable[[Weights, Tensor], Tensor], weights: Weights, known: Tensor
    ) -> Weights:
        leaves = {
            name: weight.detach().clone().requires_grad_() for name, weight in weights.items()
        }
        optimizer = torch.optim.Adam(leaves.values(), lr=self.test_lr)
        with torch.enable_grad():  # within an evaluation
            parts = torch.split(known, self.batch_size)
            for _, examples in itertools.product(range(self.epochs), parts):
                optimizer.zero_grad()
                loss: Any = loss_of(leaves, examples)
                loss.backward()
                optimizer.step()
        return {name: leaf.detach() for name, leaf in leaves.items()}


def _distinct(rows_ND: Tensor, ids: Ragged) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The distinct rows of a feature, (K + 1, D) with one of zeros, and its bags: places among the
    rows, and where each example's begin.
    """
    begin, end = int(ids.offsets[0]), int(ids.offsets[-1])
    keys_K, places_N = torch.unique(ids.values[begin:end], return_inverse=True)
    order_N = torch.arange(end - begin, device=keys_K.device)
    any_K = torch.zeros_like(keys_K).scatter(0, places_N, order_N)
    return nn.functional.pad(rows_ND[any_K], (0, 0, 0, 1)), (places_N, ids.offsets[:-1] - begin)


def query_loss(logits: Tensor, batch: Batch) -> Tensor:
    """The log loss of the queries."""
    is_query, labels = (tensor_of(batch, name) for name in (IS_QUERY, LABEL))
    log_loss = nn.functional.binary_cross_entropy_with_logits
    return log_loss(logits, labels, weight=is_query, reduction="sum") / is_query.sum()


def create(config: Config) -> Recipe:
    """Keys: those of trireme.models.hyper_parameters, and

    max_idxs: three lists, of static features, dynamic ones and those of the ad, with a number for
        each, which is not needed: each feature has a table of its own, "static_0", "static_1", ...
        There are 7 dynamic features.
    embed_dim: floats per row, default 64.
    num_expert, num_output: experts and critics, default 8 and 5; mlp_dims: widths of the layers of
        an expert, default 64, 64.
    task_count: tasks of an example of training, default 5.
    local_lr: of the step of a task in training, default 0.0002.
    optimizer.global_learning_rate: of all that is trained, default 0.001.
    optimizer.local_test_learning_rate, runner.infer_train_epoch, batch_size: of an evaluation,
        which learns each task with Adam: default 0.001, 2 epochs, 32 examples of a batch.

    Inputs: support, support_label, query, query_label, see trireme.models.metaheac; of an
    evaluation aid before them, and one task. Gradients are of first order, as in PaddleRec.

    Raises BadRequest: other max_idxs.
    """
    lr = HyperParameters(config).number("optimizer.global_learning_rate", 1e-3)
    hyper = HyperParameters(config, **{"optimizer.learning_rate": lr})
    kinds = hyper.get("max_idxs", [[0] * 7, [0] * 7, [0] * 6])
    are_lists = isinstance(kinds, list) and all(isinstance(one, list) and one for one in kinds)
    if not are_lists or len(kinds) != len(_PARTS) or len(kinds[1]) != len(LONGEST):
        raise BadRequest(
            f"hyper_parameters.max_idxs: expected 3 lists, the second of {len(LONGEST)}, found"
            f" {kinds!r}"
        )
    num_static, _, num_ad = map(len, kinds)
    names = [
        f"{part}_{i}" for part, own in zip(_PARTS, kinds, strict=True) for i in range(len(own))
    ]
    dim = hyper.whole("embed_dim", 64)
    net = ExpertsAndCritics(
        dim,
        num_user=num_static + len(LONGEST),
        num_ad=num_ad,
        num_experts=hyper.whole("num_expert", 8),
        num_critics=hyper.whole("num_output", 5),
        layers=hyper.sizes("mlp_dims", (64, 64), least=1),
    )
    model = MetaHeac(
        {name: hyper.table(name, dim=dim) for name in names},
        net,
        lr=hyper.number("local_lr", 2e-4),
        test_lr=hyper.number("optimizer.local_test_learning_rate", 1e-3),
        epochs=HyperParameters(config, "runner").whole("infer_train_epoch", 2),
        batch_size=hyper.whole("batch_size", 32),
    )
    inputs = tuple(map(Sparse, ("support", "support_label", "query", "query_label")))
    num_tasks = hyper.whole("task_count", 5)
    return hyper.recipe(
        model,
        query_loss,
        schema=Schema(inputs),
        metrics=[_auc()],
        prepare=Tasks(num_tasks, num_static, num_ad),
        evaluation=Evaluation(
            model=model,
            metrics=[_auc()],
            schema=Schema([Sparse("aid"), *inputs]),
            loss=query_loss,
            prepare=Tasks(1, num_static, num_ad),
        ),
    )


def _auc() -> AUC:
    return AUC(label=LABEL, weights=IS_QUERY)
