"""A worker's calls that remove rows and read what has become of their keys."""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

from trireme.protocol.routing import Keys
from trireme.rpc import Call
from trireme.worker.client import WorkerClient

SHRINK_SLICES = 64
"""Calls that a server's buckets are shrunk in: each is short, however large the table is."""

REMOVED_KEYS = 1 << 16
"""Keys of a call that removes their rows: with SSD, room for these rows is found at once."""

KeyCounts = dict[str, dict[str, int]]
"""Table -> number of keys by what has become of them."""


def shrink(client: WorkerClient, *, time: int, day_over: bool) -> KeyCounts:
    """Remove rows that have expired at the data time from all servers; workers may push meanwhile.
    day_over: its day has ended: shows and clicks decay by one more day. Returns table -> "expired"
    and "evicted": rows removed.
    """
    body = {"slices": SHRINK_SLICES, "time": time, "day_over": day_over}
    bodies = [{"slice": index, **body} for index in range(SHRINK_SLICES)]
    return _totals(client, "policy.shrink", bodies)


def remove(client: WorkerClient, table: str, keys: Keys) -> int:
    """Remove the rows of keys, and what filters have counted of them, from all servers; returns how
    many rows there were.
    """
    servers, num_removed = client.servers, 0
    for first in range(0, len(keys), REMOVED_KEYS):
        part = [keys[first : first + REMOVED_KEYS]]
        calls = [Call(to, "ps.remove", {"table": table}, part) for to in servers.endpoints]
        replies = servers.until_current("ps.remove", partial(servers.call_all, calls))
        num_removed += sum(int(reply.body["rows"]) for reply in replies)
    return num_removed


def counters(client: WorkerClient) -> KeyCounts:
    """Table -> counts of keys on all servers since they started: "admitted" keys got a row,
    "rejected" did not (each push of one counts), "expired" and "evicted" lost theirs.
    """
    return _totals(client, "policy.counters", [{}])


def _totals(client: WorkerClient, method: str, bodies: Sequence[dict[str, Any]]) -> KeyCounts:
    """The sums over all servers and calls."""
    totals: dict[str, Counter[str]] = {}
    for body in bodies:
        for reply in client.servers.everywhere(method, body):
            for table, numbers in reply.body["tables"].items():
                totals.setdefault(table, Counter()).update(numbers)
    return {table: dict(counts) for table, counts in totals.items()}
