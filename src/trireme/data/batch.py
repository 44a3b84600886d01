"""A batch: named columns of one group of examples, and the bags of its sparse features.

Shapes: B examples, F features, N ids, B1 = B + 1. Keys are int64 tensors that carry uint64 bits.

All bags of a batch lie in one `Bags`, feature-major: first the B bags of the first feature, then
those of the second. A module that reads many features then works on slices, not on copies.

`Batch` reads like a mapping of columns but is deliberately not a `collections.abc.Mapping`:
torch's DataLoader rebuilds mappings from their items, which would drop `bags`, `stream` and
`position`. As it is, a Batch passes through a DataLoader and between its processes unchanged.

Threads: a batch belongs to one thread at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from trireme import _core
from trireme.errors import BadRequest


class Ragged(NamedTuple):
    """The bags of one feature: bag b is values[offsets[b]:offsets[b + 1]].

    values: (N,) int64 keys, or any other tensor of one dimension.
    offsets: (B1,) int64 positions in `values`, not decreasing; offsets[0] need not be 0.
    weights: (N,) float32 weight of each value, or None for 1.
    """

    values: Tensor
    offsets: Tensor
    weights: Tensor | None = None

    def cut(self, begin: int, end: int) -> Ragged:
        """The bags begin to end with their values alone, which are views; offsets from 0."""
        offsets = self.offsets[begin : end + 1]
        first, last = offsets[[0, -1]].tolist()
        weights = None if self.weights is None else self.weights[first:last]
        return Ragged(self.values[first:last], offsets - first, weights)


class Strings(NamedTuple):
    """A string per example: that of example b is data[offsets[b]:offsets[b + 1]] in UTF-8.

    data: (N,) uint8.
    offsets: (B1,) int64 positions in `data`, not decreasing.
    """

    data: Tensor
    offsets: Tensor

    @classmethod
    def encode(cls, texts: Sequence[str]) -> Strings:
        encoded = [text.encode() for text in texts]
        offsets = torch.zeros(len(texts) + 1, dtype=torch.int64)
        sizes = torch.tensor([len(text) for text in encoded], dtype=torch.int64)
        torch.cumsum(sizes, 0, out=offsets[1:])
        data = np.frombuffer(bytearray(b"".join(encoded)), np.uint8)  # torch refuses an empty one
        return cls(torch.from_numpy(data), offsets)

    def decode(self) -> list[str]:
        """The B strings; bytes that are not UTF-8 as backslash escapes."""
        begin, end = int(self.offsets[0]), int(self.offsets[-1])  # of a slice: its part of the data
        data, ends = self.data[begin:end].numpy().tobytes(), (self.offsets - begin).tolist()
        strings = (data[begin:end] for begin, end in itertools.pairwise(ends))
        return [string.decode("utf-8", "backslashreplace") for string in strings]


def _shown_bags(bags: Ragged, *, has_strings: bool) -> str:
    if has_strings:
        return "strings (pandas.to_numeric names one that is no number)"
    missing = " (of numbers, a missing one: fillna, or drop its row)"
    sizes = enumerate(bags.offsets.diff().tolist())
    others = (f", {n} in row {row}" + ("" if n else missing) for row, n in sizes if n != 1)
    return "bags of ids" + next(others, "")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


@dataclass(eq=False)
class Bags:
    """The bags of F features of one batch, feature-major.

    names: the F features in order.
    values: (N,) int64 keys.
    offsets: (F*B + 1,) int64; bag b of feature f is values[offsets[f*B + b]:offsets[f*B + b + 1]].
    weights: (N,) float32 weight of each value, or None for 1.
    """

    names: tuple[str, ...]
    values: Tensor
    offsets: Tensor
    weights: Tensor | None = None

    @property
    def num_examples(self) -> int:
        """B."""
        return (self.offsets.shape[0] - 1) // len(self.names) if self.names else 0

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __getitem__(self, name: str) -> Ragged:
        """The bags of one feature alone: values and weights as views, offsets from 0. Raises
        KeyError for an unknown name.
        """
        if name not in self.names:
            raise KeyError(f"Bags: no feature {name!r}; there are {', '.join(self.names)}")
        first = self.names.index(name) * self.num_examples
        bags = Ragged(self.values, self.offsets, self.weights)
        return bags.cut(first, first + self.num_examples)


def check_stream(dataset: str, index: int, num_streams: int, epoch: int = 0) -> None:
    """Raise BadRequest for a stream or an epoch that does not exist."""
    if not 0 <= index < num_streams or epoch < 0:
        raise BadRequest(
            f"{dataset}.stream: expected 0 <= index < num_streams and epoch >= 0, "
            f"found {index}, {num_streams} and {epoch}"
        )


Column: TypeAlias = Tensor | Ragged | Strings


@dataclass(eq=False)
class Batch:
    """Columns of B examples; `batch[name]` gives a dense column or the bags of a sparse feature.

    columns: name -> tensor whose first dimension is B (labels, weights, dense features), strings,
        or bags of a single feature, if a source yields them so.
    bags: the sparse features together, or None when there are none.
    lookups: filled when the batch is planned: name of a use of an embedding module -> its lookup;
        or, in an exported model, the tensor that the module returns.
    pool: threads for what modules compute from the lookups, from the plan.
    hashed: sparse feature -> whether its keys are hashes of strings; absent: nobody knows.
    stream: the stream that this batch belongs to.
    position: a few numbers from which the same source continues with the next batch of the stream;
        empty if the source has no positions.
    epoch: the number of the pass over the data, where `prepare` of a Recipe gets the batch.

    In a pytree (torch.export, torch.compile, tree_map) the tensors are leaves and the names are
    structure; `pool`, `stream`, `position`, `epoch` and `hashed` are left out.
    """

    columns: dict[str, Column]
    bags: Bags | None = None
    lookups: dict[str, Any] = field(default_factory=dict)
    stream: int = 0
    position: tuple[int, ...] = ()
    pool: _core.Pool | None = None
    hashed: Mapping[str, bool] = field(default_factory=dict)
    epoch: int = 0

    def __getstate__(self) -> dict[str, Any]:
        """Threads stay in the process."""
        return {**self.__dict__, "pool": None}

    @property
    def num_examples(self) -> int:
        """B, 0 for a batch without any column."""
        for column in self.columns.values():
            return column.shape[0] if isinstance(column, Tensor) else column.offsets.shape[0] - 1
        return 0 if self.bags is None else self.bags.num_examples

    def __getitem__(self, name: str) -> Column:
        """The column or the bags of that name. Raises KeyError, which lists the names."""
        if name in self.columns:
            return self.columns[name]
        if self.bags is not None and name in self.bags.names:
            return self.bags[name]
        raise KeyError(f"Batch: no column {name!r}; there are {', '.join(self.keys())}")

    def get(self, name: str, default: Any = None) -> Any:
        """Like `batch[name]`, but `default` for an unknown name."""
        try:
            return self[name]
        except KeyError:
            return default

    def keys(self) -> tuple[str, ...]:
        """Names of the columns, then of the sparse features."""
        return (*self.columns, *(() if self.bags is None else self.bags.names))

    def has_strings(self, name: str) -> bool | None:
        """Whether the values of a feature are strings, or were before they were hashed; None: it is
        absent, or nobody knows.
        """
        column = self.columns.get(name)
        if isinstance(column, (Tensor, Strings)):
            return isinstance(column, Strings)
        return self.hashed.get(name)

    def has_values(self, name: str) -> bool:
        """Whether any example has a value of a column; missing and empty ones are none."""
        column = self.get(name)
        if isinstance(column, (Ragged, Strings)):
            return bool(column.offsets[0] < column.offsets[-1])
        return isinstance(column, Tensor) and column.numel() > 0

    def shown_without_numbers(self, name: str) -> str:
        """What an error says of a column that should have numbers."""
        column = self[name]
        if isinstance(column, Tensor):
            return f"{column.dtype} of shape {tuple(column.shape)}"
        if isinstance(column, Ragged):
            return _shown_bags(column, has_strings=bool(self.hashed.get(name)))
        texts = column.decode()
        row = next((row for row, text in enumerate(texts) if not _is_number(text)), 0)
        if texts and not any(texts):  # None alone, which Arrow takes for strings too
            return "no values, or empty strings"
        return f"strings, {texts[row]!r} in row {row}" if texts else "strings"

    def items(self) -> Iterator[tuple[str, Column]]:
        return ((name, self[name]) for name in self.keys())

    def __contains__(self, name: object) -> bool:
        return name in self.columns or (self.bags is not None and name in self.bags.names)

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        """Number of columns and features (not of examples)."""
        return len(self.keys())

    def pin_memory(self) -> Batch:
        """A copy in page-locked memory; DataLoader(pin_memory=True) calls this."""
        return self._map(lambda tensor: tensor.pin_memory())

    def _map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        tensors, spec = pytree.tree_flatten(self)
        mapped: Batch = pytree.tree_unflatten(
            [function(t) if isinstance(t, Tensor) else t for t in tensors], spec
        )
        mapped.stream, mapped.position = self.stream, self.position
        mapped.epoch, mapped.hashed = self.epoch, self.hashed
        return mapped

    def __repr__(self) -> str:
        return (
            f"Batch(num_examples={self.num_examples}, columns={list(self.keys())}, "
            f"stream={self.stream}, position={self.position})"
        )


def _register(
    cls: type, parts: tuple[str, ...], context_of: Callable[[Any], Any], build: Any
) -> None:
    """Make a class a node of pytrees. build: (parts, context) -> an object of the class."""

    def flatten(value: Any) -> tuple[list[Any], Any]:
        return [getattr(value, part) for part in parts], context_of(value)

    def flatten_with_keys(value: Any) -> tuple[list[tuple[pytree.KeyEntry, Any]], Any]:
        values, context = flatten(value)
        keys = map(pytree.GetAttrKey, parts)
        return list(zip(keys, values, strict=True)), context

    pytree.register_pytree_node(
        cls,
        flatten,
        build,
        serialized_type_name=f"trireme.data.{cls.__name__}",
        flatten_with_keys_fn=flatten_with_keys,
        to_dumpable_context=lambda context: context,
        from_dumpable_context=lambda context: context,
    )


_register(
    Bags,
    ("values", "offsets", "weights"),
    lambda bags: list(bags.names),
    lambda tensors, names: Bags(tuple(names), *tensors),
)
_register(Batch, ("columns", "bags", "lookups"), lambda _: None, lambda parts, _: Batch(*parts))
pytree._register_namedtuple(Ragged, serialized_type_name="trireme.data.Ragged")
pytree._register_namedtuple(Strings, serialized_type_name="trireme.data.Strings")

# An exported program keeps its example inputs: torch.export.load then reads them without pickle.
torch.serialization.add_safe_globals([Bags, Batch, Ragged, Strings])
