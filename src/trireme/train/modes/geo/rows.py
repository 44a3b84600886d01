"""The cached rows of one table, and what a window has changed in them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from trireme import _core
from trireme.errors import BadRequest
from trireme.optim import rule_values
from trireme.policy import Policy
from trireme.protocol.columns import KeyColumns, fleet_scale, no_columns
from trireme.protocol.routing import Floats, Keys
from trireme.rows.core_table import make_core_table
from trireme.table import Table, TableSchema
from trireme.worker.gradients import TableGradient

Slots = npt.NDArray[np.int64]

# Per row besides its floats: index, key and stamp of the row and of its clock, and its entries in
# the queue of the least recently touched rows and in a window.
OVERHEAD_BYTES = 160
SLOTS_MAX = 1 << 24  # of a window: clocks are floats
_NO_STEP = _core.RuleValues(lr=0.0)


class CachedKeys(NamedTuple):
    """Keys as a window knows them: (K,) their slots, and which are missing in the window."""

    keys: Keys
    slots: Slots
    is_missing: npt.NDArray[np.bool_]

    @property
    def missing(self) -> Keys:
        keys: Keys = self.keys[self.is_missing]
        return keys


class CachedRows:
    """Rows of one row class of a table: weights and optimizer state, as servers have them. Each has
    a clock: the window that touched it last, and its slot there, which keeps the weights that the
    row had when the window began. One thread uses it; any may `find`. Raises BadRequest: rows of
    this table cannot be trained apart from the servers.
    """

    def __init__(self, table: Table, pool: _core.Pool) -> None:
        schema = table.schema
        _check(schema)
        self.table, self._pool = table, pool
        self.dim = table.dim
        self._rows = make_core_table(
            TableSchema(
                name=schema.name,
                dims=(self.dim,),
                dtype="float32",
                rule=schema.rule,
                initializer=schema.initializer,
                seed=schema.seed,
                policy=Policy().fixed(),
            )
        )
        # A table without a rule: only assigned to.
        clocks = TableSchema("clocks", (2,), "float32", {"name": "sgd"}, ("constant", 0.0, 0.0), 0)
        self._clocks = make_core_table(clocks)
        self._num_changes = 0
        self._touched: CachedKeys | None = None  # last in this window
        self.values: dict[str, float | int] = {}
        self._window = _WindowRows(self.dim, schema.columns)

    @property
    def num_rows(self) -> int:
        return int(self._rows.rows)

    @property
    def num_bytes(self) -> int:
        """Memory taken by rows and clocks."""
        return int(self._rows.bytes + self._clocks.bytes)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row: its weights, those when the window began, its state and overhead."""
        return 4 * (2 * self.dim + self._rows.state_floats) + OVERHEAD_BYTES

    @property
    def has_state(self) -> bool:
        return bool(self._rows.state_floats)

    @property
    def num_touched(self) -> int:
        """Rows in this window."""
        return self._window.size

    def find(self, keys_K: Keys, window: int) -> CachedKeys:
        clocks_K2 = self._clock(keys_K)
        return CachedKeys(keys_K, clocks_K2[:, 1].astype(np.int64), clocks_K2[:, 0] != window)

    def touched_at(self, keys_K: Keys) -> Floats:
        """(K,): the window that touched each key last, 0 for a key that is not cached."""
        return self._clock(keys_K)[:, 0]

    def touch(self, cached: CachedKeys, weights_MD: Floats, window: int) -> None:
        """Put these rows into the window. weights_MD: of `cached.missing`, from the servers."""
        if len(missing_M := cached.missing):
            slots_M = self._window.add(missing_M, weights_MD)
            clocks_M2 = np.empty((len(missing_M), 2), np.float32)
            clocks_M2[:, 0], clocks_M2[:, 1] = window, slots_M
            self._assign(self._rows, missing_M, weights_MD)
            self._assign(self._clocks, missing_M, clocks_M2)
            cached.slots[cached.is_missing] = slots_M
        self._touched = cached

    def read(self, keys_K: Keys) -> Floats:
        """(K, D)"""
        rows_KD = np.empty((len(keys_K), self.dim), np.float32)
        self._rows.lookup(keys_K, rows_KD, self._pool)
        return rows_KD

    def update(self, gradient: TableGradient, examples: int) -> None:
        """One step of the table's rule on rows that the window has touched."""
        schema, gradients_KD = self.table.schema, gradient.gradients.numpy()
        if schema.is_scored and schema.rule.get("scale") == "fleet":
            shows_K2 = gradient.columns["show_click"]
            gradients_KD = gradients_KD * fleet_scale(schema.rule, shows_K2, examples)
        values = rule_values(gradient.values)
        self._rows.update(gradient.keys, gradients_KD, self._next_id(), values, self._pool)
        if self._touched is not None and self._touched.keys is gradient.keys:
            slots_K = self._touched.slots  # without a lookup
        else:
            slots_K = self._clock(gradient.keys)[:, 1].astype(np.int64)
        self._window.count(slots_K, gradient.columns)
        self.values = gradient.values

    def differences(self) -> TableGradient | None:
        """What the window has changed in its rows; None: it has updated none."""
        keys_K, base_KD, columns = self._window.updated()
        if not len(keys_K):
            return None
        change_KD = torch.from_numpy(self.read(keys_K) - base_KD)
        return TableGradient(keys_K, change_KD, self.values, columns)

    def end_window(self) -> Keys:
        """Begin another window; returns the keys that this one has touched."""
        self._touched = None
        return self._window.clear()

    def erase(self, keys_K: Keys) -> int:
        """Returns how many were cached."""
        self._clocks.erase(keys_K, self._pool)
        return int(self._rows.erase(keys_K, self._pool))

    def reset_state(self, keys_K: Keys) -> None:
        """Begin the state of the update rule anew for those that are cached."""
        keys_K = keys_K[self.touched_at(keys_K) > 0]
        weights_KD = self.read(keys_K)
        self._rows.erase(keys_K, self._pool)
        self._assign(self._rows, keys_K, weights_KD)

    def _clock(self, keys_K: Keys) -> Floats:
        """(K, 2): window and slot."""
        clocks_K2 = np.empty((len(keys_K), 2), np.float32)
        self._clocks.lookup(keys_K, clocks_K2, self._pool)
        return clocks_K2

    def _assign(self, rows: _core.Table, keys_K: Keys, values: Floats) -> None:
        values = np.ascontiguousarray(values)
        rows.update(keys_K, values, self._next_id(), _NO_STEP, self._pool, change="assign")

    def _next_id(self) -> list[tuple[int, int]]:
        self._num_changes += 1
        return [(0, self._num_changes)]


class _WindowRows:
    """The rows that a window has touched, by slot: keys, weights when the window began, whether
    they were updated, and the sums of their updates' columns.
    """

    def __init__(self, dim: int, columns: tuple[str, ...]) -> None:
        self.size = 0
        self._keys = np.empty(0, np.uint64)
        self._base = np.empty((0, dim), np.float32)
        self._is_updated = np.empty(0, np.bool_)
        self._columns = no_columns(columns)

    def add(self, keys_K: Keys, base_KD: Floats) -> Slots:
        """Add keys; returns their slots."""
        begin, self.size = self.size, self.size + len(keys_K)
        if self.size > SLOTS_MAX:
            raise BadRequest(f"geo: expected at most {SLOTS_MAX} rows of a table between exchanges")
        if self.size > len(self._keys):
            self._grow(max(1024, 2 * self.size))
        self._keys[begin : self.size] = keys_K
        self._base[begin : self.size] = base_KD
        self._is_updated[begin : self.size] = False
        for values in self._columns.values():
            values[begin : self.size] = 0
        return np.arange(begin, self.size)

    def _grow(self, capacity: int) -> None:
        def grown(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
            larger = np.empty((capacity, *values.shape[1:]), values.dtype)
            larger[: len(values)] = values
            return larger

        self._keys, self._base = grown(self._keys), grown(self._base)
        self._is_updated = grown(self._is_updated)
        self._columns = {name: grown(values) for name, values in self._columns.items()}

    def count(self, slots_K: Slots, columns: KeyColumns) -> None:
        """Count an update of these slots."""
        for name, values in self._columns.items():
            if name == "feature":  # of the first update, as pushes of several workers are merged
                new_K = ~self._is_updated[slots_K]
                values[slots_K[new_K]] = columns[name][new_K]
            else:
                values[slots_K] += columns[name]
        self._is_updated[slots_K] = True

    def updated(self) -> tuple[Keys, Floats, Mapping[str, npt.NDArray[Any]]]:
        """Keys, weights when the window began and columns of the updated rows."""
        chosen = np.flatnonzero(self._is_updated[: self.size])
        columns = {name: values[chosen] for name, values in self._columns.items()}
        return self._keys[chosen], self._base[chosen], columns

    def clear(self) -> Keys:
        """Remove all rows; returns their keys."""
        keys: Keys = self._keys[: self.size].copy()
        self.size = 0
        return keys


def _check(schema: TableSchema) -> None:
    if schema.pulls_statistics:
        raise BadRequest(
            f"geo: expected a policy without pulls_statistics for table {schema.name!r}: a worker's"
            " cache has no shows and clicks of the others"
        )
    if schema.rule["name"] == "ftrl":
        raise BadRequest(
            f"geo: expected another rule than FTRL for table {schema.name!r}: its weights follow"
            " from its state, so differences of weights say too little"
        )
