"""What the pushes of a step come to for one table: sums per key, in the form the rows take."""

from __future__ import annotations

from collections.abc import Sequence

from trireme import _core
from trireme.protocol.columns import KeyColumns, fleet_scale, joined, merge, nothing
from trireme.protocol.routing import Floats, Keys
from trireme.protocol.wire import TablePush
from trireme.table import TableSchema

Parts = Sequence[tuple[TablePush, float]]
"""What each push has for the table, with the weight of its gradients."""


def summed(
    schema: TableSchema, parts: Parts, examples: int, pool: _core.Pool, kind: str
) -> tuple[Keys, list[Floats], KeyColumns]:
    """Keys, the gradients of each row class in the order of its keys, and columns; each key once.

    examples: of the whole step. kind: of the pushes: gradients are scaled as the table says.
    """
    return joined(
        [
            _of_class(schema, row_class, parts, examples, pool, kind)
            for row_class in range(len(schema.dims))
        ]
    )


def _of_class(
    schema: TableSchema, row_class: int, parts: Parts, examples: int, pool: _core.Pool, kind: str
) -> tuple[Keys, Floats, KeyColumns]:
    """Keys, gradients and columns of one row class, summed over the parts and scaled."""
    own = [
        (part.keys, part.gradients, part.columns, scale)
        for part, scale in parts
        if part.row_class == row_class
    ]
    if not own:
        return nothing(schema.dims[row_class], schema.columns)
    keys_K, gradients_KD, columns = merge(own, pool)
    is_scaled = schema.is_scored and schema.rule.get("scale") == "fleet"
    if is_scaled and kind == "gradient":  # else whoever applied the rule has done it
        gradients_KD = gradients_KD * fleet_scale(schema.rule, columns["show_click"], examples)
    return keys_K, gradients_KD, columns
