"""The rows of a batch and their positions, from which modules compute.

Shapes: B examples, F features, D columns, K rows, N positions, M occurrences. An empty tensor
stands for an absent one.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from trireme import _core


class Lookup(NamedTuple):
    """The rows of a batch and their positions for one module, made by `trireme.nn.Planner`.

    rows: (K, D) float32, the leaf whose gradient is pushed.
    index: (N,) int32, the row of each position; -1 for padding.
    order, starts: (M,), (K + 1,) int32; row k is used at positions order[starts[k]:starts[k + 1]].
    bags: (N,) int32, the bag of each position; empty: position i is bag i.
    offsets: (F*B + 1,) int64, where each bag begins, feature-major; empty: one position per bag.
    weights: (N,) float32, factor of each position; empty: 1.
    """

    rows: Tensor
    index: Tensor  # type: ignore[assignment]  # hides tuple.index
    order: Tensor
    starts: Tensor
    bags: Tensor
    offsets: Tensor
    weights: Tensor


pytree._register_namedtuple(Lookup, serialized_type_name="trireme.nn.Lookup")
torch.serialization.add_safe_globals([Lookup])  # for torch.export.load, as in data.batch


def gather(lookup: Lookup, num_examples: int, num_features: int, pool: _core.Pool) -> Tensor:
    """The sum of each bag's rows, as `gather_rows`, for CPU tensors without gradients."""
    out_BFD = lookup.rows.new_empty(num_examples, num_features, lookup.rows.shape[1])
    _core.gather(
        as_numpy(lookup.rows.contiguous()),
        as_numpy(lookup.index),
        numpy_or_none(lookup.offsets),
        numpy_or_none(lookup.weights),
        num_features,
        out_BFD.numpy(),
        pool,
    )
    return out_BFD


def as_numpy(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The tensor's memory."""
    return tensor.detach().numpy()


def numpy_or_none(tensor: Tensor) -> np.ndarray[Any, Any] | None:
    """The tensor's memory; None for an empty tensor."""
    return None if tensor.numel() == 0 else as_numpy(tensor)
