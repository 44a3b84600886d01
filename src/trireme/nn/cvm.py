"""Show and click counts as features: Paddle's continuous_value_model."""

from typing import Any

import torch
from torch import Tensor, nn

from trireme.errors import BadRequest


class CVM(nn.Module):
    """Replaces the first two columns of an embedding, its shows and clicks, by logarithms.

    With use_cvm the columns become log(show + 1) and log(click + 1) - log(show + 1), the logarithm
    of the smoothed click rate. Without it they are dropped.

    Rows of a table whose policy pulls statistics (as CtrCommonAccessor) begin with these columns.
    Their shows and clicks come from the columns of the batch that the policy names. The gradient of
    the two columns never reaches a table.

    If `show_click` is given, it is the gradient of the two columns, as in Paddle, which sends
    counts to the rows in this way. Otherwise that gradient is 0.

    Source: Paddle's cvm operator (formula and gradient).
    """

    def __init__(self, use_cvm: bool = True) -> None:
        super().__init__()
        self.use_cvm = bool(use_cvm)

    def forward(self, values: Tensor, show_click: Tensor | None = None) -> Tensor:
        """
        Args:
            values: (B, D) or (B, F, D) with D >= 2, shows and clicks in columns 0 and 1, both > -1.
            show_click: (B, 2) shows and clicks of the examples, or None.

        Returns:
            The shape of values with use_cvm, D - 2 columns without.

        Raises:
            BadRequest: shapes that do not fit.
        """
        if show_click is None:
            show_click = values.new_zeros(values.shape[0], 2)
        is_right = values.dim() in (2, 3) and values.shape[-1] >= 2
        if not is_right or show_click.shape != (values.shape[0], 2):
            raise BadRequest(
                "CVM: expected values of shape (B, D) or (B, F, D) with D >= 2 and show_click of"
                f" shape (B, 2), found {tuple(values.shape)} and {tuple(show_click.shape)}"
            )
        out: Tensor = _CVMFunction.apply(values, show_click, self.use_cvm)  # type: ignore[no-untyped-call]
        return out

    def extra_repr(self) -> str:
        return f"use_cvm={self.use_cvm}"


class _CVMFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, show_click: Tensor, use_cvm: bool) -> Tensor:
        ctx.save_for_backward(show_click)
        ctx.use_cvm, ctx.num_dims = use_cvm, values.dim()
        if not use_cvm:
            return values[..., 2:].clone()
        wide = torch.promote_types(values.dtype, torch.float32)  # a difference of 16 bits is noise
        shows = torch.log(values[..., :1].to(wide) + 1)
        rates = torch.log(values[..., 1:2].to(wide) + 1) - shows
        counts = torch.cat([shows, rates], -1).to(values.dtype)
        return torch.cat([counts, values[..., 2:]], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        [grad], [counts] = grads, ctx.saved_tensors
        rest = grad[..., 2:] if ctx.use_cvm else grad
        if ctx.num_dims == 3:
            counts = counts[:, None, :]
        counts = counts.to(rest.dtype).expand(*rest.shape[:-1], 2)
        return torch.cat([counts, rest], -1), None, None
