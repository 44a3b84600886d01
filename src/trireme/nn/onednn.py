"""float32 products of dense layers by oneDNN.

torch multiplies float32 matrices by MKL, which uses AVX-512 on Intel's CPUs only. oneDNN, which is
part of torch for other types and for compiled graphs, uses it on any.
"""

from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from trireme.errors import BadRequest

_M = TypeVar("_M", bound=nn.Module)

# oneDNN arranges both matrices anew for each product, which small ones do not win back.
_PRODUCTS_MIN = 1 << 21


def use_onednn(model: _M) -> _M:
    """Let oneDNN compute the products of every `torch.nn.Linear` of a model, in training and
    inference; returns the model, which is changed in place. Parameters, hooks and the names of its
    state stay as they are, so checkpoints do, too.

    It computes in float32 as before, in another order of additions: the last bits differ from
    those of MKL. Not by oneDNN, but as before, are: layers on a GPU and inputs of other types, also
    under autocast; small products, of fewer than 2**21 multiplications; graphs that torch compiles
    or exports; subclasses of `torch.nn.Linear`. Gradients of gradients, and torch.func, raise
    torch's RuntimeError.

    Worth it on CPUs of AMD with AVX-512, as `trireme doctor` shows them (docs/optimizers.md).

    Raises:
        BadRequest: this torch has no oneDNN; the model has no `torch.nn.Linear`.
    """
    check_onednn()
    linears = [module for module in model.modules() if type(module) in (nn.Linear, OnednnLinear)]
    if not linears:
        raise BadRequest(
            f"use_onednn: expected a model with layers torch.nn.Linear, found none in"
            f" {type(model).__name__}"
        )
    for linear in linears:
        linear.__class__ = OnednnLinear
    return model


def check_onednn() -> None:
    """Raises BadRequest: this torch has no oneDNN."""
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        raise BadRequest(
            f"use_onednn: expected a torch with oneDNN for this CPU, found {torch.__version__}"
        )


class OnednnLinear(nn.Linear):
    """`torch.nn.Linear` after `use_onednn`."""

    def forward(self, input: Tensor) -> Tensor:
        # A graph would keep what linear() does for this shape.
        if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            return super().forward(input)
        return linear(input, self.weight, self.bias)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`, by oneDNN if that is worth it."""
    out_features, in_features = weight.shape if weight.dim() == 2 else (0, 0)
    if (
        torch.is_autocast_enabled("cpu")
        or not all(map(_is_plain, (input, weight)))
        or input.numel() * out_features < _PRODUCTS_MIN
        or input.shape[-1] != in_features  # whose error is torch's
    ):
        return nn.functional.linear(input, weight, bias)
    rows = input.reshape(-1, in_features)
    if num_missing := -len(rows) % _rows_step(len(rows)):
        rows = nn.functional.pad(rows, (0, 0, 0, num_missing))
    output: Tensor = _Linear.apply(rows, weight, bias)  # type: ignore[no-untyped-call]
    if num_missing:
        output = output[:-num_missing]
    return output.view(*input.shape[:-1], out_features)


def _is_plain(tensor: Tensor) -> bool:
    is_dense = tensor.layout == torch.strided
    return tensor.dtype == torch.float32 and tensor.device.type == "cpu" and is_dense


def _rows_step(num_rows: int) -> int:
    """Inputs get zero rows up to a multiple of this, at most an eighth of what they have, or 15:
    oneDNN compiles each product for its shape, in milliseconds, and keeps it, in a megabyte.
    """
    return 1 << max(num_rows.bit_length() - 4, 4)


class _Linear(torch.autograd.Function):
    """x (M, K), weight (N, K), bias (N,) or None -> (M, N)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x.contiguous(), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        gradient = gradient.contiguous()  # the gradient of a sum has strides of 0
        return (
            _product(gradient, weight.t(), None) if needs_x else None,
            _product(gradient.t(), x.contiguous().t(), None) if needs_weight else None,
            gradient.sum(0) if needs_bias else None,
        )


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x (M, K), weight (N, K): x weight' + bias."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product
