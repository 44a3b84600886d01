"""What a server tells of itself in `ps.stats`."""

from collections import Counter
from typing import Any

from trireme.server.state import ServerState


def stats_of(state: ServerState) -> dict[str, Any]:
    """Counts since the start; `staleness` and `ahead` are histograms of pushes, `tier` is None for
    a table in memory.
    """
    with state.lock:
        return {
            "tables": {
                name: {"rows": t.rows.rows, "bytes": t.rows.bytes, "tier": t.rows.tier}
                for name, t in state.tables.items()
            },
            "blocks": len(state.blocks),
            "block_bytes": state.blocks.num_bytes,
            "pushes": state.streams.num_pushes,
            "missing": sum(state.counts.read("missing").values()),
            "staleness": _histogram(state.streams.staleness),
            "ahead": _histogram(state.pacing.ahead),
        }


def sync_waits(state: ServerState) -> dict[str, int]:
    """How many pushes are staged and not applied, and how many pulls wait for a step of sync."""
    with state.lock:
        return state.staging.num_held()


def _histogram(counts: Counter[int]) -> dict[str, int]:
    return {str(steps): count for steps, count in sorted(counts.items())}
