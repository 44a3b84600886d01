"""Requests that remove expired rows of a server's tables and report what has become of keys."""

from functools import partial

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
    need_time(request.body), need(request.body, "day_over", bool), state.assignment.map()
    counts = state.shrink(request.body)
    return state.journal.answered(Reply({"tables": counts}))


def _counters(state: ServerState) -> dict[str, dict[str, int]]:
    counts = {name: table.rows.counters for name, table in list(state.tables.items())}
    return {name: {kind: counts[name][kind] for kind in KEY_COUNTERS} for name in counts}
