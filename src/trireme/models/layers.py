"""Layers that the models share: perceptrons, products of vectors, attention, cross layers.

Shapes: B examples, N vectors or events, D floats each, W inputs of a cross layer, E experts, H
heads of an attention, C combinations of vectors.
"""

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trireme.errors import BadRequest
from trireme.models.columns import examples_of


def mlp(
    sizes: Sequence[int],
    *,
    gain: float = 1.0,
    activation: type[nn.Module] = nn.ReLU,
    activates_last: bool = False,
    dropouts: Sequence[float] = (),
) -> nn.Sequential:
    """Linear layers of these widths with an activation between them, weights
    Normal(gain / sqrt(fan_in)), biases 0. activates_last: there is one behind the last, too.
    dropouts: one behind each activation, if there are any.
    """
    layers: list[nn.Module] = []
    for i, (fan_in, fan_out) in enumerate(itertools.pairwise(sizes)):
        linear = nn.Linear(fan_in, fan_out)
        nn.init.normal_(linear.weight, std=gain / math.sqrt(fan_in))
        nn.init.zeros_(linear.bias)
        layers.append(linear)
        if activates_last or i < len(sizes) - 2:
            layers.append(activation())
            layers += [nn.Dropout(dropouts[i])] if dropouts else []
    return nn.Sequential(*layers)


def text_convolution(width: int, channels: int, window: int, *, length: int) -> nn.Conv1d:
    """A convolution over `window` words at once of a text of `length`: (B, W, L) -> (B, channels,
    L - window + 1).

    Raises BadRequest: the text is shorter than the window.
    """
    if length < window:
        raise BadRequest(
            f"text_convolution: expected texts of at least {window} words, the convolution's"
            f" window, found length {length}"
        )
    return nn.Conv1d(width, channels, window)


def check_heads(subject: str, width: int, heads: int) -> None:
    """Raises BadRequest: heads of one width do not make up this width."""
    if width % heads:
        raise BadRequest(
            f"{subject}: expected a width that is a multiple of {heads} heads, found {width}"
        )


class BatchNorm(nn.BatchNorm1d):
    """Batch normalization of (B, N). A single example, as a last batch may be, has no statistics:
    it is normalized by those of the batches before.
    """

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or len(input) > 1:
            return super().forward(input)
        known = (self.running_mean, self.running_var, self.weight, self.bias)
        return nn.functional.batch_norm(input, *known, training=False, eps=self.eps)


def normalized_mlp(sizes: Sequence[int], *, dropout: float = 0.0) -> nn.Sequential:
    """As `mlp`, with batch normalization before each ReLU and dropout behind it."""
    layers: list[nn.Module] = []
    for pair in itertools.pairwise(sizes[:-1]):
        layers += [mlp(pair), BatchNorm(pair[1]), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, mlp(sizes[-2:]))


def sum_of_products(vectors_BND: Tensor) -> Tensor:
    """(B,): the sum of the dot products of all pairs of vectors, in time linear in N.

    sum over i<j of <v_i, v_j> = sum over d of ((sum_i v_id)^2 - sum_i v_id^2) / 2
    (Rendle, "Factorization Machines", ICDM 2010).
    """
    total_BD = vectors_BND.sum(1)
    return (total_BD.square() - vectors_BND.square().sum(1)).sum(1) / 2


def pairwise_products(vectors_BND: Tensor) -> Tensor:
    """(B, N (N - 1) / 2): the dot product of each pair of vectors."""
    num = vectors_BND.shape[1]
    first, second = torch.tril_indices(num, num, offset=-1, device=vectors_BND.device)
    products_BNN = vectors_BND @ vectors_BND.transpose(1, 2)
    return products_BNN[:, first, second]


def compared(a: Tensor, b: Tensor) -> Tensor:
    """(..., 4 D): two vectors, their difference and their product."""
    return torch.cat([a, b, a - b, a * b], -1)


class TargetAttention(nn.Module):
    """The sum of the events of a history, each weighted by its relevance to the candidate.

    Relevance is an MLP of (candidate, event, candidate - event, candidate * event), not normalized,
    as in the paper: the size of the sum is how strongly the history speaks for the candidate. An
    event whose vector is zero, such as padding, adds nothing; an empty history gives zeros.

    The paper's activation unit has the outer product of candidate and event; difference and product
    are those of the authors' code.

    Source: Zhou et al., "Deep Interest Network for Click-Through Rate Prediction", KDD 2018.

    dim: D. layers: widths of the hidden layers, with `activation` between them.
    """

    def __init__(
        self, dim: int, *, layers: Sequence[int], activation: type[nn.Module] = nn.Sigmoid
    ) -> None:
        super().__init__()
        self.relevance = mlp([4 * dim, *layers, 1], activation=activation)

    def forward(self, candidate_BD: Tensor, events_ND: Tensor, offsets_B1: Tensor) -> Tensor:
        """(B, D) sums.

        Args:
            offsets_B1: the history of example b is the rows from offsets[b] - offsets[0] to before
                offsets[b + 1] - offsets[0].
        """
        examples_N = examples_of(offsets_B1, events_ND.shape[0])
        candidate_ND = candidate_BD[examples_N]
        relevance_N1 = self.relevance(compared(candidate_ND, events_ND))
        return torch.zeros_like(candidate_BD).index_add(0, examples_N, relevance_N1 * events_ND)


class SelfAttention(nn.Module):
    """Attention of each of N vectors to all of them, by several heads: (B, N, D) -> (B, N, size).

    relu(heads side by side + R x), where a head is softmax(Q x (K x)^T) V x. There are no biases.
    rectified: whether there is a ReLU.

    Args:
        dim: D. size: width of all heads together, a multiple of `heads`.
        residual: whether there is R x.
        scaled: whether products are divided by the square root of the width of a head.

    Raises BadRequest: the size is no multiple of `heads`.

    Source: Song et al., "AutoInt: Automatic Feature Interaction Learning via Self-Attentive Neural
    Networks", CIKM 2019.
    """

    def __init__(
        self,
        dim: int,
        size: int,
        *,
        heads: int,
        residual: bool = True,
        scaled: bool = True,
        rectified: bool = True,
    ) -> None:
        super().__init__()
        check_heads("SelfAttention", size, heads)
        self.heads, self.rectified = heads, rectified
        self.scale = (heads / size) ** 0.5 if scaled else 1.0
        self.queries_keys_values = nn.Linear(dim, 3 * size, bias=False)
        self.residual = nn.Linear(dim, size, bias=False) if residual else None
        for linear in (self.queries_keys_values, *([self.residual] if self.residual else [])):
            nn.init.normal_(linear.weight, std=1 / math.sqrt(dim))

    def forward(self, x_BND: Tensor) -> Tensor:
        parts_BHN3 = self.queries_keys_values(x_BND).unflatten(2, (self.heads, -1)).transpose(1, 2)
        queries, keys, values = parts_BHN3.chunk(3, 3)
        shares_BHNN = torch.softmax(queries @ keys.transpose(2, 3) * self.scale, 3)
        out = (shares_BHNN @ values).transpose(1, 2).flatten(2)
        out = out if self.residual is None else out + self.residual(x_BND)
        return torch.relu(out) if self.rectified else out


class TransformerLayer(nn.Module):
    """Attention of each place to all that are there, and a hidden layer: (B, L, W) -> (B, L, W).

    Each of the two is added to its input, and normalized. activation: of the hidden layer. Where no
    place of an example is there, all are looked at: kernels differ in what attention to none is.

    Raises BadRequest: W is no multiple of `heads`.
    """

    def __init__(
        self,
        width: int,
        *,
        heads: int,
        inner: int,
        dropout: float,
        activation: type[nn.Module] = nn.LeakyReLU,
    ) -> None:
        super().__init__()
        check_heads("TransformerLayer", width, heads)
        self.heads = heads
        self.queries_keys_values, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.hidden = mlp([width, inner, width], activation=activation)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, is_there_BL: Tensor) -> Tensor:
        split = self.queries_keys_values(x).unflatten(2, (self.heads, -1)).transpose(1, 2)
        queries, keys, values = split.chunk(3, 3)
        looked_at_BL = is_there_BL | ~is_there_BL.any(1, keepdim=True)
        attended = nn.functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=looked_at_BL[:, None, None]
        )
        x = self.norms[0](x + self.dropout(self.join(attended.transpose(1, 2).flatten(2))))
        out: Tensor = self.norms[1](x + self.dropout(self.hidden(x)))
        return out


class CompressedInteraction(nn.Module):
    """The CIN of xDeepFM: layer k makes C_k vectors of the products of those of layer k - 1 with
    the N inputs, component by component: (B, N, D) -> (B, sum of C_k), sums of the vectors.

    x_k[c] = sum over i, j of W_k[c, i, j] * x_(k-1)[i] * x_0[j]

    sizes: the C_k.

    Source: Lian et al., "xDeepFM: Combining Explicit and Implicit Feature Interactions for
    Recommender Systems", KDD 2018.
    """

    def __init__(self, num_vectors: int, sizes: Sequence[int]) -> None:
        super().__init__()
        widths = [num_vectors * before for before in (num_vectors, *sizes[:-1])]
        self.weights = nn.ParameterList(
            torch.randn(size, width) / math.sqrt(width)
            for size, width in zip(sizes, widths, strict=True)
        )

    def forward(self, vectors_BND: Tensor) -> Tensor:
        x0_BDN = x_BDC = vectors_BND.transpose(1, 2)
        sums = []
        for weight in self.weights:
            products_BDCN = x_BDC[:, :, :, None] * x0_BDN[:, :, None]
            x_BDC = products_BDCN.flatten(2) @ weight.T
            sums.append(x_BDC.sum(1))
        return torch.cat(sums, 1)


class VectorCrossLayer(nn.Module):
    """x0 * <w, x> + b + x: (B, W) -> (B, W).

    Source: Wang et al., "Deep & Cross Network for Ad Click Predictions", ADKDD 2017.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width) / math.sqrt(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        return x0 * (x @ self.weight)[:, None] + self.bias + x


class CrossLayer(nn.Module):
    """x0 * (W x + b) + x, with a full matrix W, or with W = U V of a lower rank: (B, W) -> (B, W).

    rank: R of U (W, R) and V (R, W); None for a full matrix.

    Source: Wang et al., "DCN V2: Improved Deep & Cross Network and Practical Lessons for Web-scale
    Learning to Rank Systems", WWW 2021.
    """

    def __init__(self, width: int, rank: int | None = None) -> None:
        super().__init__()
        self.down = None if rank is None else nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(width if rank is None else rank, width)
        for linear in (self.up, *([] if self.down is None else [self.down])):
            nn.init.normal_(linear.weight, std=1 / math.sqrt(linear.in_features))
        nn.init.zeros_(self.up.bias)

    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        inner = x if self.down is None else self.down(x)
        crossed: Tensor = x0 * self.up(inner)
        return crossed + x


class CrossMixture(nn.Module):
    """A mixture of low-rank cross layers: (B, W) -> (B, W).

    x + sum over experts of softmax(G x)_e * x0 * (U_e tanh(C_e tanh(V_e x)) + b) (eq. 5 of DCN V2).

    The matrices of an expert are U (W, R), C (R, R) and V (R, W).
    """

    def __init__(self, width: int, rank: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.v_EWR = nn.Parameter(torch.randn(experts, width, rank) / math.sqrt(width))
        self.c_ERR = nn.Parameter(torch.randn(experts, rank, rank) / math.sqrt(rank))
        self.u_ERW = nn.Parameter(torch.randn(experts, rank, width) / math.sqrt(rank))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        inner_EBR = torch.tanh(torch.tanh(x @ self.v_EWR) @ self.c_ERR)
        experts_EBW = inner_EBR @ self.u_ERW + self.bias
        shares_BE = torch.softmax(self.gate(x), 1)
        return x + x0 * torch.einsum("be,ebw->bw", shares_BE, experts_EBW)
