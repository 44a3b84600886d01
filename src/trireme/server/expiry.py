"""Policies at work: expiry and counters of a server's tables, and which rows an export takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from trireme.errors import BadRequest
from trireme.policy import ScorePolicy, policy_of
from trireme.protocol.wire import need, need_time
from trireme.rpc import Deferred, Reply, Request
from trireme.server.shard import Handler, Shard
from trireme.table import TableSchema
from trireme.worker.client import Client

DAY_S = 86_400
SHRINK_SLICES = 64
"""How many calls a server's buckets are shrunk in: each is short, whatever the table's size."""

Counts = dict[str, dict[str, int]]
MODES = ("full", "delta", "base", "batch", "hot")


class PolicyHandlers:
    """policy.shrink and policy.counters. Threads: any; a bucket is locked while it is shrunk, no
    longer.
    """

    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    def handlers(self) -> dict[str, Handler]:
        return {"policy.shrink": self._on_shrink, "policy.counters": self._on_counters}

    def _on_shrink(self, request: Request) -> Reply | Deferred:
        """One of `slices` slices of this server's buckets, of all tables."""
        slices, index = need(request.body, "slices", int), need(request.body, "slice", int)
        if not 0 <= index < slices <= 4096:
            raise BadRequest(
                f"policy.shrink: expected 0 <= slice < slices <= 4096, found {index}, {slices}"
            )
        need_time(request.body), need(request.body, "day_over", bool), self._shard.map()
        journal = self._shard.journal
        with journal.judging():
            journal.record("policy.shrink", request.body)
            counts = shrink_slice(self._shard, request.body)
        return journal.answered(Reply({"tables": counts}))

    def _on_counters(self, request: Request) -> Reply:
        del request
        counts: Counts = {}
        for name, table in list(self._shard.tables.items()):
            found = table.rows.counters
            counts[name] = {of: found[of] for of in ("admitted", "rejected", "expired", "evicted")}
        return Reply({"tables": counts})


def shrink_slice(shard: Shard, body: Mapping[str, Any]) -> Counts:
    """Do what a request `policy.shrink` that has been checked says."""
    time, day_over = need_time(body), need(body, "day_over", bool)
    buckets = shard.map().owned_by(shard.index)[body["slice"] :: body["slices"]].tolist()
    counts: Counts = {}
    for name, table in list(shard.tables.items()):
        version = table.rows.version
        shrunk = [table.rows.shrink(bucket, time, day_over, version) for bucket in buckets]
        counts[name] = {
            "expired": sum(expired for expired, _ in shrunk),
            "evicted": sum(evicted for _, evicted in shrunk),
        }
    return counts


def shrink(client: Client, *, time: int, day_over: bool) -> Counts:
    """Remove, on all servers, the rows whose time is over; others may push meanwhile.

    Args:
        time: data time in seconds that rows are judged at.
        day_over: at the end of that day: shows and clicks have faded by one more.

    Returns:
        Table -> "expired" and "evicted": rows removed.
    """
    totals: dict[str, Counter[str]] = {}
    for index in range(SHRINK_SLICES):
        body = {"slice": index, "slices": SHRINK_SLICES, "time": time, "day_over": day_over}
        for reply in client.everywhere("policy.shrink", body):
            _add(totals, reply.body["tables"])
    return {table: dict(counts) for table, counts in totals.items()}


def counters(client: Client) -> Counts:
    """Table -> what has become of keys on all servers since they started: "admitted" got a row,
    "rejected" did not (each push of theirs counts), "expired" and "evicted" lost theirs.
    """
    totals: dict[str, Counter[str]] = {}
    for reply in client.everywhere("policy.counters", {}):
        _add(totals, reply.body["tables"])
    return {table: dict(counts) for table, counts in totals.items()}


def _add(totals: dict[str, Counter[str]], counts: Mapping[str, Mapping[str, int]]) -> None:
    for table, found in counts.items():
        totals.setdefault(table, Counter()).update(found)


# ---- statistics at a moment of data time ----


def unseen_days(statistics: npt.NDArray[Any], time: int) -> npt.NDArray[np.int64]:
    """(n,) whole days since the last push of each row; 0 where one of the two has no data time."""
    last = statistics["time"].astype(np.int64)
    days = time // DAY_S - last // DAY_S
    return np.where((last > 0) & (days > 0), days, 0)


def faded(
    policy: ScorePolicy, statistics: npt.NDArray[Any], time: int, day_over: bool
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """(n,) shows and clicks of each row as they are at a data time."""
    decay = np.float64(policy.decay_rate) ** (unseen_days(statistics, time) + int(day_over))
    return statistics["show"] * decay, statistics["click"] * decay


def selected(
    schema: TableSchema, statistics: npt.NDArray[Any], mode: str, time: int, day_over: bool
) -> npt.NDArray[np.bool_]:
    """Which rows of a table with a ScorePolicy an export takes, by Fleet's formulas.

    Args:
        statistics: (n,) records, as RowLayout.statistics gives them.
        mode: "full" and "batch": all. "hot": rows with a score of at least base_threshold and a
            push within the last delta_keep_days. "base": those of "hot" whose delta_score is not
            negative. "delta": those whose delta_score is at least delta_threshold.
        time, day_over: the moment of data time that scores are of, see `shrink`.

    Returns:
        (n,) mask.

    Source: Save() of Paddle's CtrCommonAccessor.
    """
    if mode not in MODES:
        raise BadRequest(f"selected: expected mode to be one of {MODES}, found {mode!r}")
    policy = policy_of(schema.policy)
    if mode in ("full", "batch") or not isinstance(policy, ScorePolicy):
        return np.ones(len(statistics), np.bool_)
    show, click = faded(policy, statistics, time, day_over)
    chosen: npt.NDArray[np.bool_] = policy.score(show, click) >= policy.base_threshold
    if mode != "hot":
        gained = policy.delta_threshold if mode == "delta" else 0.0
        chosen &= statistics["delta_score"] >= gained
    if policy.delta_keep_days is not None:
        chosen &= unseen_days(statistics, time) <= policy.delta_keep_days
    return chosen
