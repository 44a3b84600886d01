"""The hot set: the rows most shown, within a given number, over all servers.

Rows fall into bins by a number of 32 bits; those of one bin count as equal: shows that differ by
less than 0.05 percent, times by less than 1.2 hours. Servers count their rows per bin; the worker
finds the bin where the number is reached, and what each server may save. So the number is never
passed, though training goes on.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from trireme import _core
from trireme.checkpoint.format.row_files import Columns
from trireme.checkpoint.server_side.jobs import Progress, in_parallel
from trireme.errors import BadRequest
from trireme.protocol.wide_rows import RowLayout
from trireme.protocol.wire import Array
from trireme.server.state import ServedTable, ServerState

LOW_BITS = 12
BUCKETS_PER_CALL = 16

Bins = npt.NDArray[np.uint32]


def check_hot(mode: str, hot: int | float | None) -> None:
    """Raises BadRequest for a number or share that goes with another mode, or is out of range."""
    if (mode == "hot") != (hot is not None):
        raise BadRequest(
            "save: expected hot=, a number of rows or a share of them, with mode 'hot' and no"
            f" other, found hot={hot!r} with {mode!r}"
        )
    if hot is None:
        return
    is_right = 0 < hot <= 1 if isinstance(hot, float) else type(hot) is int and hot >= 1
    if not is_right:
        raise BadRequest(
            f"save: expected hot to be a whole number >= 1 or a share in (0, 1], found {hot!r}"
        )


def bins_of(statistics: Array, newest: int) -> Bins:
    """(n,) the higher, the more shown; of tables without shows, the more recently pushed.

    newest: version of the table.
    """
    if "show" in (statistics.dtype.names or ()):
        shows = np.maximum(statistics["show"], 0).astype(np.float32)
        # The bits of floats >= 0 are in their order.
        bins: Bins = shows.view(np.uint32) >> np.uint32(LOW_BITS)
        return bins
    oldest = max(newest - (1 << LOW_BITS) + 1, 0)
    recent = np.clip(statistics["version"].astype(np.int64), oldest, newest) - oldest
    times = statistics["time"].astype(np.int64) >> LOW_BITS << LOW_BITS
    return (times | recent).astype(np.uint32)


# ---- on the servers ----


def count_bins(server: ServerState, progress: Progress) -> dict[str, Any]:
    """Table -> bins that have rows, and how many."""
    owned = server.map().owned_by(server.index)
    counts: dict[str, dict[int, int]] = {}
    lock = threading.Lock()

    def count(name: str, table: ServedTable, buckets: Array) -> None:
        columns = Columns.of(RowLayout.of(table.schema, table.rows))
        newest = table.rows.version
        for bucket in buckets.tolist():
            found = _core.snapshot_columns(table.rows, bucket, 1, 0, 0, columns.widths)
            bins, numbers = np.unique(
                bins_of(columns.statistics_of(found), newest), return_counts=True
            )
            with lock:
                of_table = counts[name]
                for bin, number in zip(bins.tolist(), numbers.tolist(), strict=True):
                    of_table[bin] = of_table.get(bin, 0) + number
            progress.add(1)

    tasks = []
    for name, table in list(server.tables.items()):
        counts[name] = {}
        progress.expect(len(owned))
        tasks += [
            partial(count, name, table, owned[at : at + BUCKETS_PER_CALL])
            for at in range(0, len(owned), BUCKETS_PER_CALL)
        ]
    in_parallel(tasks, progress)
    return {name: [list(of_table), list(of_table.values())] for name, of_table in counts.items()}


@dataclass
class Budget:
    """How many rows of a table this server may save: above a bin, and in it."""

    bin: int
    above: int
    within: int

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    def take(self, bins: Bins) -> npt.NDArray[np.bool_]:
        """(n,) which rows to save. Threads: any."""
        above, within = np.flatnonzero(bins > self.bin), np.flatnonzero(bins == self.bin)
        with self._lock:
            above, within = above[: self.above], within[: self.within]
            self.above -= len(above)
            self.within -= len(within)
        mask = np.zeros(len(bins), np.bool_)
        mask[above] = mask[within] = True
        return mask


# ---- on the worker ----


def budgets_of(counted: Sequence[Mapping[str, Any]], hot: float) -> dict[str, list[Any]]:
    """Table -> [bin, [rows above it and in it that each server may save]].

    Args:
        counted: of each server, as count_bins has it.
        hot: a number of rows, or a share of them.
    """
    budgets: dict[str, list[Any]] = {}
    for name in {name for of in counted for name in of}:
        servers = [dict(zip(*of.get(name, ([], [])), strict=True)) for of in counted]
        total = sum(sum(server.values()) for server in servers)
        wanted = int(hot * total) if type(hot) is float else min(int(hot), total)
        of_bin: dict[int, int] = {}
        for server in servers:
            for bin, number in server.items():
                of_bin[bin] = of_bin.get(bin, 0) + number
        above, last = 0, 0
        for last in sorted(of_bin, reverse=True):
            if above + of_bin[last] >= wanted:
                break
            above += of_bin[last]
        budgets[name] = [last, _shares(servers, last, wanted - above)]
    return budgets


def _shares(servers: Sequence[Mapping[int, int]], last: int, left: int) -> list[list[int]]:
    """All above the last bin; in it as many as are left, the first servers' first."""
    shares = []
    for server in servers:
        within = min(left, server.get(last, 0))
        left -= within
        shares.append([sum(number for bin, number in server.items() if bin > last), within])
    return shares
