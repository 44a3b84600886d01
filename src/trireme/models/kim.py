"""KIM: which article a user clicks, by titles and by entities of a knowledge graph, where candidate
and read articles attend to each other.

Source: Qi et al., "Personalized News Recommendation with Knowledge-aware Interactive Matching",
SIGIR 2021.

PaddleRec's network gives the candidate some of the user's attention and entities in places of its
own, and its words start as GloVe's.

Shapes: B examples, R read articles, C candidates, N users with a candidate each, or titles or pairs
of articles; W words of a title, E entities of an article, each with E neighbours, D, H floats.
"""

from typing import cast

import torch
from torch import Tensor, nn

from trireme.config import Config
from trireme.data.batch import Batch
from trireme.data.schema import Dense, Field, Schema, Sparse
from trireme.metrics import TopK
from trireme.models.columns import PLACE, expect_sizes, tensor_of
from trireme.models.hyper_parameters import HyperParameters
from trireme.models.layers import SelfAttention, mlp
from trireme.models.naml import Pooling, add_place
from trireme.models.sequences import SequenceRows
from trireme.table import Table
from trireme.train.recipe import Evaluation, Recipe

_PARTS = ("title", "entity", "one_hop")
_ENTITY_DIM, _DROPOUT = 100, 0.2


class Words(nn.Module):
    """The (N, W, H) vectors of the words of titles: a convolution and a self-attention, added."""

    def __init__(self, dim: int, size: int) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(dim, size, 3, padding="same")
        self.attention = SelfAttention(dim, size, heads=20, residual=False)
        self.dropout = nn.Dropout(_DROPOUT)

    def forward(self, rows_NWD: Tensor) -> Tensor:
        x = self.dropout(rows_NWD)
        near = torch.relu(self.convolution(x.transpose(1, 2)).transpose(1, 2))
        return cast(Tensor, self.dropout(near + self.attention(x)))


class CoAttention(nn.Module):
    """The (..., D) sum of entities, each as it matters to others: (..., E, D) both."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.attention = SelfAttention(dim, dim, heads=5, residual=False, rectified=False)
        self.own, self.key, self.query = (nn.Linear(dim, dim) for _ in range(3))
        self.weight = nn.Linear(dim, 1)

    def forward(self, entities: Tensor, others: Tensor) -> Tensor:
        shape = entities.shape
        x = self.attention(entities.reshape(-1, *shape[-2:])).view(shape)
        of_others = self.query(x) @ self.key(others).transpose(-1, -2) @ others
        weights = self.weight(torch.tanh(self.own(x) + of_others))
        return cast(Tensor, (weights * x).sum(-2))


class Entities(nn.Module):
    """What the entities of two articles say of each other, (N, D) of the first and of the second.

    Each comes as (N, E, D) entities and (N, E, E, D) neighbours.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dropout, self.pooling = nn.Dropout(_DROPOUT), Pooling(dim, 200)
        self.fuse, self.merge = nn.Linear(2 * dim, dim), nn.Linear(2 * dim, dim)
        self.of_neighbours, self.of_entities = CoAttention(dim), CoAttention(dim)

    def forward(
        self, first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        whole = [self._with_neighbours(*article) for article in (first, second)]
        pairs = ((first, whole[1], second[0]), (second, whole[0], first[0]))
        one, other = (self._seen(*article, *others) for article, *others in pairs)
        return one, other

    def _with_neighbours(self, entities_NED: Tensor, near_NEED: Tensor) -> Tensor:
        near = self.dropout(near_NEED.flatten(0, 1))
        pooled = self.pooling(near, near.new_ones(near.shape[:2], dtype=torch.bool))
        return cast(Tensor, self.fuse(torch.cat([pooled.view_as(entities_NED), entities_NED], 2)))

    def _seen(
        self, entities_NED: Tensor, near_NEED: Tensor, others: Tensor, other_entities: Tensor
    ) -> Tensor:
        """An article by the entities of another one, with their neighbours and without."""
        near = self.of_neighbours(near_NEED, others[:, None].expand_as(near_NEED))
        entities = self.merge(torch.cat([entities_NED, near], 2))
        return cast(Tensor, self.of_entities(entities, other_entities))


class Match(nn.Module):
    """The (N,) scores of a candidate and the R articles that a user has read."""

    def __init__(self, dim: int, size: int, entity: int) -> None:
        super().__init__()
        self.words, self.entities = Words(dim, size), Entities(entity)
        self.query, self.score = nn.Sequential(nn.Linear(size, 200), nn.Tanh()), nn.Linear(200, 1)
        self.join = nn.Linear(size + entity, size)
        self.match_score = mlp([size, 100, 1], activation=nn.Tanh)
        self.match_query = nn.Linear(size, 100)

    def forward(self, candidate: list[Tensor], read: list[Tensor]) -> Tensor:
        """Of the candidate: words (N, W, H), entities (N, E, D), neighbours (N, E, E, D). Of the
        read articles the same, (N, R, ...).
        """
        num = read[0].shape[:2]
        read_texts, texts = self._texts(read[0], candidate[0])
        sides = [
            [part.flatten(0, 1) for part in read[1:]],
            [part[:, None].expand(*num, *part.shape[1:]).flatten(0, 1) for part in candidate[1:]],
        ]
        matched = self.entities(*((entities, near) for entities, near in sides))
        read_NRH, seen_NRH = (
            self.join(torch.cat([text, part.view(*num, -1)], 2))
            for text, part in zip((read_texts, texts), matched, strict=True)
        )
        scores = [self.match_score(x).squeeze(2) for x in (read_NRH, seen_NRH)]
        cross = self.match_query(read_NRH) @ self.match_query(seen_NRH).transpose(1, 2)
        user, article = (
            (torch.softmax(own + 0.01 * _carried(mixed, other), 1)[:, None] @ x).squeeze(1)
            for own, other, mixed, x in (
                (scores[0], scores[1], cross, read_NRH),
                (scores[1], scores[0], cross.transpose(1, 2), seen_NRH),
            )
        )
        return cast(Tensor, (user * article).sum(1))

    def _texts(self, read_NRWH: Tensor, words_NWH: Tensor) -> tuple[Tensor, Tensor]:
        """The (N, R, H) vectors of the titles that were read, and of the candidate's as each of
        them sees it.
        """
        read_queries, queries = self.query(read_NRWH), self.query(words_NWH)
        read_scores, scores = self.score(read_queries).squeeze(3), self.score(queries).squeeze(2)
        cross_NRWW = torch.einsum("nrwq,nvq->nrwv", read_queries, queries)
        read_shares = torch.softmax(
            read_scores + 0.001 * torch.einsum("nrwv,nv->nrw", cross_NRWW.softmax(3), scores), 2
        )
        carried = torch.einsum("nrwv,nrw->nrv", cross_NRWW, read_shares)
        shares = torch.softmax(scores[:, None] + 0.001 * carried, 2)
        return torch.einsum("nrw,nrwh->nrh", read_shares, read_NRWH), shares @ words_NWH


def _carried(cross_NRR: Tensor, scores_NR: Tensor) -> Tensor:
    """(N, R): the scores of what each attends to."""
    return torch.einsum("nij,nj->ni", torch.softmax(cross_NRR, 2), scores_NR)


class KIM(nn.Module):
    """The (B, C) logits of the candidates.

    Columns: "title", "entity", "one_hop": words of the candidates, vectors of their entities and of
    the entities' neighbours; "user_title", "user_entity", "user_one_hop" of the articles that were
    read. Word 0 is padding.

    Args:
        words: table of the words. match: scores pairs.
        num_candidates, num_read: C, R. length: W. entities: E.
    """

    def __init__(
        self,
        words: Table,
        match: Match,
        *,
        num_candidates: int,
        num_read: int = 50,
        length: int = 30,
        entities: int = 10,
    ) -> None:
        super().__init__()
        self.match, self.numbers = match, (num_candidates, num_read)
        self.length, self.entities = length, entities
        self.titles = nn.ModuleList(
            SequenceRows(words, column=f"{user}title", length=num * length)
            for user, num in zip(("", "user_"), self.numbers, strict=True)
        )

    def forward(self, batch: Batch) -> Tensor:
        candidates, read = (
            self._articles(batch, user, num, titles)
            for user, num, titles in zip(("", "user_"), self.numbers, self.titles, strict=True)
        )
        scores = [
            self.match([part[:, place] for part in candidates], read)
            for place in range(self.numbers[0])
        ]
        return torch.stack(scores, 1)

    def _articles(self, batch: Batch, user: str, num: int, titles: nn.Module) -> list[Tensor]:
        """Words (B, num, W, H), entities (B, num, E, D), neighbours (B, num, E, E, D)."""
        expect_sizes(batch, f"{user}title", num * self.length)
        rows: Tensor = torch.unflatten(titles(batch).rows, 1, (num, -1))
        words = self.match.words(rows.flatten(0, 1)).unflatten(0, rows.shape[:2])
        entities, near = (tensor_of(batch, f"{user}{part}") for part in _PARTS[1:])
        size = self.entities
        return [
            words,
            torch.unflatten(entities, 1, (num, size, -1)),
            torch.unflatten(near, 1, (num, size, size, -1)),
        ]


def create(config: Config) -> Recipe:
    """Keys: those of trireme.models.hyper_parameters for the optimizer, and

    embedding_size: floats per row of the table "word", default 300. hidden_size: width of the
        vectors of words and articles, a multiple of 20, default 400.
    npratio: candidates besides the one that was clicked, default 4. max_sents: articles that were
        read, default 50. max_sentence: words of a title, default 30. max_entity_num: entities of an
        article, and neighbours of an entity, default 10.

    Inputs: title, entity, one_hop, user_title, user_entity, user_one_hop, label: 1 for the
    candidate that was clicked. Entities are vectors of 100 floats. PaddleRec's reader yields no
    labels of an evaluation, of one candidate each: it computes scores alone, for need_infer_dump.
    """
    hyper = HyperParameters(config)
    words = hyper.table("word", dim=hyper.whole("embedding_size", 300))
    match = Match(words.width, hyper.whole("hidden_size", 400), _ENTITY_DIM)
    num, num_read = hyper.whole("npratio", 4) + 1, hyper.whole("max_sents", 50)
    size = hyper.whole("max_entity_num", 10)

    def model(num_candidates: int) -> KIM:
        return KIM(
            words,
            match,
            num_candidates=num_candidates,
            num_read=num_read,
            length=hyper.whole("max_sentence", 30),
            entities=size,
        )

    def inputs(num_candidates: int) -> list[Field]:
        return [
            field
            for user, count in (("", num_candidates), ("user_", num_read))
            for field in (
                Sparse(f"{user}title"),
                Dense(f"{user}entity", count * size * _ENTITY_DIM),
                Dense(f"{user}one_hop", count * size * size * _ENTITY_DIM),
            )
        ]

    trained = model(num)
    return hyper.recipe(
        trained,
        nn.functional.cross_entropy,
        label="label",
        schema=Schema([*inputs(num), Dense("label", num)]),
        metrics=[TopK(1, name="accuracy", label=PLACE)],
        prepare=add_place,
        files_are_one=True,
        # PaddleRec's reader makes batches of its own of that size.
        reader_config={"mode": "train", "runner.train_batch_size": 1},
        evaluation=Evaluation(
            model=model(1),
            schema=Schema(inputs(1)),
            files_are_one=True,
            reader_config={"mode": "test", "runner.test_batch_size": 1},
        ),
    )
