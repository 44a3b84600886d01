"""Which rows of a table a save takes.

The hot set is the most shown rows of all servers, within a given number. Rows fall into bins by a
number of 32 bits. Those of one bin count as equal: shows that differ by less than 0.05 percent,
times by less than 1.2 hours. Servers count their rows per bin; the worker finds the bin in which
the number is reached, and what each server may save (worker_side/save.py). So a save never
has more rows, though training continues.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from trireme import _core
from trireme.checkpoint.format.row_files import RowColumns
from trireme.checkpoint.format.row_writer import ChooseRows
from trireme.checkpoint.format.save_modes import SAVE_MODES
from trireme.checkpoint.server_side.operations import OperationProgress, in_parallel
from trireme.errors import BadRequest, check_choice
from trireme.policy import ScorePolicy, policy_of
from trireme.protocol.wire import Array, need
from trireme.rows.row_statistics import faded, scores, unseen_days
from trireme.server.served_tables import ServedTable
from trireme.server.state import ServerState

LOW_BITS = 12
BUCKETS_PER_CALL = 16

Bins = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class RowsToSave:
    """Chooses rows by the save's mode, the data time, and the budgets of a hot set."""

    mode: str
    time: int
    budgets: Mapping[str, HotBudget]

    @staticmethod
    def from_wire(body: Mapping[str, Any], server: int) -> RowsToSave:
        budgets = {}
        for name, budget in need(body, "budgets", dict).items():
            match budget:
                case [int(bin), list(servers)] if 0 <= server < len(servers):
                    share = servers[server]
                case _:
                    raise BadRequest(f"checkpoint: expected a bin and shares, found {budget!r}")
            match share:
                case [int(above), int(within)]:
                    budgets[str(name)] = HotBudget(bin, above, within)
                case _:
                    shown = repr(share)[:150]
                    raise BadRequest(f"checkpoint: expected two numbers as a share, found {shown}")
        mode = need(body, "mode", str)
        check_choice("checkpoint", SAVE_MODES, mode=mode)
        return RowsToSave(mode, need(body, "time", int), budgets)

    def of(self, table: ServedTable) -> ChooseRows | None:
        """Which rows of the table to save; None: all that the version asks for."""
        schema = table.schema
        if self.mode == "hot":
            if schema.name not in self.budgets:
                raise BadRequest(
                    f"checkpoint: expected a budget of table {schema.name!r}, which was made"
                    f" after rows were counted, found those of {sorted(self.budgets)}"
                )
            budget, newest = self.budgets[schema.name], table.rows.version
            return lambda statistics: budget.spend(bins_of(statistics, newest))
        if self.mode in ("base", "delta") and schema.is_scored:
            policy = policy_of(schema.policy)
            assert isinstance(policy, ScorePolicy)
            return lambda statistics: exported(policy, statistics, self.mode, self.time)
        return None


def exported(
    policy: ScorePolicy, statistics: npt.NDArray[Any], mode: str, time: int
) -> npt.NDArray[np.bool_]:
    """Which rows of a scored table a base or delta takes, by Fleet's formulas.

    Args:
        statistics: (n,) records, as RowLayout.statistics gives them.
        mode: "base": rows with a score of at least base_threshold, a push within the last
            delta_keep_days, and a delta_score that is not negative. "delta": those whose
            delta_score is at least delta_threshold.
        time: data time in seconds at which rows are scored; for a base at the end of its day.

    Returns:
        (n,) mask.

    Source: Save() of Paddle's CtrCommonAccessor.
    """
    shows, clicks = faded(policy, statistics, time, day_over=mode == "base")
    chosen: npt.NDArray[np.bool_] = scores(policy, shows, clicks) >= policy.base_threshold
    chosen &= statistics["delta_score"] >= (policy.delta_threshold if mode == "delta" else 0.0)
    if policy.delta_keep_days is not None:
        chosen &= unseen_days(statistics, time) <= policy.delta_keep_days
    return chosen


# ---- the hot set ----


def bins_of(statistics: Array, newest: int) -> Bins:
    """(n,) the higher, the more shown; of tables without shows, the more recently pushed.
    `newest`: version of the table.
    """
    if "show" in (statistics.dtype.names or ()):
        shows = np.maximum(statistics["show"], 0).astype(np.float32)
        # The bits of floats >= 0 are in the order of their values.
        bins: Bins = shows.view(np.uint32) >> np.uint32(LOW_BITS)
        return bins
    oldest = max(newest - (1 << LOW_BITS) + 1, 0)
    recent = np.clip(statistics["version"].astype(np.int64), oldest, newest) - oldest
    times = statistics["time"].astype(np.int64) >> LOW_BITS << LOW_BITS
    return (times | recent).astype(np.uint32)


def count_bins(server: ServerState, progress: OperationProgress) -> dict[str, Any]:
    """Table -> [bins that have rows, number of rows in each]."""
    owned = server.assignment.owned_buckets()
    counts: dict[str, Counter[int]] = {}
    lock = threading.Lock()

    def count(name: str, table: ServedTable, buckets: Array) -> None:
        columns = RowColumns.of_schema(table.schema, table.rows)
        newest = table.rows.version
        for bucket in buckets.tolist():
            snapshot = _core.snapshot_columns(table.rows, bucket, 1, 0, 0, columns.widths)
            bins, numbers = np.unique(
                bins_of(columns.statistics_of(snapshot), newest), return_counts=True
            )
            with lock:
                counts[name].update(dict(zip(bins.tolist(), numbers.tolist(), strict=True)))
            progress.add(1)

    tasks = []
    for name, table in list(server.tables.items()):
        counts[name] = Counter()
        progress.expect(len(owned))
        tasks += [
            partial(count, name, table, owned[first : first + BUCKETS_PER_CALL])
            for first in range(0, len(owned), BUCKETS_PER_CALL)
        ]
    in_parallel(tasks, progress)
    return {name: [list(bins), list(bins.values())] for name, bins in counts.items()}


@dataclass
class HotBudget:
    """How many rows of a table this server may save: above a bin, and in it. Threads: any."""

    bin: int
    above: int
    within: int

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    def spend(self, bins: Bins) -> npt.NDArray[np.bool_]:
        """(n,) which rows to save; they no longer count as left."""
        above, within = np.flatnonzero(bins > self.bin), np.flatnonzero(bins == self.bin)
        with self._lock:
            above, within = above[: self.above], within[: self.within]
            self.above -= len(above)
            self.within -= len(within)
        mask = np.zeros(len(bins), np.bool_)
        mask[above] = mask[within] = True
        return mask
