"""How the shows and ages of a table's rows are distributed, from samples that servers draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trireme.errors import TriremeError
from trireme.protocol.wire import Array, Arrays, need
from trireme.rpc import Call, Reply, RpcClient

TABLES_MAX = 32
"""Of a job with more tables those with the most rows are sampled."""
SHOWS = (0.0, 1.0, *(2.0**power for power in range(1, 21)))
AGES_S = (0, 60, 600, 3600, 6 * 3600, *(days * 86_400 for days in (1, 2, 4, 7, 14, 30, 60, 120)))
VERSIONS = (0, 1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True, kw_only=True)
class Bars:
    """kind: "show", "age_s" or "version". from_: the lower bound of each bar; the last one has no
    upper bound. rows: how many rows it has, estimated.
    """

    kind: str
    from_: Sequence[float]
    rows: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """Of the rows of a table that are in memory.

    num_in_memory, num_on_ssd: rows, of the servers that answered; num_silent: servers that did not.
    num_sampled: rows that the numbers are from; 0 of many: the
    table is too large to sample.
    bars: the shows of a scored table; ages since the newest push that has a data time, or where no
    push has one how many saves ago rows have changed.
    """

    table: str
    num_in_memory: int
    num_on_ssd: int
    num_sampled: int
    num_silent: int
    bars: Sequence[Bars]


def sample(
    client: RpcClient, servers: Sequence[str], tables: Sequence[str], timeout_s: float
) -> list[Distribution]:
    """The distributions of these tables."""
    calls = [Call(server, "ps.sample", {"table": table}) for table in tables for server in servers]
    replies = client.call_all(calls, timeout_s=timeout_s, return_errors=True) if calls else []
    num = len(servers)
    return [
        _distribution(table, replies[i * num : (i + 1) * num]) for i, table in enumerate(tables)
    ]


def _distribution(table: str, replies: Sequence[Reply | TriremeError]) -> Distribution:
    in_memory, on_ssd, is_scored = 0, 0, False
    # Of all samples, after those of none; a weight is the number of rows that one stands for.
    samples: list[tuple[Array, Array, Array, Array]] = [(np.empty(0),) * 4]
    answers = [reply for reply in replies if not isinstance(reply, TriremeError)]
    for reply in answers:
        arrays = Arrays(reply.arrays)
        times = arrays.take("times", np.uint32, (None,))
        num = need(reply.body, "in_memory", int)
        in_memory, on_ssd = in_memory + num, on_ssd + need(reply.body, "on_ssd", int)
        is_scored |= need(reply.body, "is_scored", bool)
        versions = arrays.take("versions", np.uint32, (len(times),))
        saves = need(reply.body, "version", int) - versions.astype(np.int64)
        shows = arrays.take("shows", np.float32, (None,))
        samples.append((np.full(len(times), num / max(len(times), 1)), times, saves, shows))
    weights, times, saves, shows = map(np.concatenate, zip(*samples, strict=True))
    bars = [_bars("show", SHOWS, shows, weights)] if is_scored else []
    is_timed = times > 0
    if is_timed.any():
        ages = times.max() - times[is_timed]
        bars.append(_bars("age_s", AGES_S, ages, weights[is_timed]))
    elif len(times):
        bars.append(_bars("version", VERSIONS, saves, weights))
    return Distribution(
        table=table,
        num_in_memory=in_memory,
        num_on_ssd=on_ssd,
        num_sampled=len(times),
        num_silent=len(replies) - len(answers),
        bars=bars,
    )


def _bars(kind: str, bounds: Sequence[float], values: Array, weights: Array) -> Bars:
    """Without the empty bars after the last row."""
    bins = np.clip(np.searchsorted(bounds, values, side="right") - 1, 0, len(bounds) - 1)
    rows = np.bincount(bins, weights, minlength=len(bounds))
    used = int(np.flatnonzero(rows).max(initial=0)) + 1
    return Bars(kind=kind, from_=[float(b) for b in bounds[:used]], rows=rows[:used].tolist())
