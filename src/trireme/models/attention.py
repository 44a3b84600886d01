"""Attention of a candidate over a ragged history.

Shapes: B examples, N events in all their histories together, D floats each.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trireme.models.mlp import mlp


class TargetAttention(nn.Module):
    """The sum of the events of a history, each weighted by its relevance to the candidate.

    Relevance is an MLP of (candidate, event, candidate - event, candidate * event), not normalized,
    as in the paper: the size of the sum is how strongly the history speaks for the candidate. An
    event whose vector is zero, such as padding, adds nothing; an empty history gives zeros.

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
        positions_N = torch.arange(events_ND.shape[0], device=events_ND.device) + offsets_B1[0]
        examples_N = torch.searchsorted(offsets_B1, positions_N, right=True) - 1
        candidate_ND = candidate_BD[examples_N]
        pairs = [candidate_ND, events_ND, candidate_ND - events_ND, candidate_ND * events_ND]
        relevance_N1 = self.relevance(torch.cat(pairs, 1))
        return torch.zeros_like(candidate_BD).index_add(0, examples_N, relevance_N1 * events_ND)
