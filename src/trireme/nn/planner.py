"""Planning: from the ids of a batch to distinct keys per table, and to positions per module.

A plan is made once per batch and serves the whole step. Its keys are pulled and later pushed; its
positions state where each pulled row goes (gather) and where its gradient comes from (scatter).

    plan = planner.plan(batch)
    pulled = client.pull(plan.keys())
    leaves = plan.attach(batch, pulled.rows, train=True)
    loss(model(batch)).backward()      # leaves[name].grad is the gradient of the table's keys

Shapes: B examples, K rows, W columns.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from trireme import _core
from trireme.data.batch import Batch
from trireme.data.foreign import as_batch
from trireme.errors import BadRequest
from trireme.nn.distinct_keys import DistinctKeys, keys_of
from trireme.nn.ids import read_ids
from trireme.nn.lookup import Lookup, LookupSpec, specs_by_class, specs_of
from trireme.table import RowClassId, Table

if TYPE_CHECKING:  # planning for inference needs nothing of servers
    from trireme.protocol.columns import KeyColumns

log = logging.getLogger("trireme.nn")


@dataclass(frozen=True, slots=True, eq=False)
class TablePlan:
    """The part of a plan for one table, or for one row class where features have different dims.

    keys: (K,) uint64, distinct, in the order of their buckets; row k of a lookup is of keys[k].
    scale: (K, 1) float32: factor of each row's gradient; None: 1.
    columns: what a push has for each key besides (trireme.protocol.columns); empty unless for
        training.
    """

    table: Table
    keys: np.ndarray[Any, np.dtype[np.uint64]]
    scale: Tensor | None = None
    columns: KeyColumns = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class BatchPlan:
    """The distinct keys of a batch per table, and where their rows are used.

    num_examples: B.
    tables: one entry per table, or per row class.
    pool: threads for gathering and scattering the rows.
    """

    num_examples: int
    tables: tuple[TablePlan, ...]
    pool: _core.Pool
    positions: Mapping[str, tuple[RowClassId, tuple[Tensor, ...]]]  # of lookups without rows

    def keys(self) -> dict[RowClassId, np.ndarray[Any, np.dtype[np.uint64]]]:
        """`TablePlan.keys` by `Table.class_id`."""
        return {part.table.class_id: part.keys for part in self.tables}

    def attach(
        self, batch: Batch, rows: Mapping[RowClassId, Tensor], *, train: bool
    ) -> dict[RowClassId, Tensor]:
        """Give the batch the rows of its keys, from which modules then compute.

        Args:
            batch: the planned batch; gets lookups and pool.
            rows: `Table.class_id` -> (K, W) float32, row k for keys[k]. Not copied.
            train: whether gradients are wanted.

        Returns:
            `Table.class_id` -> (K, W) leaf over the same memory. In training its .grad, after
            backward, is the gradient of keys; None if the loss did not depend on the table.

        Raises:
            BadRequest: rows are missing or have another shape; the message names the table.
        """
        leaves = self.leaves(rows, train=train)
        batch.lookups, batch.pool = self.lookups(leaves), self.pool
        return leaves

    def leaves(self, rows: Mapping[RowClassId, Tensor], *, train: bool) -> dict[RowClassId, Tensor]:
        """The leaves that `attach` returns."""
        return {
            plan.table.class_id: _leaf(plan, rows.get(plan.table.class_id), train)
            for plan in self.tables
        }

    def lookups(self, leaves: Mapping[RowClassId, Tensor]) -> dict[str, Lookup]:
        """The lookups of the modules, by name of their LookupSpec."""
        return {
            name: Lookup(leaves[class_id], *tensors)
            for name, (class_id, tensors) in self.positions.items()
        }

    def at(self, positions: Mapping[str, tuple[RowClassId, tuple[Tensor, ...]]]) -> BatchPlan:
        """The plan with copies of its positions on another device."""
        return replace(self, positions=positions)


class Planner:
    """Plans batches for the embedding modules within `modules`.

    Modules on one table share its keys: each key is pulled and pushed once per step, however many
    modules and features use it. Tables that read the same features also share the planning.

    Threads: plan() may be called from several threads; it releases the GIL for most of its work.

    Raises:
        BadRequest: modules on one table disagree about the padding key, or two tables share a name.
    """

    def __init__(self, *modules: nn.Module, pool: _core.Pool) -> None:
        self._pool = pool
        self._read(specs_of(modules))

    @classmethod
    def of_specs(cls, specs: Iterable[LookupSpec], *, pool: _core.Pool) -> Planner:
        """A planner for lookups without modules. Raises as the constructor."""
        planner = cls(pool=pool)
        planner._read(specs)
        return planner

    def _read(self, specs: Iterable[LookupSpec]) -> None:
        self._specs = specs_by_class(specs)
        self._features = {
            class_id: tuple(dict.fromkeys(name for spec in own for name in spec.features))
            for class_id, own in self._specs.items()
        }

    @property
    def specs(self) -> tuple[LookupSpec, ...]:
        """All distinct lookups."""
        return tuple(spec for specs in self._specs.values() for spec in specs)

    @property
    def tables(self) -> tuple[Table, ...]:
        """The tables that the modules read, in the order of the modules."""
        tables = (specs[0].table.parts[0] for specs in self._specs.values())
        return tuple(dict.fromkeys(tables))

    def keys_of_ids(self, batch: Batch) -> dict[RowClassId, np.ndarray[Any, np.dtype[np.uint64]]]:
        """The key of each id of `batch` but padding, in any order, by `Table.class_id`: copies.
        Raises as `plan`.
        """
        keys = {}
        for class_id, specs in self._specs.items():
            table, padding_key = specs[0].table, specs[0].padding_key
            features = self._features[class_id]
            reader = f"table {table.name!r}"
            ids = read_ids(batch, features, reader)
            check_kinds(table, batch, features, reader)
            values = keys_of(ids, padding_key, salted=table.salt)
            keys[class_id] = (
                np.array(values)
                if padding_key is None
                else values[values != np.uint64(padding_key)]
            )
        return keys

    def plan(self, batch: Batch | Mapping[str, Any], *, train: bool = True) -> BatchPlan:
        """The distinct keys of `batch` and where each is used.

        Args:
            train: whether its gradients will be pushed, with the columns that tables want.

        Raises:
            BadRequest: a feature, or in training a column of shows or clicks, is missing or has
                another form than expected (named). As `as_batch` for a mapping.
        """
        batch = as_batch(batch)
        tables: list[TablePlan] = []
        positions: dict[str, tuple[RowClassId, tuple[Tensor, ...]]] = {}
        keys_by_ids: dict[tuple[object, ...], DistinctKeys] = {}  # shared by tables with equal ids
        num_examples = 0
        for class_id, specs in self._specs.items():
            table, padding_key = specs[0].table, specs[0].padding_key
            features = self._features[class_id]
            reader = f"table {table.name!r}"
            ids_read = (features, padding_key, table.salt)
            if ids_read not in keys_by_ids:
                ids = read_ids(batch, features, reader)
                keys_by_ids[ids_read] = DistinctKeys(ids, padding_key, table.salt, self._pool)
            check_kinds(table, batch, features, reader, train=train)
            distinct = keys_by_ids[ids_read]
            num_examples = distinct.index.num_examples
            # Servers apply Fleet's scale to tables whose pushes have the shows.
            is_scaled = table.optimizer.scale == "fleet" and not table.schema.is_scored
            scale = distinct.fleet_scale(table) if is_scaled else None
            columns = distinct.columns(table, batch) if train else {}
            tables.append(TablePlan(table, distinct.keys, scale, columns))
            for spec in specs:
                tensors = distinct.positions(spec.features, spec.mode)
                positions[spec.name] = class_id, tensors
        return BatchPlan(num_examples, tuple(tables), self._pool, positions)


def check_kinds(
    table: Table, batch: Batch, features: Collection[str], reader: str, *, train: bool = False
) -> None:
    """Raises BadRequest: training took strings as a feature, and these are integers, or the
    reverse; missing values are neither. train: this is training, and later values are compared
    with these.
    """
    known = table.features.are_strings
    is_all = batch.hashed.keys() >= set(features) and batch.columns.keys().isdisjoint(features)
    if is_all and batch.hashed.items() <= known.items():
        return
    for feature in features:
        are_strings = batch.has_strings(feature)
        if are_strings is None or are_strings == known.get(feature):
            continue
        if not batch.has_values(feature):
            continue
        table.features.check(reader, feature, are_strings)
        if train:
            table.features.learn(feature, are_strings)
            if are_strings and not table.salt and (others := table.features.apart(feature)):
                log.warning(
                    "table %r: equal strings of different features, as %s, are different rows; if"
                    " they shall be one row, train on keys by one name, such as %r (docs/data.md);"
                    " if not, Table(salt=True) says so",
                    *(table.name, ", ".join([*others, feature]), others[0]),
                )


def _leaf(plan: TablePlan, rows: Tensor | None, train: bool) -> Tensor:
    expected = (len(plan.keys), plan.table.width)
    if rows is None or tuple(rows.shape) != expected or rows.dtype != torch.float32:
        shape = "none" if rows is None else f"{rows.dtype} of shape {tuple(rows.shape)}"
        raise BadRequest(
            f"BatchPlan.attach: expected rows of table {plan.table.name!r} as float32 of shape "
            f"{expected}, found {shape}"
        )
    return rows.detach().requires_grad_(train)
