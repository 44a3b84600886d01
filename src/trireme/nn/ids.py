"""The ids of several features of a batch, as one array for a fused lookup.

Shapes: B examples, F features, N ids. Bags are feature-major, as in `trireme.data.Bags`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trireme import _core
from trireme.data.batch import Batch, Ragged, Strings
from trireme.data.user_columns import as_column, column_of
from trireme.errors import BadRequest
from trireme.rows.feature_keys import salt_of, text_keys
from trireme.table import Table

Columns = Batch | Mapping[str, Tensor | Ragged | Strings]


@dataclass(frozen=True, slots=True, eq=False)
class Ids:
    """The ids of the bags of `features`, or other values, one per id.

    values: (N,) keys or rows.
    offsets: (F*B + 1,) int64, from 0 to N, where each bag begins; None: one value per bag.
    weights: (N,) float32, or None for 1.
    """

    features: tuple[str, ...]
    num_examples: int
    values: np.ndarray[Any, Any]
    offsets: np.ndarray[Any, Any] | None
    weights: np.ndarray[Any, Any] | None

    def select(self, features: tuple[str, ...]) -> Ids:
        """The ids of some of the features: views if they are adjacent in this order."""
        if features == self.features:
            return self
        first = self.features.index(features[0])
        if self.features[first : first + len(features)] == features:
            return self._slice(first, features)
        return _concatenate([self._slice(self.features.index(name), (name,)) for name in features])

    def with_values(self, values: np.ndarray[Any, Any]) -> Ids:
        """The same bags with other values."""
        return Ids(self.features, self.num_examples, values, self.offsets, self.weights)

    def bounds(self) -> np.ndarray[Any, Any]:
        """(F*B + 1,) int64: `offsets`, also if each bag has one value."""
        if self.offsets is None:
            return np.arange(len(self.values) + 1)
        return self.offsets

    def _slice(self, first: int, features: tuple[str, ...]) -> Ids:
        begin, end = first * self.num_examples, (first + len(features)) * self.num_examples
        offsets, weights = self.offsets, self.weights
        if offsets is not None:
            offsets = offsets[begin : end + 1]
            begin, end = int(offsets[0]), int(offsets[-1])
            offsets = offsets if begin == 0 else offsets - begin
        return Ids(
            features,
            self.num_examples,
            self.values[begin:end],
            offsets,
            None if weights is None else weights[begin:end],
        )


def read_ids(batch: Columns, features: tuple[str, ...], reader: str) -> Ids:
    """The ids of `features` in `batch`; without a copy if they are adjacent in its bags.

    Args:
        batch: a Batch, or a mapping of name -> (B,) or (B, L) tensor of whole numbers, Ragged, or
            Strings, whose keys are their hashes (trireme.data.strings).
        features: distinct names, in the order of the result.
        reader: the caller, which begins the error messages.

    Returns:
        int64 ids; `offsets` is None if every bag has exactly one id.

    Raises:
        BadRequest: a feature is missing or has another form, or the features differ in their number
            of examples; the message names the feature.
    """
    bags = batch.bags if isinstance(batch, Batch) else None
    if bags is not None and set(features) <= set(bags.names):
        bags_of_all = Ragged(bags.values, bags.offsets, bags.weights)
        ids = _of_ragged(bags_of_all, bags.names, reader).select(features)
    else:
        parts = [_of_column(batch, name, reader) for name in features]
        _expect_equal_batch(parts, reader)
        ids = _concatenate(parts)
    if ids.offsets is None:
        return ids
    if _core.is_one_per_bag(ids.offsets):
        return Ids(ids.features, ids.num_examples, ids.values, None, ids.weights)
    _expect_rising_offsets(ids, ids.offsets, reader)
    return ids


def _of_column(batch: Columns, name: str, reader: str) -> Ids:
    if name not in batch:
        raise BadRequest(
            f"{reader}: expected feature {name!r} in the batch, found {', '.join(batch.keys())}"
        )
    column = batch[name]
    if isinstance(column, Ragged):
        whole = _whole(column.values, f"values of feature {name!r}", reader)
        return _of_ragged(column._replace(values=whole), (name,), reader)
    if isinstance(column, Strings):
        keys, present = text_keys(name, column.data.numpy(), column.offsets.numpy())
        ends = np.concatenate([np.zeros(1, np.int64), present.cumsum()])
        return Ids((name,), len(keys), keys[present], ends, None)
    if not isinstance(column, Tensor) or column.dim() not in (1, 2):
        raise BadRequest(
            f"{reader}: expected feature {name!r} as Ragged or as a tensor of shape (B,) or "
            f"(B, L), found {_describe(column)}{_of_a_record(column)}"
        )
    whole = _whole(column.reshape(-1), f"feature {name!r}", reader)
    values = _array(whole, torch.int64, f"feature {name!r}", reader)
    num_examples = column.shape[0]
    offsets = None
    if column.dim() == 2 and column.shape[1] != 1:
        offsets = np.arange(num_examples + 1) * column.shape[1]
    return Ids((name,), num_examples, values, offsets, None)


def _of_ragged(ragged: Ragged, features: tuple[str, ...], reader: str) -> Ids:
    what = f"feature {features[0]!r}" if len(features) == 1 else f"features of {features[0]!r}, ..."
    values = _array(ragged.values, torch.int64, f"values of {what}", reader)
    offsets = _array(ragged.offsets, torch.int64, f"offsets of {what}", reader)
    weights = None
    if ragged.weights is not None:
        weights = _array(ragged.weights, torch.float32, f"weights of {what}", reader)
        if len(weights) != len(values):
            raise BadRequest(
                f"{reader}: expected {len(values)} weights of {what}, found {len(weights)}"
            )
    num_examples, rest = divmod(len(offsets) - 1, len(features))
    if rest != 0 or not 0 <= offsets[0] <= offsets[-1] <= len(values):
        raise BadRequest(
            f"{reader}: expected offsets of {what} from 0 to {len(values)}, their number a "
            f"multiple of {len(features)}, plus 1; found {len(offsets)} "
            f"from {offsets[:1]} to {offsets[-1:]}"
        )
    return Ids(features, num_examples, values, offsets, weights)._slice(0, features)


_EXACT = {torch.float64: 2.0**53, torch.float32: 2.0**24}
"""Below which floats of a type are exact integers."""


def _whole(ids: Tensor, what: str, reader: str) -> Tensor:
    """Ids of any integer or floating type as int64. Raises BadRequest: one that is no whole number,
    or that its type may have rounded; names it.
    """
    if ids.dtype == torch.int64 or ids.is_complex() or ids.is_meta or ids.requires_grad:
        return ids
    if ids.dtype == torch.uint64:
        return ids.view(torch.int64)
    if ids.is_floating_point():
        largest = _EXACT.get(ids.dtype, 2.0**8)
        wrong = ~((ids == ids.round()) & (ids.abs() < largest))
        if wrong.any():
            at = int(wrong.int().argmax())
            raise BadRequest(
                f"{reader}: expected {what} as integers or strings, found {ids[at].item()} of"
                f" {ids.dtype} at {at}, which is no whole number below {largest:.0f}; in a"
                " DataFrame, astype('Int64') holds integers beside missing ones"
            )
    return ids.to(torch.int64)


def _array(tensor: Tensor, dtype: torch.dtype, what: str, reader: str) -> np.ndarray[Any, Any]:
    if tensor.dtype != dtype or tensor.dim() != 1 or tensor.is_meta:
        raise BadRequest(
            f"{reader}: expected {what} as a one-dimensional {dtype} tensor, "
            f"found {_describe(tensor)}"
        )
    if tensor.requires_grad:
        raise BadRequest(f"{reader}: expected {what} without a gradient, found requires_grad=True")
    return tensor.contiguous().cpu().numpy()


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} of shape {tuple(value.shape)} on {value.device}"
    return type(value).__name__


def _of_a_record(value: object) -> str:
    is_single = isinstance(value, (str, int, float))
    return "; of examples one by one pandas.DataFrame(examples) makes columns" if is_single else ""


def _expect_rising_offsets(ids: Ids, offsets: np.ndarray[Any, Any], reader: str) -> None:
    falls = offsets[1:] < offsets[:-1]
    if falls.any():
        bag = int(falls.argmax())
        feature, example = divmod(bag, ids.num_examples)
        raise BadRequest(
            f"{reader}: expected offsets of feature {ids.features[feature]!r} that do not "
            f"decrease, found {offsets[bag]} before {offsets[bag + 1]} at {example + 1}"
        )


def _expect_equal_batch(parts: Sequence[Ids], reader: str) -> None:
    for part in parts:
        if part.num_examples != parts[0].num_examples:
            raise BadRequest(
                f"{reader}: expected {parts[0].num_examples} examples of feature "
                f"{part.features[0]!r}, as of {parts[0].features[0]!r}, found {part.num_examples}"
            )


def _concatenate(parts: Sequence[Ids]) -> Ids:
    """The ids of the parts in order; all have the same number of examples."""
    if len(parts) == 1:
        return parts[0]
    offsets = weights = None
    if any(part.offsets is not None for part in parts):
        begins = np.cumsum([0, *(len(part.values) for part in parts)])
        inner = [part.bounds()[:-1] + begins[i] for i, part in enumerate(parts)]
        offsets = np.concatenate([*inner, begins[-1:]])
    if any(part.weights is not None for part in parts):
        weights = np.concatenate([_weights_or_ones(part) for part in parts])
    return Ids(
        tuple(name for part in parts for name in part.features),
        parts[0].num_examples,
        np.concatenate([part.values for part in parts]),
        offsets,
        weights,
    )


def _weights_or_ones(ids: Ids) -> np.ndarray[Any, Any]:
    return np.ones(len(ids.values), np.float32) if ids.weights is None else ids.weights


Keys = np.ndarray[Any, np.dtype[np.uint64]]


def keys_of(feature: str, ids: npt.ArrayLike) -> Keys:
    """The keys of a feature's ids in a table with `salt`, to import rows or look them up by key.

    Args:
        ids: (n,) integers of 64 bits.

    Returns:
        (n,) uint64.

    Raises:
        BadRequest: ids of another form.
    """
    values = np.asarray(ids)
    if values.ndim != 1 or values.dtype not in (np.int64, np.uint64):
        raise BadRequest(
            f"keys_of: expected ids (n,) of int64 or uint64, found {values.dtype} of {values.shape}"
        )
    offsets = np.array([0, len(values)], np.int64)
    return salted_keys(Ids((feature,), 1, np.ascontiguousarray(values), offsets, None), None)


def keys_of_values(table: Table, feature: str, values: Any) -> Keys:
    """The key of each value of a feature: what training makes of the same values.

    Args:
        values: n integers or strings, as a column of a batch may have them.

    Returns:
        (n,) uint64.

    Raises:
        BadRequest: a feature by which no module reads the table; values of another kind than in
            training, lists, or one that is missing or empty; named.
    """
    table.features.check_name(table.name, feature)
    column, are_strings = column_of(feature, values)
    table.features.check(f"keys of table {table.name!r}", feature, are_strings)
    return keys_of_column(feature, column, salted=table.salt)


def keys_of_column(feature: str, column: Any, *, salted: bool) -> Keys:
    """`keys_of_values` of a feature of which nobody knows more."""
    column = as_column(feature, column)
    ids = read_ids({feature: column}, (feature,), "keys")
    if ids.offsets is not None:
        sizes = np.diff(ids.offsets)
        at = int((sizes != 1).argmax())
        raise BadRequest(
            f"keys: expected one value of feature {feature!r} each, found {sizes[at]} at {at}"
        )
    return salted_keys(ids, None) if salted else ids.values.view(np.uint64)


def salted_keys(ids: Ids, padding_key: int | None) -> Keys:
    """The key of each id; the padding key stays as it is."""
    salts = np.array([salt_of(name) for name in ids.features], np.uint64)
    out = np.empty(len(ids.values), np.uint64)
    _core.salt(ids.values.view(np.uint64), ids.offsets, salts, out, padding_key)
    return out
