"""A worker's calls that shrink tables and read what has become of their keys."""

from collections import Counter

from trireme.worker.client import WorkerClient

SHRINK_SLICES = 64
"""Calls that a server's buckets are shrunk in: each is short, however large the table is."""

KeyCounts = dict[str, dict[str, int]]
"""Table -> number of keys by what has become of them."""


def shrink(client: WorkerClient, *, time: int, day_over: bool) -> KeyCounts:
    """Remove rows that have expired from all servers. Workers may push meanwhile.

    Args:
        time: data time in seconds; rows are judged as of it.
        day_over: the day of `time` has ended: shows and clicks decay by one more day.

    Returns:
        Table -> "expired" and "evicted": rows removed.
    """
    totals: dict[str, Counter[str]] = {}
    for index in range(SHRINK_SLICES):
        body = {"slice": index, "slices": SHRINK_SLICES, "time": time, "day_over": day_over}
        for reply in client.servers.everywhere("policy.shrink", body):
            _add(totals, reply.body["tables"])
    return {table: dict(counts) for table, counts in totals.items()}


def counters(client: WorkerClient) -> KeyCounts:
    """Table -> counts of keys on all servers since they started: "admitted" keys got a row,
    "rejected" did not (each push of one counts), "expired" and "evicted" lost theirs.
    """
    totals: dict[str, Counter[str]] = {}
    for reply in client.servers.everywhere("policy.counters", {}):
        _add(totals, reply.body["tables"])
    return {table: dict(counts) for table, counts in totals.items()}


def _add(totals: dict[str, Counter[str]], counts: KeyCounts) -> None:
    for table, numbers in counts.items():
        totals.setdefault(table, Counter()).update(numbers)
