"""Fastformer: attention in linear time, as the encoder of the texts and the histories of a news
model. Its other parts are those of NAML.

Source: Wu et al., "Fastformer: Additive Attention Can Be All You Need", 2021.

Shapes: B sequences, L places, C floats, H heads.
"""

from functools import partial

import torch
from torch import Tensor, nn

from trireme.config import Config
from trireme.errors import BadRequest
from trireme.models.hyper_parameters import HyperParameters
from trireme.models.layers import check_heads, mlp
from trireme.models.naml import Pooling, news_recipe
from trireme.models.sequences import shares_of
from trireme.train.recipe import Recipe


class AdditiveAttention(nn.Module):
    """Attention to sums over the places in place of to each of them: (B, L, C) -> (B, L, C).

    By head, q = sum of the queries, each with its share; k = sum of the q * keys, each with its
    share; the output is linear(k * queries) + queries.

    Raises BadRequest: C is no multiple of `heads`.
    """

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        check_heads("AdditiveAttention", size, heads)
        self.heads, self.scale = heads, (heads / size) ** 0.5
        self.query, self.key = nn.Linear(size, size), nn.Linear(size, size)
        self.query_scores, self.key_scores = nn.Linear(size, heads), nn.Linear(size, heads)
        self.join = nn.Linear(size, size)

    def forward(self, x: Tensor, is_there_BL: Tensor) -> Tensor:
        queries = self.query(x)
        query_B1C = self._sum(queries, self.query_scores, is_there_BL)
        key_B1C = self._sum(self.key(x) * query_B1C, self.key_scores, is_there_BL)
        out: Tensor = self.join(key_B1C * queries) + queries
        return out

    def _sum(self, x: Tensor, scores: nn.Module, is_there_BL: Tensor) -> Tensor:
        """(B, 1, C): of each head the sum over the places, with shares of its own."""
        shares_BLH = shares_of(scores(x) * self.scale, is_there_BL[:, :, None])
        x_BLHD = torch.unflatten(x, 2, (self.heads, -1))
        return torch.einsum("blh,blhd->bhd", shares_BLH, x_BLHD).flatten(1)[:, None]


class Layer(nn.Module):
    """Additive attention, and a hidden layer: each is added to its input, and normalized."""

    def __init__(self, size: int, *, heads: int, inner: int, dropout: float, eps: float) -> None:
        super().__init__()
        self.attention = AdditiveAttention(size, heads)
        self.join = nn.Linear(size, size)
        self.hidden = mlp([size, inner, size], activation=nn.GELU)
        self.norms = nn.ModuleList(nn.LayerNorm(size, eps=eps) for _ in range(2))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, is_there_BL: Tensor) -> Tensor:
        x = self.norms[0](x + self.dropout(self.join(self.attention(x, is_there_BL))))
        out: Tensor = self.norms[1](x + self.dropout(self.hidden(x)))
        return out


class Fastformer(nn.Module):
    """The (B, C) vectors of sequences of at most `length` places: layers, and a pooling.

    Args:
        size: C. num_layers, heads, inner: layers, heads of each, width of its hidden layer.
        dropout: in training. eps: of the normalizations.
        spread: standard deviation of the first weights.
    """

    def __init__(
        self,
        size: int,
        length: int,
        *,
        num_layers: int = 2,
        heads: int = 16,
        inner: int = 256,
        dropout: float = 0.2,
        eps: float = 1e-12,
        spread: float = 0.02,
    ) -> None:
        super().__init__()
        self.places = nn.Parameter(spread * torch.randn(length, size))
        self.norm, self.dropout = nn.LayerNorm(size, eps=eps), nn.Dropout(dropout)
        self.layers = nn.ModuleList(
            Layer(size, heads=heads, inner=inner, dropout=dropout, eps=eps)
            for _ in range(num_layers)
        )
        self.pooling = Pooling(size, size)
        for part in self.modules():
            if isinstance(part, nn.Linear):
                nn.init.normal_(part.weight, std=spread)
                nn.init.zeros_(part.bias)

    def forward(self, vectors_BLC: Tensor, is_there_BL: Tensor) -> Tensor:
        x = self.dropout(self.norm(vectors_BLC + self.places[: vectors_BLC.shape[1]]))
        for layer in self.layers:
            x = layer(x, is_there_BL)
        out: Tensor = self.pooling(x, is_there_BL)
        return out


def create(config: Config) -> Recipe:
    """Keys: those of trireme.models.hyper_parameters for the optimizer, those of
    trireme.models.naml.news_recipe, which says what the inputs are, and

    hidden_size: width of the vectors of words, articles and users, default 256. (PaddleRec's
        network has 400, whatever its configuration says.)
    num_hidden_layers, num_attention_heads, intermediate_size: layers, default 2; heads, default 16;
        width of a hidden layer, default 256.
    hidden_dropout_prob, layer_norm_eps, initializer_range: default 0.2, 1e-12, 0.02.
    max_position_embeddings: the longest sequence, default 256.
    pooler_type: weightpooler.

    Raises BadRequest: another pooler_type, or longer texts or histories.
    """
    hyper = HyperParameters(config)
    hyper.fixed("pooler_type", "weightpooler")
    size, most = hyper.whole("hidden_size", 256), hyper.whole("max_position_embeddings", 256)

    def pooling(length: int) -> partial[Fastformer]:
        if length > most:
            raise BadRequest(
                f"hyper_parameters.max_position_embeddings: expected at least {length}, the longest"
                f" text or history, found {most}"
            )
        return partial(
            Fastformer,
            size,
            length,
            num_layers=hyper.whole("num_hidden_layers", 2),
            heads=hyper.whole("num_attention_heads", 16),
            inner=hyper.whole("intermediate_size", 256),
            dropout=hyper.share("hidden_dropout_prob", 0.2),
            eps=hyper.number("layer_norm_eps", 1e-12),
            spread=hyper.number("initializer_range", 0.02),
        )

    return news_recipe(hyper, size, pooling)
