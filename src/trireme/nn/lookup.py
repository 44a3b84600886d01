"""The lookups that embedding modules declare, and their results: rows of a batch and positions.

Shapes: B examples, F features, D columns, K rows, N positions, M occurrences. An empty tensor
stands for an absent one.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from trireme import _core
from trireme.errors import BadRequest
from trireme.table import RowClassId, Table


@dataclass(frozen=True, slots=True)
class LookupSpec:
    """One lookup of a module: the features whose bags it reads, and how it sums them.

    name: the key of the lookup in `Batch.lookups`; equal specs have equal names.
    mode: "sum", "mean" or "sqrt" of a bag (EmbeddingBag), or "none": each id separately.
    padding_key: ids equal to it (as uint64) have no row; None: every id has one.
    """

    table: Table
    features: tuple[str, ...]
    mode: str
    padding_key: int | None

    @property
    def name(self) -> str:
        return f"{self.table.name}:{self.mode}:{','.join(self.features)}"


def specs_of(modules: Iterable[nn.Module]) -> Iterator[LookupSpec]:
    """The lookups of all embedding modules within these modules."""
    for module in modules:
        for part in module.modules():
            yield from getattr(part, "lookup_specs", ())


def specs_by_class(specs: Iterable[LookupSpec]) -> dict[RowClassId, list[LookupSpec]]:
    """The distinct lookups of each row class. Raises BadRequest: two tables share a name, or
    modules disagree about the padding key of a table.
    """
    by_class: dict[RowClassId, dict[str, LookupSpec]] = {}
    tables: dict[str, Table] = {}
    for spec in specs:
        name, table = spec.table.name, spec.table.parts[0]
        if tables.setdefault(name, table) is not table:
            raise BadRequest(
                f"Planner: expected one Table named {name!r}, found two; share the object"
            )
        of_class = by_class.setdefault(spec.table.class_id, {})
        first = next(iter(of_class.values()), spec)
        if spec.padding_key != first.padding_key:
            raise BadRequest(
                f"Planner: expected one padding_key for all modules on table {name!r}, "
                f"found {first.padding_key} and {spec.padding_key}"
            )
        of_class.setdefault(spec.name, spec)
    return {class_id: list(of_class.values()) for class_id, of_class in by_class.items()}


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
