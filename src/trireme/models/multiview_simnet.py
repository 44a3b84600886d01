"""Multi-view Simnet: queries and titles become vectors by a GRU; the right title has the smallest
angle. PaddleRec's `multiview-simnet`.

Source: Elkahky et al., "A Multi-View Deep Learning Approach for Cross Domain User Modeling in
Recommendation Systems", WWW 2015; Cho et al., EMNLP 2014, for the GRU.
"""

import torch
from torch import Tensor, nn

from trireme.config import Config
from trireme.data.batch import Batch
from trireme.data.schema import Schema, Sparse
from trireme.metrics import TopK
from trireme.models.columns import PLACE, first_is_right
from trireme.models.hyper_parameters import HyperParameters
from trireme.models.layers import mlp
from trireme.models.losses import MarginLoss
from trireme.models.sequences import SequenceRows
from trireme.table import Table
from trireme.train.recipe import Evaluation, Recipe

QUERY, TITLE, OTHER = "query", "pos_title", "neg_title"


class MultiviewSimnet(nn.Module):
    """Cosines of a query with its title, and with another one.

    A vector is linear(max over the words of the states of a GRU). All texts have one GRU; queries
    and titles have a linear map each. Columns: "query", "pos_title", "neg_title", words, of which
    word 0 is padding. PaddleRec takes the maximum also over the states at padding.

    Args:
        words: table of the words.
        lengths: words of a query, of its title and of the other one; the ones behind are left out.
        size: floats of the GRU's state. hidden: floats of a vector.
    """

    def __init__(
        self,
        words: Table,
        *,
        lengths: tuple[int, int, int] = (79, 99, 90),
        size: int = 128,
        hidden: int = 128,
    ) -> None:
        super().__init__()
        parts = zip((QUERY, TITLE, OTHER), lengths, strict=True)
        self.words = nn.ModuleDict(
            {name: SequenceRows(words, column=name, length=length) for name, length in parts}
        )
        self.gru = nn.GRU(words.width, size, batch_first=True)
        self.query, self.title = mlp([size, hidden]), mlp([size, hidden])

    def forward(self, batch: Batch) -> Tensor:
        """(B, 2) cosines, that of the right title first."""
        query, *titles = (_states(part, self.gru, batch) for part in self.words.values())
        query_BH = self.query(query)
        cosine = nn.functional.cosine_similarity
        return torch.stack([cosine(query_BH, self.title(title)) for title in titles], 1)


def _states(words: nn.Module, gru: nn.GRU, batch: Batch) -> Tensor:
    """(B, size): the largest value of each float of the state, 0 for a text without words."""
    rows_BLD, is_there_BL = words(batch)
    states_BLH, _ = gru(rows_BLD)
    lowest = torch.finfo(states_BLH.dtype).min
    largest_BH: Tensor = states_BLH.masked_fill(~is_there_BL[:, :, None], lowest).amax(1)
    return largest_BH.masked_fill(~is_there_BL.any(1, keepdim=True), 0.0)


class QueryTitle(nn.Module):
    """The (B,) cosines of "query" and "pos_title" alone."""

    def __init__(self, model: MultiviewSimnet) -> None:
        super().__init__()
        self.words = nn.ModuleDict({name: model.words[name] for name in (QUERY, TITLE)})
        self.gru, self.query, self.title = model.gru, model.query, model.title

    def forward(self, batch: Batch) -> Tensor:
        query_BH, title_BH = (_states(part, self.gru, batch) for part in self.words.values())
        return nn.functional.cosine_similarity(self.query(query_BH), self.title(title_BH))


def create(config: Config) -> Recipe:
    """Keys: those of trireme.models.hyper_parameters for the optimizer, and

    embedding_dim: floats per row of the table "words", default 128.
    query_encode_dim: floats of the GRU's state, default 128; title_encode_dim is the same.
    hidden_size: floats of a vector, default 128.
    query_len, pos_len, neg_len: words of a query, its title and the other one, default 79, 99, 90.
    margin: default 0.1.
    query_encoder, title_encoder: gru.
    sparse_feature_dim: how many words there are. Without effect: a table takes any key.

    Inputs: query, pos_title, neg_title; of an evaluation the first two, and its output is their
    cosine.

    Raises BadRequest: another encoder, or two sizes of one state.
    """
    hyper = HyperParameters(config)
    hyper.get("sparse_feature_dim")
    size = hyper.whole("query_encode_dim", 128)
    hyper.fixed("title_encode_dim", size, "as query_encode_dim")
    hyper.fixed("query_encoder", "gru")
    hyper.fixed("title_encoder", "gru")
    model = MultiviewSimnet(
        hyper.table("words", dim=hyper.whole("embedding_dim", 128)),
        lengths=(
            hyper.whole("query_len", 79),
            hyper.whole("pos_len", 99),
            hyper.whole("neg_len", 90),
        ),
        size=size,
        hidden=hyper.whole("hidden_size", 128),
    )
    return hyper.recipe(
        model,
        MarginLoss(hyper.number("margin", 0.1, may_be_zero=True)),
        schema=Schema(map(Sparse, (QUERY, TITLE, OTHER))),
        metrics=[TopK(1, name="right_title", label=PLACE)],
        prepare=first_is_right,
        evaluation=Evaluation(
            model=QueryTitle(model), schema=Schema([Sparse(QUERY), Sparse(TITLE)])
        ),
    )
