"""Normalization by statistics of all data seen so far: Paddle's data_norm."""

import torch
from torch import Tensor, nn

from trireme.errors import BadRequest, check_counts, check_numbers


class DataNorm(nn.Module):
    """(x - mean) * scale by column, where mean = sum / size and scale = sqrt(size / square_sum).

    The sums run over all batches, unlike those of BatchNorm, and are constants for the gradient.
    After a batch of B examples in training, with d = `decay`:

        size = size * d + B
        sum = sum * d + sum of x
        square_sum = square_sum * d + sum of (x - mean)^2 + B * eps     # mean: before the batch

    The sums are float64 buffers. As with BatchNorm, each worker has its own, over its own data, and
    checkpoints hold those of worker 0. (In Paddle servers add up those of all workers.)

    Args:
        num_features: D.
        eps: keeps the scale of a constant column finite.
        decay: of the sums per batch; Paddle's servers have 0.999999.
        size, total, square_total: initial values of the sums.

    Source: Paddle's data_norm operator and its `summary` rule.
    """

    size: Tensor
    total: Tensor
    square_total: Tensor

    def __init__(
        self,
        num_features: int,
        *,
        eps: float = 1e-5,
        decay: float = 0.999999,
        size: float = 1e4,
        total: float = 0.0,
        square_total: float = 1e4,
    ) -> None:
        super().__init__()
        check_counts("DataNorm", num_features=num_features)
        check_numbers("DataNorm", ">= 0", eps=eps)
        check_numbers("DataNorm", "in (0, 1]", decay=decay)
        check_numbers("DataNorm", "> 0", size=size, square_total=square_total)
        self.num_features, self.eps, self.decay = num_features, eps, decay
        for name, value in (("size", size), ("total", total), ("square_total", square_total)):
            self.register_buffer(name, torch.full((num_features,), value, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, D) floating point; returns the same. Raises BadRequest for another shape. 16-bit
        values, as of an autocast, are normalized in float32.
        """
        if x.dim() != 2 or x.shape[1] != self.num_features:
            raise BadRequest(f"DataNorm: expected (B, {self.num_features}), found {tuple(x.shape)}")
        mean = self.total / self.size
        scale = torch.sqrt(self.size / self.square_total)
        wide = torch.promote_types(x.dtype, torch.float32)
        out = ((x - mean.to(wide)) * scale.to(wide)).to(x.dtype)
        if self.training:
            self._add(x.detach().to(self.total.dtype), mean)
        return out

    @torch.no_grad()
    def _add(self, x: Tensor, mean: Tensor) -> None:
        self.size.mul_(self.decay).add_(len(x))
        self.total.mul_(self.decay).add_(x.sum(0))
        self.square_total.mul_(self.decay).add_(((x - mean) ** 2).sum(0) + len(x) * self.eps)

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}, decay={self.decay}"
