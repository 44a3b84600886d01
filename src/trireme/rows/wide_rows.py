"""Wide rows: the form of a row in snapshots, files and messages.

    (n, row_bytes) uint8  =  weights (D,) float32 | state (W,) float32 | statistics

D and W are those of the widest row class. State is planes of D floats, one float per weight, then
floats of the row. A row of a narrower class has the first weights, and the first floats of each
plane; the rest is zero. So a head has the same place with and without its tail.

Statistics of every row: version (of the table, when the row last changed) and time (data time of
the last push in seconds; 0: none). Scored tables add show and click as of the day of `time`,
delta_score (gained since the last export) and feature (of the last push of the key). Source of
these fields: Paddle's CtrCommonAccessor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trireme import _core
from trireme.protocol.wire import Array
from trireme.table import TableSchema

STAMP = [("version", "<u4"), ("time", "<u4")]
SCORE = [("show", "<f8"), ("click", "<f8"), ("delta_score", "<f4"), ("feature", "<u4")]

WideRows = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class RowLayout:
    """The layout of a table's wide rows. D = dim, W = state_floats."""

    dim: int
    state_floats: int
    is_scored: bool

    @classmethod
    def of(cls, schema: TableSchema, rows: _core.Table) -> RowLayout:
        return cls(schema.wide_dim, rows.state_floats, schema.is_scored)

    @property
    def statistics_type(self) -> np.dtype[Any]:
        return np.dtype(STAMP + SCORE if self.is_scored else STAMP)

    @property
    def row_bytes(self) -> int:
        return self._statistics_at + self.statistics_type.itemsize

    @property
    def _statistics_at(self) -> int:
        return 4 * (self.dim + self.state_floats)

    def weights(self, rows: WideRows) -> npt.NDArray[np.float32]:
        """(n, D), a view."""
        return rows[:, : 4 * self.dim].view(np.float32)

    def state(self, rows: WideRows) -> npt.NDArray[np.float32]:
        """(n, W), a view."""
        return rows[:, 4 * self.dim : self._statistics_at].view(np.float32)

    def statistics(self, rows: WideRows) -> Array:
        """(n,) records of `statistics_type`, a view."""
        return rows[:, self._statistics_at :].view(self.statistics_type)[:, 0]

    def join(self, weights: Array, state: Array, statistics: Array) -> WideRows:
        """Wide rows from (n, D) and (n, W) float32, and (n,) records."""
        rows = np.empty((len(weights), self.row_bytes), np.uint8)
        self.weights(rows)[:] = weights
        self.state(rows)[:] = state
        self.statistics(rows)[:] = statistics
        return rows
