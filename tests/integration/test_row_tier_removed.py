"""What a server with rows on SSD knows of removed keys when it is started again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.integration.test_row_tier import Kept
from trireme import _core
from trireme.policy import Policy
from trireme.protocol.routing import NUM_BUCKETS


def test_a_delta_after_a_start_removes_no_row_that_has_come_back(tmp_path: Path) -> None:
    server, day_s = Kept(tmp_path / "state", [tmp_path / "ssd"]), 86_400
    server.begin(policy=Policy(ttl_s=day_s))
    come_back, stay_away = server.KEYS[:60_000], server.KEYS[60_000:80_000]
    new = server.KEYS[80_000:]

    def push(keys: Any, day: int) -> None:
        for some in np.array_split(keys, 60):
            server.push(some, time=day * day_s)

    def changes(since: int) -> tuple[set[int], set[int]]:
        """The keys that a delta removes, and those whose rows it has."""
        rows = server.state.tables["t"].rows
        delta = _core.snapshot_columns(rows, 0, NUM_BUCKETS, since, since, [rows.row_bytes])
        return set(delta.removed.tolist()), set(delta.keys.tolist())

    push(server.KEYS[:80_000], day=1)
    server.state.raise_version(2)
    rows = server.state.tables["t"].rows
    for bucket in range(NUM_BUCKETS):
        rows.shrink(bucket, 3 * day_s, True, 2)
    assert rows.rows == 0
    push(come_back, day=4)
    server.state.raise_version(3)
    push(new, day=4)
    for _ in range(2):
        removed, changed = changes(since=1)
        assert removed - changed == set(stay_away.tolist())
        assert changed == set(come_back.tolist()) | set(new.tolist())
        assert changes(since=2) == (set(), set(new.tolist()))
        use = server.state.tables["t"].rows.tier
        assert use is not None
        assert use["rows"] > 10_000
        server.snapshot()
        server.close()
        server.open()
    server.close()
