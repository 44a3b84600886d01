"""Looks at rows for people, which change nothing and move no row between memory and SSD.

ps.look     rows of some keys, and where they are
ps.sample   times and shows of some rows in memory
ps.top      the keys of the rows with the largest statistic
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from trireme import _core
from trireme.errors import BadRequest
from trireme.protocol.routing import NUM_BUCKETS, Keys, buckets_of
from trireme.protocol.row_places import MEMORY, NONE, PLACES, SSD
from trireme.protocol.wire import Arrays, need, need_time
from trireme.rows.row_statistics import Numbers, numbers_of
from trireme.rows.wide_rows import RowLayout
from trireme.rpc import Handler, Reply, Request
from trireme.server.assignment import consecutive
from trireme.server.row_scan import check_reply, read_rows
from trireme.server.served_tables import ServedTable
from trireme.server.state import ServerState

SAMPLE_ROWS = 8192
SAMPLE_BYTES_MAX = 64 << 20
LOOK_KEYS_MAX = 16
TOP_MAX = 10_000


class Looking:
    """The methods above. Threads: any."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    def handlers(self) -> dict[str, Handler]:
        return {"ps.look": self._on_look, "ps.sample": self._on_sample, "ps.top": self._on_top}

    def _on_look(self, request: Request) -> Reply:
        """Rows of (K,) distinct keys, 0 or more, and the schema that says what is in them."""
        table, arrays = self._state.table(request.body.get("table")), Arrays(request.arrays)
        keys_K = arrays.take("keys", np.uint64, (None,))
        arrays.end()
        check_reply("ps.look", request, len(keys_K), table.rows)
        if len(keys_K) > LOOK_KEYS_MAX:
            raise BadRequest(f"ps.look: expected at most {LOOK_KEYS_MAX} keys, found {len(keys_K)}")
        in_memory = _are_in_memory(table, keys_K)
        num_buckets = max(len(self._state.assignment.owned_buckets()), 1)
        is_present, wide = read_rows(table.rows, keys_K, num_buckets, self._state.pool)
        none, memory, ssd = map(PLACES.index, (NONE, MEMORY, SSD))
        places = np.where(is_present, np.where(in_memory, memory, ssd), none)
        body = {"schema": table.schema.declaration()}
        return Reply(body, [places.astype(np.uint8), wide])

    def _on_sample(self, request: Request) -> Reply:
        """All rows in memory of a small table, else those of as few buckets as have about
        SAMPLE_ROWS: a bucket is a random part of the keys. Copies at most SAMPLE_BYTES_MAX; of a
        table whose buckets are larger it has no rows.
        """
        state, table = self._state, self._state.table(request.body.get("table"))
        layout = RowLayout.of(table.schema, table.rows)
        tier = table.rows.tier
        num_on_ssd = 0 if tier is None else int(tier["rows"])
        num_in_memory = max(table.rows.rows - num_on_ssd, 0)
        statistics = np.empty(0, layout.statistics_type)
        owned = state.assignment.owned_buckets()
        in_bucket = num_in_memory / max(len(owned), 1)
        if 0 < in_bucket * layout.row_bytes <= SAMPLE_BYTES_MAX:
            rows_max = min(SAMPLE_ROWS, SAMPLE_BYTES_MAX // layout.row_bytes)
            count = int(min(max(rows_max / in_bucket, 1), len(owned)))
            first = int(owned[np.random.default_rng().integers(len(owned) - count + 1)])
            count = NUM_BUCKETS - first if count == len(owned) else min(count, NUM_BUCKETS - first)
            widths = [layout.row_bytes - statistics.itemsize, statistics.itemsize]
            content = _core.snapshot_columns(
                table.rows, first, count, 0, 0, widths, stay=tier is not None
            )
            statistics = np.asarray(content.columns[1]).view(layout.statistics_type)
        shows = statistics["show"] if layout.is_scored else np.empty(0)
        body = {
            "in_memory": num_in_memory,
            "on_ssd": num_on_ssd,
            "version": table.rows.version,
            "is_scored": layout.is_scored,
        }
        columns = [np.ascontiguousarray(statistics[name]) for name in ("time", "version")]
        return Reply(body, [*columns, shows.astype(np.float32)])

    def _on_top(self, request: Request) -> Reply:
        """Reads all rows, some buckets at a time, those on SSD too."""
        body = request.body
        table = self._state.table(body.get("table"))
        by, k, time = need(body, "by", str), need(body, "k", int), need_time(body)
        if not 1 <= k <= TOP_MAX:
            raise BadRequest(f"ps.top: expected k of 1 to {TOP_MAX}, found {k}")
        keys, numbers = np.empty(0, np.uint64), np.empty(0)
        for first, count in _runs(table, self._state.assignment.owned_buckets()):
            others, of_others = _ranked(table, first, count, by, time)
            keys, numbers = np.concatenate([keys, others]), np.concatenate([numbers, of_others])
            if len(keys) > k:
                best = np.lexsort((keys, -numbers))[:k]
                keys, numbers = keys[best], numbers[best]
        return Reply({}, [keys, numbers])


def _are_in_memory(table: ServedTable, keys_K: Keys) -> npt.NDArray[np.bool_]:
    """Of each key, whether its row, if it has one, is in memory."""
    is_there = np.ones(len(keys_K), np.bool_)
    if table.rows.tier is not None:
        for i, bucket in enumerate(buckets_of(keys_K).tolist()):
            widths = [table.rows.row_bytes]
            content = _core.snapshot_columns(table.rows, bucket, 1, 0, 0, widths, stay=True)
            is_there[i] = keys_K[i] in content.keys
    return is_there


def _runs(table: ServedTable, owned: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """First and number of owned buckets that follow one another and have about SAMPLE_ROWS rows:
    few calls, which copy without Python's lock, hold up pulls less than one for each bucket.
    """
    rows_max = min(SAMPLE_ROWS, SAMPLE_BYTES_MAX // table.rows.row_bytes)
    at_once = int(max(1, rows_max * len(owned) // max(table.rows.rows, 1)))
    for part in consecutive(owned):
        for begin in range(0, len(part), at_once):
            yield int(part[begin]), len(part[begin : begin + at_once])


def _ranked(table: ServedTable, first: int, count: int, by: str, time: int) -> tuple[Keys, Numbers]:
    """The keys of some buckets and the statistic of each. Raises BadRequest: there is none such."""
    layout = RowLayout.of(table.schema, table.rows)
    of_statistics = layout.statistics_type.itemsize
    widths = [layout.row_bytes - of_statistics, of_statistics]
    content = _core.snapshot_columns(table.rows, first, count, 0, 0, widths)
    statistics = np.asarray(content.columns[1]).view(layout.statistics_type)
    return np.asarray(content.keys), numbers_of(table.schema, statistics, by, time)
