"""Fleet's adam_d2sum for dense parameters, as an optimizer of torch that servers run."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trireme.errors import check_numbers


class AdamD2Sum(torch.optim.Optimizer):
    """Momentum divided by a slowly decaying root mean square, without bias correction.

    With the decays a = 0.9999 of the sums and b = 0.99 of the momentum, for a gradient g:

        n = a*n + 1;  s = a*s + g*g;  m = b*m + (1 - b)*g
        w -= lr * m * sqrt((n + eps*n) / (s + eps*n))

    n, s and m start at 0. A weight whose gradients are all 0 does not change.

    Args:
        params: as for any optimizer of torch.
        lr: >= 0. moment_decay, sum_decay: b and a, in [0, 1). eps: > 0.

    Raises:
        BadRequest: a value is out of range.

    Source: Paddle's adam_d2sum (distributed/ps/table/depends/dense.h).
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        moment_decay: float = 0.99,
        sum_decay: float = 0.9999,
        eps: float = 1e-8,
    ) -> None:
        check_numbers("AdamD2Sum", ">= 0", lr=lr)
        check_numbers("AdamD2Sum", "in [0, 1)", moment_decay=moment_decay, sum_decay=sum_decay)
        check_numbers("AdamD2Sum", "> 0", eps=eps)
        defaults = {"lr": lr, "moment_decay": moment_decay, "sum_decay": sum_decay, "eps": eps}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for weights in group["params"]:
                if weights.grad is not None:
                    _update(weights, weights.grad, self.state[weights], group)
        return loss


def _update(weights: Tensor, g: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
    if not state:
        state["n"] = torch.zeros((), dtype=torch.float32)
        state["s"], state["m"] = torch.zeros_like(weights), torch.zeros_like(weights)
    n = state["n"].mul_(group["sum_decay"]).add_(1)
    s = state["s"].mul_(group["sum_decay"]).addcmul_(g, g)
    m = state["m"].sub_(g).mul_(group["moment_decay"]).add_(g)
    eps_n = group["eps"] * n
    weights.sub_(group["lr"] * m * torch.sqrt((n + eps_n) / (s + eps_n)))
