"""The cross layers of DCNv2: each multiplies its input with the input of the network.

Source: Wang et al., "DCN V2: Improved Deep & Cross Network and Practical Lessons for Web-scale
Learning to Rank Systems", WWW 2021. Shapes: B examples, W numbers each, R the rank, E experts.
"""

import math

import torch
from torch import Tensor, nn


class CrossLayer(nn.Module):
    """x0 * (W x + b) + x, with a full matrix W, or with W = U V of a lower rank: (B, W) -> (B, W).

    rank: R of U (W, R) and V (R, W); None for a full matrix.
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

    x + sum over experts of softmax(G x)_e * x0 * (U_e tanh(C_e tanh(V_e x)) + b) (eq. 5).

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
