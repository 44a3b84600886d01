"""The distinct keys of a batch, where each of them occurs, and the columns that a push has."""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from trireme import _core
from trireme.data.batch import Batch
from trireme.errors import BadRequest
from trireme.nn.ids import Ids, salted_keys
from trireme.policy import ScorePolicy
from trireme.table import Table

if TYPE_CHECKING:  # planning for inference needs nothing of servers
    from trireme.protocol.columns import KeyColumns

# The fields of a Lookup after `rows`, with the type of an absent one.
_POSITION_TYPES = (
    torch.int32,  # index
    torch.int32,  # order
    torch.int32,  # starts
    torch.int32,  # bags
    torch.int64,  # offsets
    torch.float32,  # weights
)


class DistinctKeys:
    """The distinct keys of some ids, and the positions of their rows for modules.

    keys: (K,) uint64, in the order of their buckets.
    index: the ids, with the number of its key in place of each id.
    """

    def __init__(self, ids: Ids, padding_key: int | None, salted: bool, pool: _core.Pool) -> None:
        values = keys_of(ids, padding_key, salted=salted)
        self.keys, index, *self._occurrences = _core.unique(values, pool, padding_key)
        self.index = ids.with_values(index)
        self._pool = pool
        self._positions: dict[tuple[tuple[str, ...], str], tuple[Tensor, ...]] = {}

    def positions(self, features: tuple[str, ...], mode: str) -> tuple[Tensor, ...]:
        """The fields of a Lookup after `rows`, for a module that reads these features."""
        if (features, mode) not in self._positions:
            self._positions[features, mode] = self._find_positions(features, mode)
        return self._positions[features, mode]

    def fleet_scale(self, table: Table) -> Tensor:
        """(K, 1): the number of examples, for some rules divided by the occurrences of the key."""
        scale_K = np.full(len(self.keys), self.index.num_examples, np.float32)
        if table.optimizer.is_per_show:
            scale_K /= np.diff(self._occurrences[1])
        return torch.from_numpy(scale_K)[:, None]

    def columns(self, table: Table, batch: Batch) -> KeyColumns:
        """The columns that a push to this table has for each key, as its schema lists them."""
        columns: dict[str, np.ndarray[Any, Any]] = {}
        if "show_click" in table.schema.columns:
            columns["show_click"], columns["feature"] = self._shows(table, batch)
        if "count" in table.schema.columns:
            columns["count"] = np.diff(self._occurrences[1]).astype(np.uint32)
        return columns

    def _shows(
        self, table: Table, batch: Batch
    ) -> tuple[np.ndarray[Any, np.dtype[np.float32]], np.ndarray[Any, np.dtype[np.uint32]]]:
        num_keys, num_examples = len(self.keys), self.index.num_examples
        show_click = np.empty((num_keys, 2), np.float32)
        feature = np.empty(num_keys, np.uint32)
        order, starts = self._occurrences
        _core.sum_shows(
            read_shows(batch, table, num_examples),
            order,
            starts,
            self._bags,
            num_examples,
            feature_numbers(table, self.index.features),
            show_click,
            feature,
            self._pool,
        )
        return show_click, feature

    @cached_property
    def _bags(self) -> np.ndarray[Any, np.dtype[np.int32]] | None:
        return _bags(self.index)

    def _find_positions(self, features: tuple[str, ...], mode: str) -> tuple[Tensor, ...]:
        index = self.index.select(features)
        order, starts = self._occurrences
        if index is not self.index:
            order, starts = _core.occurrences(index.values, len(self.keys), self._pool)
        bags = offsets = weights = None
        if mode != "none":
            bags = self._bags if index is self.index else _bags(index)
            offsets, weights = index.offsets, index.weights
        if mode in ("mean", "sqrt"):
            weights = _mean_weights(index, mode)
        arrays = (index.values, order, starts, bags, offsets, weights)
        return tuple(
            torch.empty(0, dtype=dtype) if array is None else torch.from_numpy(array)
            for array, dtype in zip(arrays, _POSITION_TYPES, strict=True)
        )


def keys_of(
    ids: Ids, padding_key: int | None, *, salted: bool
) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """(N,) the key of each id, perhaps in the memory of the ids."""
    return salted_keys(ids, padding_key) if salted else ids.values.view(np.uint64)


def _bags(index: Ids) -> np.ndarray[Any, Any] | None:
    """The bag of each position; None: one position per bag."""
    if index.offsets is None:
        return None
    bags = np.empty(len(index.values), np.int32)
    _core.bag_of(index.offsets, len(bags), bags)
    return bags


def _mean_weights(index: Ids, mode: str) -> np.ndarray[Any, Any] | None:
    """1 / n for each of the n ids of a bag, or 1 / sqrt(n). Padding does not count."""
    if index.weights is not None:
        raise BadRequest(
            f"EmbeddingBag: mode {mode!r} is not defined for weighted ids, found weights for "
            f"features {', '.join(index.features)}; use mode='sum'"
        )
    if index.offsets is None:  # one id, or padding, per bag
        return None
    weights = np.empty(len(index.values), np.float32)
    _core.mean_weights(index.values, index.offsets, weights)
    return weights if mode == "mean" else np.sqrt(weights, out=weights)


def read_shows(
    batch: Batch, table: Table, num_examples: int
) -> np.ndarray[Any, np.dtype[np.float32]] | None:
    """(B, 2): show and click of each example, from the columns that the table's policy names.

    None if it names none: then each occurrence of a key is one show and no click.

    Raises BadRequest: a column is missing, or not B finite numbers >= 0; the message names it.
    """
    assert isinstance(table.policy, ScorePolicy)
    names = table.policy.show_click
    if names is None:
        return None
    examples = np.empty((num_examples, 2), np.float32)
    for column, name in enumerate((names.show, names.click)):
        examples[:, column] = 1 if name is None else _numbers(batch, name, table, num_examples)
    return examples


def _numbers(batch: Batch, name: str, table: Table, num_examples: int) -> Any:
    what = f"table {table.name!r}: expected column {name!r} of its ShowClick"
    if name not in batch:
        raise BadRequest(f"{what} in the batch, found {', '.join(batch.keys())}")
    column = batch[name]
    if not isinstance(column, Tensor) or column.numel() != num_examples:
        form = tuple(column.shape) if isinstance(column, Tensor) else type(column).__name__
        raise BadRequest(f"{what} as a number for each of {num_examples} examples, found {form}")
    numbers = column.detach().reshape(-1).to(torch.float32).cpu().numpy()
    is_wrong = ~((numbers >= 0) & (numbers < np.inf))
    if is_wrong.any():
        raise BadRequest(f"{what} with finite numbers >= 0, found {numbers[is_wrong][0]}")
    return numbers


def feature_numbers(
    table: Table, features: tuple[str, ...]
) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """(F,) the number of each feature in rows: from `Table.feature_numbers`; else its name, if that
    is a number, as slots of Fleet; else its place among the features.
    """
    numbers = _named_numbers(features)
    if table.feature_numbers:
        known = table.feature_numbers
        named = zip(features, numbers.tolist(), strict=True)
        numbers = np.array([known.get(name, number) for name, number in named], np.uint32)
    return numbers


@lru_cache
def _named_numbers(features: tuple[str, ...]) -> np.ndarray[Any, np.dtype[np.uint32]]:
    is_number = [f.isascii() and f.isdecimal() and len(f) < 10 for f in features]
    return np.array([int(f) if is_number[i] else i for i, f in enumerate(features)], np.uint32)
