"""The gradient of a step: the sum of the pushes of one sync step, or a single push."""

from collections.abc import KeysView, Sequence
from typing import NamedTuple

import numpy as np

from trireme import _core
from trireme.dense.optimizers import GroupValues
from trireme.optim import rule_values
from trireme.protocol.clipping import square_sum
from trireme.protocol.columns import KeyColumns, fleet_scale, merge, no_columns
from trireme.protocol.routing import Floats, Keys
from trireme.protocol.wire import GRADIENT, Push, TablePush
from trireme.table import TableSchema


class SummedTable(NamedTuple):
    """The gradient of a table: keys of its row classes in order, each once; gradients by class."""

    keys: Keys
    gradients: list[Floats]
    columns: KeyColumns


class SummedBlocks(NamedTuple):
    """The gradient of a server's blocks; parameters in `absent` have none."""

    groups: list[GroupValues]
    gradients: Floats
    absent: set[str]


class StepGradient:
    """Sums pushes. Each is the gradient of a mean over its stream's examples; it is weighted so
    that the sum is the gradient of the mean over all examples. `norm`: of the whole step; needed
    if its pushes are clipped by norm. `step`: all pushes of the step, if these are some of them.
    """

    def __init__(
        self,
        pushes: Sequence[Push],
        pool: _core.Pool,
        norm: float | None = None,
        step: Sequence[Push] = (),
    ) -> None:
        self._pushes, self._pool, self._norm = pushes, pool, norm
        self._examples = total = sum(push.examples for push in step or pushes)
        self._weights = [push.examples / total if total else 1.0 for push in pushes]
        self._of_table: dict[str, list[tuple[TablePush, float]]] = {}
        for push, weight in zip(pushes, self._weights, strict=True):
            for part in push.tables:
                self._of_table.setdefault(part.table, []).append((part, weight))
        self.ids = [push.id for push in pushes]
        self.time = max(push.time for push in pushes)
        self.kind = pushes[0].kind
        self._clip = pushes[0].clip

    def table_names(self) -> KeysView[str]:
        """Tables that have rows in the step."""
        return self._of_table.keys()

    def rule_values(self, name: str) -> _core.RuleValues:
        return rule_values(self._of_table[name][0][0].values)

    def of_table(self, schema: TableSchema) -> SummedTable:
        summed = self._sum_table(schema)
        return summed._replace(gradients=[self._clipped(values) for values in summed.gradients])

    def of_blocks(self) -> SummedBlocks | None:
        """Sums, clipped; None if no push has blocks."""
        summed = self._sum_blocks()
        return summed and summed._replace(gradients=self._clipped(summed.gradients))

    def square_sum(self, schemas: Sequence[TableSchema]) -> int | None:
        """The exact sum of squares before clipping (`clipping.square_sum`); None: not finite."""
        gradients = [values for schema in schemas for values in self._sum_table(schema).gradients]
        if (blocks := self._sum_blocks()) is not None:
            gradients.append(blocks.gradients)
        total = 0
        for gradient in gradients:
            if (squares := square_sum(gradient)) is None:
                return None
            total += squares
        return total

    def _sum_table(self, schema: TableSchema) -> SummedTable:
        pushes = self._of_table[schema.name]
        classes = range(len(schema.dims))
        return SummedTable(*_join_classes([self._sum_class(schema, c, pushes) for c in classes]))

    def _sum_class(
        self, schema: TableSchema, row_class: int, pushes: Sequence[tuple[TablePush, float]]
    ) -> tuple[Keys, Floats, KeyColumns]:
        """Keys, gradients and columns of one row class, scaled as the table's rule says."""
        own = [
            (push.keys, push.gradients, push.columns, weight)
            for push, weight in pushes
            if push.row_class == row_class
        ]
        if not own:
            none = np.empty((0, schema.dims[row_class]), np.float32)
            return np.empty(0, np.uint64), none, no_columns(schema.columns)
        keys_K, gradients_KD, columns = merge(own, self._pool)
        is_scaled = schema.is_scored and schema.rule.get("scale") == "fleet"
        if is_scaled and self.kind == GRADIENT:  # a difference comes from a rule that has scaled it
            scale = fleet_scale(schema.rule, columns["show_click"], self._examples)
            gradients_KD = gradients_KD * scale
        return keys_K, gradients_KD, columns

    def _sum_blocks(self) -> SummedBlocks | None:
        pushes = [
            (push.blocks, np.float32(weight))
            for push, weight in zip(self._pushes, self._weights, strict=True)
            if push.blocks is not None
        ]
        if not pushes:
            return None
        gradients, weight = pushes[0][0].gradients, pushes[0][1]
        if len(pushes) > 1 or weight != 1:  # a single push needs no copy
            gradients = np.multiply(gradients, weight)
        with np.errstate(over="ignore", invalid="ignore"):  # who needs a finite sum checks it
            for blocks, weight in pushes[1:]:
                gradients += blocks.gradients * weight
        absent = set.intersection(*(set(blocks.absent) for blocks, _ in pushes))
        return SummedBlocks(pushes[0][0].groups, gradients, absent)

    def _clipped(self, gradient: Floats) -> Floats:
        return gradient if self._clip is None else self._clip.clipped(gradient, self._norm)


def _join_classes(
    classes: Sequence[tuple[Keys, Floats, KeyColumns]],
) -> tuple[Keys, list[Floats], KeyColumns]:
    """Concatenate the keys and columns of a table's row classes; the gradients stay a list."""
    keys, _, columns = classes[0]
    if len(classes) > 1:
        keys = np.concatenate([keys for keys, _, _ in classes])
        columns = {name: np.concatenate([own[name] for _, _, own in classes]) for name in columns}
    return keys, [gradients for _, gradients, _ in classes], columns
