"""Planning: from the ids of a batch to distinct keys per table, and to an index per module.

A plan is made once per batch and serves the whole step: its keys are pulled and later pushed, its
indices say where each pulled row goes (gather) and where its gradient comes from (scatter).

    plan = planner.plan(batch)
    pulled = client.pull({part.table.class_id: part.keys for part in plan.tables})
    rows = {name: torch.from_numpy(rows) for name, rows in pulled.rows.items()}
    leaves = plan.attach(batch, rows, train=True)
    loss(model(batch)).backward()      # leaves[name].grad is the gradient of the table's keys

Shapes: B examples, F features, D columns, K rows, N positions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from trireme import _core
from trireme.data.batch import Batch
from trireme.data.foreign import as_batch
from trireme.errors import BadRequest
from trireme.nn.ids import Columns, Ids, read_ids
from trireme.nn.lookup import Lookup
from trireme.nn.shows import feature_numbers, read_shows
from trireme.table import RowClassId, Table

if TYPE_CHECKING:  # planning for inference needs nothing of servers
    from trireme.protocol.columns import KeyColumns


@dataclass(frozen=True, slots=True)
class LookupSpec:
    """What one lookup of a module reads: which bags of which features, and how they are summed.

    name: the key of the lookup in `Batch.lookups`; equal specs have equal names.
    mode: "sum", "mean" or "sqrt" of a bag (EmbeddingBag), or "none": each id for itself.
    padding_key: ids equal to it (as uint64) have no row; None: every id has one.
    """

    table: Table
    features: tuple[str, ...]
    mode: str
    padding_key: int | None

    @property
    def name(self) -> str:
        return f"{self.table.name}:{self.mode}:{','.join(self.features)}"


@dataclass(frozen=True, slots=True, eq=False)
class TablePlan:
    """One table's part of a plan; where features have dims of their own, a row class's.

    keys: (K,) uint64, distinct, in the order of their buckets; row k of a lookup is of keys[k].
    scale: (K, 1) float32: what the gradient of each row is multiplied by; None: by nothing.
    columns: what a push says of each key besides (trireme.protocol.columns); empty unless for
            training.
    """

    table: Table
    keys: np.ndarray[Any, np.dtype[np.uint64]]
    scale: Tensor | None = None
    columns: KeyColumns = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class _Positions:
    """A Lookup without its rows."""

    class_id: RowClassId
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, eq=False)
class BatchPlan:
    """The distinct keys of a batch per table, and where their rows are used.

    num_examples: B.
    tables: one entry per table.
    """

    num_examples: int
    tables: tuple[TablePlan, ...]
    _positions: Mapping[str, _Positions]

    def attach(
        self, batch: Batch, rows: Mapping[RowClassId, Tensor], *, train: bool
    ) -> dict[RowClassId, Tensor]:
        """Give the batch the rows of its keys; modules then compute from them.

        Args:
            batch: the batch that was planned; its lookups are replaced.
            rows: `Table.class_id` -> (K, W) float32, row k for keys[k]. Not copied.
            train: whether gradients are wanted.

        Returns:
            `Table.class_id` -> (K, W) leaf over the same memory; in training its .grad, after
            backward, is the gradient of keys. It is None if the loss did not depend on the table.

        Raises:
            BadRequest: rows are missing or have another shape; the message names the table.
        """
        leaves = self.leaves(rows, train=train)
        batch.lookups = self.lookups(leaves)
        return leaves

    def leaves(self, rows: Mapping[RowClassId, Tensor], *, train: bool) -> dict[RowClassId, Tensor]:
        """The tensors that `attach` makes; see there."""
        return {
            part.table.class_id: _leaf(part, rows.get(part.table.class_id), train)
            for part in self.tables
        }

    def lookups(self, leaves: Mapping[RowClassId, Tensor]) -> dict[str, Lookup]:
        """LookupSpec name -> what the module computes from."""
        return {
            name: Lookup(leaves[positions.class_id], *positions.tensors)
            for name, positions in self._positions.items()
        }


class Planner:
    """Plans batches for the embedding modules found in `modules`.

    Modules on one table share its keys: each key is pulled and pushed once per step, however many
    modules and features use it. Tables that read the same features also share the work of planning.

    Threads: plan() may be called from several threads; it releases the GIL for most of its work.

    Raises:
        BadRequest: modules on one table disagree about the padding key, or two tables share a name.
    """

    def __init__(self, *modules: nn.Module, pool: _core.Pool) -> None:
        self._pool = pool
        self._specs = _by_table(_specs_of(modules))

    @classmethod
    def of_specs(cls, specs: Iterable[LookupSpec], *, pool: _core.Pool) -> Planner:
        """A planner of what modules read, where there are no modules. Raises as the constructor."""
        planner = cls(pool=pool)
        planner._specs = _by_table(specs)
        return planner

    @property
    def specs(self) -> tuple[LookupSpec, ...]:
        """All that is read, equal specs once."""
        return tuple(spec for of_table in self._specs.values() for spec in of_table)

    @property
    def tables(self) -> tuple[Table, ...]:
        """The tables that the modules read, in the order of the modules."""
        tables = (specs[0].table.parts[0] for specs in self._specs.values())
        return tuple(dict.fromkeys(tables))

    def plan(self, batch: Columns, *, train: bool = True) -> BatchPlan:
        """The distinct keys of `batch` and where each is used.

        Args:
            batch: a Batch, or what `as_batch` makes one of.
            train: whether its gradients will be pushed, with what tables want to know besides.

        Raises:
            BadRequest: a feature, or in training a column of shows or clicks, is missing or has
                another form than expected (named).
        """
        batch = as_batch(batch)
        tables: list[TablePlan] = []
        positions: dict[str, _Positions] = {}
        uniques: dict[tuple[object, ...], _Unique] = {}  # tables that read the same ids share them
        num_examples = 0
        for specs in self._specs.values():
            table, features = specs[0].table, _union(specs)
            source = (features, specs[0].padding_key, table.salt)
            if source not in uniques:
                ids = read_ids(batch, features, f"Planner.plan of table {table.name!r}")
                uniques[source] = _Unique(ids, specs[0].padding_key, table.salt, self._pool)
            unique = uniques[source]
            num_examples = unique.index.num_examples
            scale = unique.fleet_scale(table) if _is_scaled_here(table) else None
            columns = unique.columns(table, batch) if train else {}
            tables.append(TablePlan(table, unique.keys, scale, columns))
            for spec in specs:
                tensors = unique.positions(spec.features, spec.mode)
                positions[spec.name] = _Positions(table.class_id, tensors)
        return BatchPlan(num_examples, tuple(tables), positions)


def salt_of(feature: str) -> int:
    """The salt of a feature's keys in a table with `salt`: a uint64 that depends on its name alone.

    Permanent: rows of saved tables are found by it.
    """
    return int.from_bytes(hashlib.blake2b(feature.encode(), digest_size=8).digest(), "little")


def keys_of(feature: str, ids: npt.ArrayLike) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """The keys of a feature's ids in a table with `salt`, for rows that come in or are looked for
    by key.

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
    out = np.empty(len(values), np.uint64)
    salts = np.array([salt_of(feature)], np.uint64)
    offsets = np.array([0, len(values)], np.int64)
    _core.salt(np.ascontiguousarray(values).view(np.uint64), offsets, salts, out, None)
    return out


class _Unique:
    """The distinct keys of some ids, and how modules that read these ids find their rows."""

    def __init__(self, ids: Ids, padding_key: int | None, salted: bool, pool: _core.Pool) -> None:
        values = ids.values.view(np.uint64)
        if salted:
            values = _salted(ids, padding_key)
        self.keys, index, *self._occurrences = _core.unique(values, pool, padding_key)
        self.index = ids.with_values(index)
        self._pool = pool
        self._positions: dict[tuple[tuple[str, ...], str], tuple[Tensor, ...]] = {}

    def positions(self, features: tuple[str, ...], mode: str) -> tuple[Tensor, ...]:
        """The fields of a Lookup after `rows`."""
        if (features, mode) not in self._positions:
            self._positions[features, mode] = self._find(features, mode)
        return self._positions[features, mode]

    def fleet_scale(self, table: Table) -> Tensor:
        """(K, 1): the number of examples, for some rules divided by how often the key occurs."""
        scale_K = np.full(len(self.keys), self.index.num_examples, np.float32)
        if table.optimizer.is_per_show:
            scale_K /= np.diff(self._occurrences[1])
        return torch.from_numpy(scale_K)[:, None]

    def columns(self, table: Table, batch: Batch) -> KeyColumns:
        """What a push to this table says of the keys, by the names that its schema lists."""
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
        examples = read_shows(batch, table, num_examples)
        numbers = feature_numbers(table, self.index.features)
        order, starts = self._occurrences
        _core.sum_shows(
            examples,
            order,
            starts,
            self._bags,
            num_examples,
            numbers,
            show_click,
            feature,
            self._pool,
        )
        return show_click, feature

    @cached_property
    def _bags(self) -> np.ndarray[Any, np.dtype[np.int32]] | None:
        return _bags(self.index)

    def _find(self, features: tuple[str, ...], mode: str) -> tuple[Tensor, ...]:
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
        return tuple(
            torch.empty(0, dtype=dtype) if array is None else torch.from_numpy(array)
            for array, dtype in (
                (index.values, torch.int32),
                (order, torch.int32),
                (starts, torch.int32),
                (bags, torch.int32),
                (offsets, torch.int64),
                (weights, torch.float32),
            )
        )


def _is_scaled_here(table: Table) -> bool:
    """Whether the worker applies Fleet's scale: servers do where they get the shows."""
    return table.optimizer.scale == "fleet" and not table.schema.is_scored


def _salted(ids: Ids, padding_key: int | None) -> np.ndarray[Any, np.dtype[np.uint64]]:
    salts = np.array([salt_of(name) for name in ids.features], np.uint64)
    out = np.empty(len(ids.values), np.uint64)
    _core.salt(ids.values.view(np.uint64), ids.offsets, salts, out, padding_key)
    return out


def _bags(index: Ids) -> np.ndarray[Any, Any] | None:
    if index.offsets is None:
        return None
    bags = np.empty(len(index.values), np.int32)
    _core.bag_of(index.offsets, len(bags), bags)
    return bags


def _mean_weights(index: Ids, mode: str) -> np.ndarray[Any, Any] | None:
    """1 / n for each of the n ids of a bag, or 1 / sqrt(n); padding does not count."""
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


def _leaf(part: TablePlan, rows: Tensor | None, train: bool) -> Tensor:
    expected = (len(part.keys), part.table.width)
    if rows is None or tuple(rows.shape) != expected or rows.dtype != torch.float32:
        found = "none" if rows is None else f"{rows.dtype} of shape {tuple(rows.shape)}"
        raise BadRequest(
            f"BatchPlan.attach: expected rows of table {part.table.name!r} as float32 of shape "
            f"{expected}, found {found}"
        )
    return rows.detach().requires_grad_(train)


def _union(specs: Iterable[LookupSpec]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for spec in specs for name in spec.features))


def _specs_of(modules: Iterable[nn.Module]) -> Iterator[LookupSpec]:
    for module in modules:
        for part in module.modules():
            yield from getattr(part, "lookup_specs", ())


def _by_table(all_specs: Iterable[LookupSpec]) -> dict[RowClassId, list[LookupSpec]]:
    """What is read of each `Table.class_id`."""
    by_table: dict[RowClassId, list[LookupSpec]] = {}
    tables: dict[str, Table] = {}
    for spec in all_specs:
        name, table = spec.table.name, spec.table.parts[0]
        if tables.setdefault(name, table) is not table:
            raise BadRequest(
                f"Planner: expected one Table named {name!r}, found two; share the object"
            )
        first = by_table.setdefault(spec.table.class_id, [spec])[0]
        _expect_same_padding(first, spec)
        if all(spec.name != other.name for other in by_table[spec.table.class_id]):
            by_table[spec.table.class_id].append(spec)
    return by_table


def _expect_same_padding(first: LookupSpec, other: LookupSpec) -> None:
    if other.padding_key != first.padding_key:
        raise BadRequest(
            f"Planner: expected one padding_key for all modules on table {first.table.name!r}, "
            f"found {first.padding_key} and {other.padding_key}"
        )
