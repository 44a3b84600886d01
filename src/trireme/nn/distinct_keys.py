"""The distinct keys of a batch, and where each of them occurs."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from trireme import _core
from trireme.data.batch import Batch
from trireme.errors import BadRequest
from trireme.nn.ids import Ids
from trireme.nn.salts import salted_keys
from trireme.nn.shows import feature_numbers, read_shows
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
        values = salted_keys(ids, padding_key) if salted else ids.values.view(np.uint64)
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
