"""An example batch with the rows of its keys: a model is exported with it and measured on it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trireme.data.batch import Batch, Column, Ragged, Strings
from trireme.data.foreign import as_batch
from trireme.inference.gathering import gather_lookups
from trireme.job.cluster import Cluster
from trireme.nn.planner import BatchPlan, Planner
from trireme.nn.session import session_of
from trireme.rows.frozen_rows import encode
from trireme.table import RowClassId
from trireme.train.loop.scoring import outputs_by_name


class ExampleBatch:
    """tables: those that the model reads; where the features of a table have dims of their own, the
    part of each dim. texts, integers: features that the model looks up whose values are such, in
    training or else in the batch; of others nobody knows.
    """

    def __init__(self, cluster: Cluster, model: nn.Module, source: Any) -> None:
        self.model = model
        self.planner = Planner(model, pool=cluster.pool)
        batch = as_batch(source)
        self.batch = _without_sizes_of_one(_examples(batch, 0, batch.num_examples))
        self._cluster = cluster
        self._plan = self.planner.plan(self.batch, train=False)
        are_strings = {
            name: spec.table.features.are_strings.get(
                name, batch.has_strings(name) if batch.has_values(name) else None
            )
            for spec in self.planner.specs
            for name in spec.features
        }
        self.texts = tuple(name for name, is_text in are_strings.items() if is_text)
        self.integers = tuple(name for name, is_text in are_strings.items() if is_text is False)
        self.tables = tuple(dict.fromkeys(spec.table for spec in self.planner.specs))
        for table in self.planner.tables:
            cluster.client.create_table(table.schema)
        self._rows = session_of(cluster).pull(self._plan.keys()).rows

    def gathered(self, dtype: str = "float32") -> dict[str, Tensor]:
        """What the embedding modules return, from rows that are stored as `dtype`."""
        rows = {}
        for table in self.tables:
            rows_KW = rows[table.class_id] = self._rows[table.class_id].clone()
            weights = rows_KW[:, table.width - table.dim :].numpy()
            weights[:] = encode(weights, dtype, table.name)[1]
        return self._lookups(self.batch, self._plan, rows)

    def of_one(self) -> tuple[Batch, dict[str, Tensor]]:
        """One example alone, and what the embedding modules return for it."""
        i = _fullest(self.batch)
        batch = _examples(self.batch, i, i + 1)
        plan = self.planner.plan(batch, train=False)
        rows = session_of(self._cluster).pull(plan.keys()).rows
        return batch, self._lookups(batch, plan, rows)

    def _lookups(
        self, batch: Batch, plan: BatchPlan, rows: Mapping[RowClassId, Tensor]
    ) -> dict[str, Tensor]:
        return gather_lookups(self.planner.specs, batch, plan, rows, self._cluster.pool)

    def outputs(self, gathered: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the model returns, by name."""
        with torch.no_grad():
            batch = Batch(dict(self.batch.items()), None, dict(gathered))
            return outputs_by_name(self.model(batch))


def _without_sizes_of_one(batch: Batch) -> Batch:
    """The batch, with each example twice if it has a size of 1, which torch.export takes for a size
    that never varies.
    """
    sizes = [batch.num_examples]
    sizes += [len(column.values) for _, column in batch.items() if isinstance(column, Ragged)]
    if min(sizes) > 1:
        return batch
    return Batch({n: _twice(c) for n, c in batch.items()}, hashed=batch.hashed)


def _fullest(batch: Batch) -> int:
    """The example whose smallest bag is the largest, the first of such: empty bags show little."""
    bags = [column.offsets.diff() for _, column in batch.items() if isinstance(column, Ragged)]
    sizes = [sizes for sizes in bags if len(sizes) == batch.num_examples]
    return int(torch.stack(sizes).amin(0).argmax()) if sizes else 0


def _examples(batch: Batch, begin: int, end: int) -> Batch:
    """These examples, with their ids alone. What has no part for each belongs to the batch."""

    def part(column: Column) -> Column:
        if isinstance(column, Tensor):
            return column[begin:end] if column.shape[:1] == (num,) else column
        if len(column.offsets) != num + 1:
            return column
        if isinstance(column, Strings):
            return Strings(*Ragged(*column).cut(begin, end)[:2])
        return column.cut(begin, end)

    num = batch.num_examples
    return Batch({n: part(column) for n, column in batch.items()}, hashed=batch.hashed)


def _twice(column: Column) -> Column:
    if isinstance(column, Tensor):
        return torch.cat([column, column])
    if isinstance(column, Strings):
        return Strings(*_twice_ragged(column.data, column.offsets))
    values, offsets = _twice_ragged(column.values, column.offsets)
    weights = column.weights
    if weights is not None:
        weights, _ = _twice_ragged(weights, column.offsets)
    return Ragged(values, offsets, weights)


def _twice_ragged(values: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    return torch.cat([values, values]), torch.cat([offsets, offsets[1:] + offsets[-1]])
