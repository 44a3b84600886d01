"""Requests that remove expired rows of a server's tables and report what has become of keys."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from trireme.errors import BadRequest
from trireme.protocol.routing import NUM_BUCKETS
from trireme.protocol.wire import need, need_time
from trireme.rpc import Deferred, Handler, Reply, Request
from trireme.server.state import ServerState

KEY_COUNTERS = ("admitted", "rejected", "expired", "evicted")


def expiry_handlers(state: ServerState) -> dict[str, Handler]:
    """The methods policy.*. Threads: any; buckets lock one by one."""
    return {
        "policy.shrink": partial(_on_shrink, state),
        "policy.counters": lambda _: Reply({"tables": _counters(state)}),
    }


def _on_shrink(state: ServerState, request: Request) -> Reply | Deferred:
    """Shrink one of `slices` slices of this server's buckets, in all tables."""
    slices, index = need(request.body, "slices", int), need(request.body, "slice", int)
    if not 0 <= index < slices <= NUM_BUCKETS:
        raise BadRequest(
            f"policy.shrink: expected 0 <= slice < slices <= {NUM_BUCKETS}, found {index}, {slices}"
        )
    need_time(request.body), need(request.body, "day_over", bool), state.map()
    with state.journal.changing_once():
        state.journal.record("policy.shrink", request.body)
        counts = shrink_slice(state, request.body)
    return state.journal.answered(Reply({"tables": counts}))


def _counters(state: ServerState) -> dict[str, dict[str, int]]:
    counts = {name: table.rows.counters for name, table in list(state.tables.items())}
    return {name: {kind: counts[name][kind] for kind in KEY_COUNTERS} for name in counts}


def shrink_slice(state: ServerState, body: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """Execute a checked `policy.shrink`; returns the numbers of rows removed."""
    time, day_over = need_time(body), need(body, "day_over", bool)
    buckets = state.owned_buckets()[body["slice"] :: body["slices"]].tolist()
    counts = {}
    for name, table in list(state.tables.items()):
        version = table.rows.version
        removed = [table.rows.shrink(bucket, time, day_over, version) for bucket in buckets]
        expired, evicted = (sum(numbers) for numbers in zip((0, 0), *removed, strict=True))
        counts[name] = {"expired": expired, "evicted": evicted}
    return counts
