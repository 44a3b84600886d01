"""NAML: which article a user clicks, by attention over words, over views of an article (title,
content, categories), and over the articles that were read. Its parts serve other news models.

Source: Wu et al., "Neural News Recommendation with Attentive Multi-View Learning", IJCAI 2019.

PaddleRec's network has no tanh in the attention, one convolution for titles and contents, and rows
for padding, which is left out here.

Shapes: B examples, A articles of each, L words of a text, D floats per row, C floats of a vector.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from trireme.config import Config
from trireme.data.batch import Batch
from trireme.data.schema import Dense, Schema, Sparse
from trireme.initializer import Normal, Uniform
from trireme.metrics import TopK
from trireme.models.columns import PLACE, expect_same_sizes, tensor_of
from trireme.models.hyper_parameters import HyperParameters
from trireme.models.layers import mlp
from trireme.models.sequences import SequenceRows, Sequences, shares_of
from trireme.table import Table
from trireme.train.recipe import Recipe

CANDIDATES, HISTORY = "sample", "visit"
_COLUMNS = ("cate", "sub_cate", "title", "content")
_HIDDEN = 100


class Vocabulary(NamedTuple):
    """A table, and its key that is no id: texts and histories may be padded with it."""

    table: Table
    padding: int | None = None


class Pooling(nn.Module):
    """The sum of the vectors that are there, each with a share of the softmax of an MLP: (B, C)."""

    def __init__(self, size: int, hidden: int = _HIDDEN) -> None:
        super().__init__()
        self.scores = mlp([size, hidden, 1], activation=nn.Tanh)

    def forward(self, vectors_BLC: Tensor, is_there_BL: Tensor) -> Tensor:
        shares_BL = shares_of(self.scores(vectors_BLC).squeeze(2), is_there_BL)
        return torch.einsum("bl,blc->bc", shares_BL, vectors_BLC)


class Articles(nn.Module):
    """The rows of the A articles of each example, of the columns "cate_PART", "sub_cate_PART",
    "title_PART" and "content_PART": the texts of all articles of an example lie one behind the
    other, each of them as long as the others.

    words, categories, subcategories: of the ids. num: A. title, content: words of the texts.
    """

    def __init__(
        self,
        part: str,
        words: Vocabulary,
        categories: Vocabulary,
        subcategories: Vocabulary,
        *,
        num: int,
        title: int,
        content: int,
    ) -> None:
        super().__init__()
        parts = zip(
            _COLUMNS,
            (categories, subcategories, words, words),
            (num, num, num * title, num * content),
            strict=True,
        )
        self.rows = nn.ModuleList(
            SequenceRows(ids.table, column=f"{name}_{part}", length=length, padding_key=ids.padding)
            for name, ids, length in parts
        )
        self.num, self.columns = num, [f"{name}_{part}" for name in _COLUMNS]
        self.words = (title, content)

    def forward(self, batch: Batch) -> list[Sequences]:
        """Categories and subcategories (B, A, D), titles and contents (B * A, L, D). Raises
        BadRequest: columns of other sizes.
        """
        expect_same_sizes(batch, self.columns, (1, *self.words))
        categories, subcategories, *texts = (part(batch) for part in self.rows)
        return [categories, subcategories, *(self._apart(text) for text in texts)]

    def _apart(self, texts: Sequences) -> Sequences:
        return Sequences(
            *(torch.unflatten(part, 1, (self.num, -1)).flatten(0, 1) for part in texts)
        )


class Text(nn.Module):
    """The (B, C) vectors of texts: a convolution over three words at once, ReLU, and a pooling."""

    def __init__(self, dim: int, size: int, pooling: nn.Module) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(dim, size, 3, padding="same")
        self.pooling = pooling

    def forward(self, words: Sequences) -> Tensor:
        x_BCL = torch.relu(self.convolution(words.rows.transpose(1, 2)))
        vectors_BC: Tensor = self.pooling(x_BCL.transpose(1, 2), words.is_there)
        return vectors_BC


class NAML(nn.Module):
    """logits = <vector of each candidate, vector of the user>.

    The vector of an article is a pooling of four: of its title, its content, its category and its
    subcategory. The vector of the user is a pooling of those of the articles of the history.

    Args:
        words, categories, subcategories: of the ids. A history may be padded with the category that
            is padding, a text with the word that is.
        size: C. pooling: makes the module that pools the words of a text, or a history.
        title, content: words of the texts of an article. num_candidates, num_read: articles.
    """

    def __init__(
        self,
        words: Vocabulary,
        categories: Vocabulary,
        subcategories: Vocabulary,
        *,
        size: int,
        pooling: Callable[[], nn.Module],
        title: int = 10,
        content: int = 30,
        num_candidates: int = 5,
        num_read: int = 10,
    ) -> None:
        super().__init__()
        ids = (words, categories, subcategories)
        self.candidates, self.history = (
            Articles(part, *ids, num=num, title=title, content=content)
            for part, num in ((CANDIDATES, num_candidates), (HISTORY, num_read))
        )
        self.categories = nn.ModuleList(
            mlp([part.table.width, size]) for part in (categories, subcategories)
        )
        self.texts = nn.ModuleList(Text(words.table.width, size, pooling()) for _ in range(2))
        self.article, self.user = Pooling(size), pooling()

    def forward(self, batch: Batch) -> Tensor:
        """(B, A) logits of the candidates."""
        candidates, read = self.candidates(batch), self.history(batch)
        user_BC = self.user(self._vectors(read), read[0].is_there)
        return torch.einsum("bac,bc->ba", self._vectors(candidates), user_BC)

    def _vectors(self, articles: list[Sequences]) -> Tensor:
        """The (B, A, C) vectors of articles."""
        kinds, texts = articles[:2], articles[2:]
        size = kinds[0].rows.shape[:2]
        vectors = [text(words) for text, words in zip(self.texts, texts, strict=True)]
        vectors += [
            torch.relu(layer(part.rows)).flatten(0, 1)
            for layer, part in zip(self.categories, kinds, strict=True)
        ]
        group = torch.stack(vectors, 1)
        are_there = group.new_ones(group.shape[:2], dtype=torch.bool)
        vectors_BAC: Tensor = self.article(group, are_there).unflatten(0, size)
        return vectors_BAC


def add_place(batch: Batch) -> Batch:
    """Adds "place" to a batch: which of the candidates was clicked, as "label" has it."""
    return Batch({**batch.columns, PLACE: tensor_of(batch, "label").argmax(1)}, batch.bags)


def news_recipe(
    hyper: HyperParameters, size: int, pooling: Callable[[int], Callable[[], nn.Module]]
) -> Recipe:
    """The recipe of a model whose poolings are pooling(L)(), for sequences of at most L. Keys:

    article_title_size, article_content_size: words of the texts, default 10, 30. browse_size:
        articles of a history, default 10. neg_condidate_sample_size: candidates besides the one
        that was clicked, default 4.
    word_dict_size, category_size, sub_category_size: the ids that are padding, default 101, 4, 10.
    word_dimension, category_dimension: floats per row of the table "word", default 30, and of the
        tables "category" and "subcategory", default 32.

    Inputs: label, 1 for the candidate that was clicked, 0 for others; then cate, sub_cate, title
    and content, of the candidates (cate_sample) and of the history (cate_visit) each.
    """
    lengths = [
        hyper.whole(f"article_{part}_size", n) for part, n in (("title", 10), ("content", 30))
    ]
    num_read, num = hyper.whole("browse_size", 10), hyper.whole("neg_condidate_sample_size", 4) + 1
    dim = hyper.whole("category_dimension", 32)
    words = hyper.table("word", dim=hyper.whole("word_dimension", 30), initializer=Uniform(-1, 1))
    kinds = [
        hyper.table(name, dim=dim, initializer=Normal(std=0.1))
        for name in ("category", "subcategory")
    ]
    model = NAML(
        Vocabulary(words, hyper.whole("word_dict_size", 101)),
        Vocabulary(kinds[0], hyper.whole("category_size", 4)),
        Vocabulary(kinds[1], hyper.whole("sub_category_size", 10)),
        size=size,
        pooling=pooling(max(*lengths, num_read)),
        title=lengths[0],
        content=lengths[1],
        num_candidates=num,
        num_read=num_read,
    )
    parts = [f"{name}_{part}" for name in _COLUMNS for part in (CANDIDATES, HISTORY)]
    return hyper.recipe(
        model,
        nn.functional.cross_entropy,
        label="label",
        schema=Schema([Dense("label", num), *map(Sparse, parts)]),
        metrics=[TopK(1, name="accuracy", label=PLACE), TopK(5, label=PLACE)],
        prepare=add_place,
        files_are_one=True,
    )


def create(config: Config) -> Recipe:
    """Keys: those of trireme.models.hyper_parameters for the optimizer, those of news_recipe, which
    says what the inputs are, and

    hidden_size: width of the vectors of words, articles and users, default 400.
    """
    hyper = HyperParameters(config)
    size = hyper.whole("hidden_size", 400)
    return news_recipe(hyper, size, lambda _: partial(Pooling, size))
