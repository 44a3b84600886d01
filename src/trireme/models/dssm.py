"""DSSM: queries and documents, as counts of letter trigrams, become vectors; the right document has
the smallest angle.

Source: Huang et al., "Learning Deep Structured Semantic Models for Web Search using Clickthrough
Data", CIKM 2013.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trireme.config import Config
from trireme.data.batch import Batch
from trireme.data.schema import Dense, Schema
from trireme.errors import BadRequest
from trireme.models.columns import tensor_of
from trireme.models.hyper_parameters import HyperParameters
from trireme.models.layers import mlp
from trireme.train.recipe import Evaluation, Recipe

QUERY, RIGHT = "query", "doc_pos"
_ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh}


class DSSM(nn.Module):
    """cosine(MLP(query), MLP(document)), of the right document and of K others.

    Columns: "query", "doc_pos" and "doc_neg_0" to "doc_neg_{K - 1}", numbers of the same width.

    Args:
        num_terms: width of the columns.
        num_wrong: K.
        layers: widths of the layers of each MLP; the last one is that of the vectors.
        activation: after each layer.
    """

    def __init__(
        self,
        *,
        num_terms: int,
        num_wrong: int = 4,
        layers: Sequence[int] = (300, 300, 128),
        activation: type[nn.Module] = nn.Tanh,
    ) -> None:
        super().__init__()
        sizes = [num_terms, *layers]
        self.query = mlp(sizes, activation=activation, activates_last=True)
        self.document = mlp(sizes, activation=activation, activates_last=True)
        self.documents = (RIGHT, *(f"doc_neg_{i}" for i in range(num_wrong)))

    def forward(self, batch: Batch) -> Tensor:
        """(B, 1 + K) cosines, that of the right document first."""
        query_BD = self.query(tensor_of(batch, QUERY))
        cosines = [self.similarity(query_BD, batch, name) for name in self.documents]
        return torch.stack(cosines, 1)

    def similarity(self, query_BD: Tensor, batch: Batch, document: str) -> Tensor:
        """(B,) cosines with the documents of a column."""
        vectors_BD = self.document(tensor_of(batch, document))
        return nn.functional.cosine_similarity(query_BD, vectors_BD, dim=1)


class Similarity(nn.Module):
    """The (B,) cosines of "query" and "doc_pos" alone."""

    def __init__(self, model: DSSM) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> Tensor:
        return self.model.similarity(self.model.query(tensor_of(batch, QUERY)), batch, RIGHT)


def create(config: Config) -> Recipe:
    """Keys: those of trireme.models.hyper_parameters for the optimizer, and

    trigram_d: width of the columns, default 2900. neg_num: documents besides the right one, default
        4.
    fc_sizes: widths of the layers, default 300, 300, 128. fc_acts: relu or tanh for each of them,
        the same for all; default tanh.
    smoothing: what cosines are multiplied by in the softmax, default 1.

    Inputs: query, doc_pos, doc_neg_0, ...; of an evaluation the first two, and its output is their
    similarity. The loss is that of choosing the right document.

    Raises BadRequest: other activations, or several.
    """
    hyper = HyperParameters(config)
    width, num_wrong = hyper.whole("trigram_d", 2900), hyper.whole("neg_num", 4)
    layers = hyper.sizes("fc_sizes", (300, 300, 128), least=1)
    acts = hyper.names("fc_acts", ("tanh",) * len(layers))
    if len(acts) != len(layers) or len(set(acts)) > 1 or acts[0] not in _ACTIVATIONS:
        raise BadRequest(
            f"hyper_parameters.fc_acts: expected {' or '.join(_ACTIVATIONS)}, {len(layers)} times,"
            f" found {', '.join(acts)}"
        )
    model = DSSM(
        num_terms=width, num_wrong=num_wrong, layers=layers, activation=_ACTIVATIONS[acts[0]]
    )
    smoothing = hyper.number("smoothing", 1.0)

    def loss(cosines: Tensor, _: Any) -> Tensor:
        return -torch.log_softmax(smoothing * cosines, 1)[:, 0].mean()

    return hyper.recipe(
        model,
        loss,
        schema=Schema([Dense(name, width) for name in (QUERY, *model.documents)]),
        evaluation=Evaluation(
            model=Similarity(model), schema=Schema([Dense(QUERY, width), Dense(RIGHT, width)])
        ),
    )
