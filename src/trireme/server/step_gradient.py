"""The pushes of one sync step, or a single push, as one update on the union of their batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from trireme import _core
from trireme.protocol.clipping import square_sum
from trireme.protocol.columns import KeyColumns
from trireme.protocol.dense_optimizers import GroupValues
from trireme.protocol.routing import Floats, Keys
from trireme.protocol.wire import Push, TablePush
from trireme.server.summing import summed
from trireme.table import TableSchema


class Rows(NamedTuple):
    """Of one table: keys, the gradients of each row class in their order, columns."""

    keys: Keys
    gradients: list[Floats]
    columns: KeyColumns


class Blocks(NamedTuple):
    """The gradient of a server's blocks; those in `absent` have none."""

    groups: list[GroupValues]
    gradients: Floats
    absent: set[str]


class Union:
    """Gradients of means over each stream's examples are weighted to the mean over all.

    norm: of the whole step, where its pushes ask for the clipping of that.
    """

    def __init__(self, pushes: Sequence[Push], pool: _core.Pool, norm: float | None = None) -> None:
        self._pushes, self._pool, self._norm = pushes, pool, norm
        self.examples = sum(push.examples for push in pushes)
        total = self.examples
        self._scales = [push.examples / total if total else 1.0 for push in pushes]
        self.ids = [push.id for push in pushes]
        self.time = max(push.time for push in pushes)
        self.kind = pushes[0].kind
        self._clip = pushes[0].clip

    def tables(self) -> list[str]:
        """Names of those that have rows in it."""
        return list(dict.fromkeys(part.table for push in self._pushes for part in push.tables))

    def values(self, name: str) -> dict[str, float | int]:
        """The rule's values of the step."""
        return next(part.values for part, _ in self._parts(name))

    def _parts(self, name: str) -> Iterator[tuple[TablePush, float]]:
        for push, scale in zip(self._pushes, self._scales, strict=True):
            for part in push.tables:
                if part.table == name:
                    yield part, scale

    def rows(self, schema: TableSchema) -> Rows:
        """Sums per key, clipped."""
        keys_K, gradients, columns = self._summed(schema)
        return Rows(keys_K, [self._clipped(of_class) for of_class in gradients], columns)

    def _summed(self, schema: TableSchema) -> tuple[Keys, list[Floats], KeyColumns]:
        parts = list(self._parts(schema.name))
        return summed(schema, parts, self.examples, self._pool, self.kind)

    def blocks(self) -> Blocks | None:
        """Sums, clipped; None where no push has any."""
        found = self._summed_blocks()
        return None if found is None else found._replace(gradients=self._clipped(found.gradients))

    def _summed_blocks(self) -> Blocks | None:
        parts = [
            (push.blocks, scale)
            for push, scale in zip(self._pushes, self._scales, strict=True)
            if push.blocks is not None
        ]
        if not parts:
            return None
        # A copy: received arrays are read-only, and torch wants to own what it may write to.
        gradients = np.multiply(parts[0][0].gradients, np.float32(parts[0][1]))
        for blocks, scale in parts[1:]:
            gradients += blocks.gradients * np.float32(scale)
        absent = set.intersection(*(set(blocks.absent) for blocks, _ in parts))
        return Blocks(parts[0][0].groups, gradients, absent)

    def _clipped(self, gradient: Floats) -> Floats:
        return gradient if self._clip is None else self._clip.clipped(gradient, self._norm)

    def square_sum(self, schemas: Sequence[TableSchema]) -> int | None:
        """Of all that it has here, unclipped: see `trireme.protocol.clipping.square_sum`."""
        gradients = [of for schema in schemas for of in self._summed(schema)[1]]
        if (blocks := self._summed_blocks()) is not None:
            gradients.append(blocks.gradients)
        sums = [square_sum(gradient) for gradient in gradients]
        return None if None in sums else sum(of for of in sums if of is not None)
