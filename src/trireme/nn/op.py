"""The operators of the embedding modules: rows to bags, and gradients back to rows.

`trireme::gather_rows` is differentiable in `rows`; its backward is `trireme::scatter_rows`. Both
are custom operators, so torch.compile and torch.export do not trace into them.

Shapes: B examples, F features, D columns, K rows, N positions, M occurrences. An empty tensor
stands for an absent one. `_kernels` alone looks at the device: CPU tensors go to the C++ core,
others through torch operations.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trireme import _core
from trireme.accelerator import HOST
from trireme.device import SlotBags
from trireme.device.row_block import threads_of_torch
from trireme.device.torch_kernels import pool as device_pool
from trireme.device.torch_kernels import segment_sums
from trireme.nn.lookup import Lookup, as_numpy, gather, numpy_or_none


def gather_rows(
    lookup: Lookup, num_examples: int, num_features: int, pool: _core.Pool | None = None
) -> Tensor:
    """Sum the rows of each bag.

    Args:
        lookup: the rows and their positions.
        num_examples: B.
        num_features: F.
        pool: threads for the core; None: as many as torch uses, as in a compiled graph, which
            carries tensors alone.

    Returns:
        (B, F, D) float32, contiguous: out[b, f] = sum of weights[i] * rows[index[i]] over the
        positions i of bag f*B + b. An empty bag gives zeros.

    Raises:
        BadRequest: sizes or dtypes do not agree, or an offset or a row is out of range.
    """
    if torch.compiler.is_compiling():
        out: Tensor = torch.ops.trireme.gather_rows(*lookup, num_examples, num_features)
    else:
        out = _EagerGather.apply(*lookup, num_examples, num_features, pool)  # type: ignore[no-untyped-call]
    return out


@torch.library.custom_op("trireme::gather_rows", mutates_args=())
def _gather_rows(
    rows: Tensor,
    index: Tensor,
    order: Tensor,
    starts: Tensor,
    bags: Tensor,
    offsets: Tensor,
    weights: Tensor,
    num_examples: int,
    num_features: int,
) -> Tensor:
    gather, _ = _kernels(rows.device)
    lookup = Lookup(rows, index, order, starts, bags, offsets, weights)
    return gather(lookup, num_examples, num_features, threads_of_torch())


@torch.library.custom_op("trireme::scatter_rows", mutates_args=())
def _scatter_rows(
    grad: Tensor, order: Tensor, starts: Tensor, bags: Tensor, weights: Tensor, num_rows: int
) -> Tensor:
    _, scatter = _kernels(grad.device)
    return scatter(grad, order, starts, bags, weights, num_rows, threads_of_torch())


@_gather_rows.register_fake
def _(rows: Tensor, *rest: Any) -> Tensor:
    *_, num_examples, num_features = rest
    return rows.new_empty(num_examples, num_features, rows.shape[1])


@_scatter_rows.register_fake
def _(grad: Tensor, *rest: Any) -> Tensor:
    *_, num_rows = rest
    return grad.new_empty(num_rows, grad.shape[2])


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    lookup = Lookup(*inputs[:7])
    ctx.save_for_backward(lookup.order, lookup.starts, lookup.bags, lookup.weights)
    ctx.num_rows = lookup.rows.shape[0]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    rows_grad = torch.ops.trireme.scatter_rows(grad, *ctx.saved_tensors, ctx.num_rows)
    return rows_grad, *[None] * 8


_gather_rows.register_autograd(_backward, setup_context=_keep_for_backward)


class _EagerGather(torch.autograd.Function):
    """The same operation without torch's dispatcher, whose Python code takes as long as a gather of
    a few hundred examples.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        *tensors, num_examples, num_features, pool = inputs
        ctx.pool = pool or threads_of_torch()
        lookup = Lookup(*tensors)
        _keep_for_backward(ctx, inputs, lookup.rows)
        gather, _ = _kernels(lookup.rows.device)
        return gather(lookup, num_examples, num_features, ctx.pool)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _, scatter = _kernels(grads[0].device)
        order, starts, bags, weights = ctx.saved_tensors
        rows_grad = scatter(grads[0], order, starts, bags, weights, ctx.num_rows, ctx.pool)
        return rows_grad, *[None] * 9


_Gather = Callable[[Lookup, int, int, _core.Pool], Tensor]
_Scatter = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, _core.Pool], Tensor]


def _kernels(device: torch.device) -> tuple[_Gather, _Scatter]:
    if device == HOST:
        return gather, _scatter_core
    return _gather_torch, _scatter_torch


def _scatter_core(
    grad: Tensor,
    order: Tensor,
    starts: Tensor,
    bags: Tensor,
    weights: Tensor,
    num_rows: int,
    pool: _core.Pool,
) -> Tensor:
    out_KD = grad.new_empty(num_rows, grad.shape[2])
    _core.scatter(
        as_numpy(_readable(grad)),
        as_numpy(order),
        as_numpy(starts),
        numpy_or_none(bags),
        numpy_or_none(weights),
        out_KD.numpy(),
        pool,
    )
    return out_KD


def _gather_torch(lookup: Lookup, num_examples: int, num_features: int, pool: _core.Pool) -> Tensor:
    offsets = lookup.offsets if lookup.offsets.numel() > 0 else None
    weights = lookup.weights if lookup.weights.numel() > 0 else None
    return device_pool(lookup.rows, SlotBags(lookup.index, offsets, weights, num_features))


def _scatter_torch(
    grad: Tensor,
    order: Tensor,
    starts: Tensor,
    bags: Tensor,
    weights: Tensor,
    num_rows: int,
    pool: _core.Pool,
) -> Tensor:
    bag_M = bags[order] if bags.numel() > 0 else order
    values_MD = grad[bag_M % grad.shape[0], bag_M // grad.shape[0]]
    values_MD = torch.where((bag_M >= 0)[:, None], values_MD, 0.0)
    if weights.numel() > 0:
        values_MD = weights[order][:, None] * values_MD
    return segment_sums(values_MD, starts.long())


def _readable(grad: Tensor) -> Tensor:
    """`grad` if the core can read it in place: each example's (F, D) is contiguous. Else a copy."""
    example, feature, column = grad.stride()
    _, num_features, dim = grad.shape
    if column == 1 and feature == dim and example >= num_features * dim:
        return grad
    return grad.contiguous()
