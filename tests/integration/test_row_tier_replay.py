"""The records of a log are replayed with the rows of a push read from SSD together, and with the
same bits.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.integration.pushed_server import PushedServer
from tests.seeds import SEED
from trireme.server.attendance import Attendance
from trireme.server.log.replay import replay
from trireme.server.row_tier import RowTier

NUM_KEYS, NUM_PUSHES = 150_000, 40


def test_a_replay_reads_the_rows_of_a_push_together_and_ends_with_the_same_bits(
    tmp_path: Path,
) -> None:
    rng, tier = np.random.default_rng(SEED), RowTier(7 << 20, [tmp_path])
    trained, replayed = PushedServer(None), PushedServer(tier)
    for server in (trained, replayed):
        server.create("t")
    all_keys = rng.permutation(NUM_KEYS).astype(np.uint64)
    some = [rng.choice(all_keys, 2000, replace=False) for _ in range(NUM_PUSHES)]
    for keys in [*np.array_split(all_keys, 50), *some]:
        replay(replayed.state, Attendance(), ("ps.push", *trained.push("t", keys)))
    use = replayed.tier_of("t")
    assert use["rows"] > NUM_KEYS / 2
    assert use["fetched"] > NUM_PUSHES * 2000 / 4
    for bucket in range(0, 4096, 7):
        one, other = (s.state.tables["t"].rows.snapshot(bucket) for s in (trained, replayed))
        order, others = np.argsort(one.keys), np.argsort(other.keys)
        np.testing.assert_array_equal(one.keys[order], other.keys[others])
        np.testing.assert_array_equal(one.rows[order], other.rows[others])
        assert one.marks == other.marks
    replayed.state.tables.clear()
    tier.close()
