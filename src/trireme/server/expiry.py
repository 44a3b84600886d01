"""Requests that remove expired rows of a server's tables and report what has become of keys."""

from collections.abc import Mapping
from typing import Any

from trireme.errors import BadRequest
from trireme.protocol.routing import NUM_BUCKETS
from trireme.protocol.wire import need, need_time
from trireme.rpc import Deferred, Handler, Reply, Request
from trireme.server.state import ServerState

KEY_COUNTERS = ("admitted", "rejected", "expired", "evicted")


class ExpiryHandlers:
    """The methods policy.shrink and policy.counters. Threads: any; buckets lock one by one."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    def handlers(self) -> dict[str, Handler]:
        return {"policy.shrink": self._on_shrink, "policy.counters": self._on_counters}

    def _on_shrink(self, request: Request) -> Reply | Deferred:
        """Shrink one of `slices` slices of this server's buckets, in all tables."""
        slices, index = need(request.body, "slices", int), need(request.body, "slice", int)
        if not 0 <= index < slices <= NUM_BUCKETS:
            raise BadRequest(
                f"policy.shrink: expected 0 <= slice < slices <= {NUM_BUCKETS},"
                f" found {index}, {slices}"
            )
        need_time(request.body), need(request.body, "day_over", bool), self._state.map()
        journal = self._state.journal
        with journal.changing_once():
            journal.record("policy.shrink", request.body)
            counts = shrink_slice(self._state, request.body)
        return journal.answered(Reply({"tables": counts}))

    def _on_counters(self, request: Request) -> Reply:
        del request
        counts = {}
        for name, table in list(self._state.tables.items()):
            counters = table.rows.counters
            counts[name] = {counter: counters[counter] for counter in KEY_COUNTERS}
        return Reply({"tables": counts})


def shrink_slice(state: ServerState, body: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """Execute a checked `policy.shrink`; returns the numbers of rows removed."""
    time, day_over = need_time(body), need(body, "day_over", bool)
    buckets = state.map().owned_by(state.index)[body["slice"] :: body["slices"]].tolist()
    counts = {}
    for name, table in list(state.tables.items()):
        version = table.rows.version
        removed = [table.rows.shrink(bucket, time, day_over, version) for bucket in buckets]
        counts[name] = {
            "expired": sum(expired for expired, _ in removed),
            "evicted": sum(evicted for _, evicted in removed),
        }
    return counts
