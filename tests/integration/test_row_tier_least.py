"""Tables with as little memory as their rows allow: what a job has room for it goes on doing,
within its memory, and what it has no room for is refused before it is recorded.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trireme as tr
from tests.integration.pushed_server import PushedServer
from tests.seeds import SEED
from tests.tables import POOL, keys_in, make_table, rows_of
from trireme import _core
from trireme.errors import BadRequest, ResourceExhausted
from trireme.rows.core_table import needed_bytes
from trireme.server.journal import Journal
from trireme.server.row_tier import RowTier

DAY_S, NUM_ROWS = 86_400, 250_000
EXPIRES = _core.PolicyConfig(ttl_s=DAY_S)


def tiered(folder: Path, more_bytes: int, **options: Any) -> _core.Table:
    """A table with so much memory beside the least that it needs without rows."""
    options |= {"ssd": [_core.SsdDevice(str(folder), "threads")]}
    options |= {"buffer_bytes": 1 << 16, "read_bytes": 1 << 17}
    own = make_table(memory_bytes=1 << 30, **options).tier["own_bytes"]
    return make_table(memory_bytes=needed_bytes(own) + more_bytes, **options)


def push(table: _core.Table, keys: np.ndarray[Any, Any], sequence: int, time: int) -> None:
    gradients, ids = np.ones((len(keys), table.dim), np.float32), [(0, sequence)]
    table.update(keys, gradients, ids, _core.RuleValues(lr=1.0), POOL, time=time)


def test_keys_of_removed_rows_take_no_memory_that_others_need(tmp_path: Path) -> None:
    table = tiered(tmp_path, 3 << 20, policy=EXPIRES)
    memory, sequence = table.tier["memory_bytes"], 0
    keys = np.random.default_rng(SEED).permutation(NUM_ROWS).astype(np.uint64)
    for sequence, some in enumerate(np.array_split(keys, 250), 1):
        push(table, some, sequence, time=DAY_S)
        assert table.bytes <= memory
    table.raise_version(2)
    for bucket in range(_core.NUM_BUCKETS):
        table.shrink(bucket, 3 * DAY_S, True, 2)
        assert table.bytes <= memory
    assert table.rows == 0
    everything = (0, _core.NUM_BUCKETS)
    with pytest.raises(BadRequest, match="removed before are forgotten; save all rows"):
        _core.snapshot_columns(table, *everything, 1, 1, [table.row_bytes])
    for number, some in enumerate(np.array_split(keys, 250), sequence + 1):
        push(table, some, number, time=4 * DAY_S)
        assert table.bytes <= memory
    assert table.rows == NUM_ROWS
    _core.snapshot_columns(table, *everything, 2, 2, [table.row_bytes])


@pytest.mark.parametrize("is_tiered", [True, False])
def test_keys_of_removed_rows_that_are_forgotten_take_no_memory(
    tmp_path: Path, is_tiered: bool
) -> None:
    options = {"policy": EXPIRES}
    table = tiered(tmp_path, 8 << 20, **options) if is_tiered else make_table(**options)
    push(table, np.arange(NUM_ROWS, dtype=np.uint64), 1, time=DAY_S)

    def beside_rows() -> int:
        return table.tier["own_bytes"] if is_tiered else table.bytes

    for bucket in range(_core.NUM_BUCKETS):
        table.shrink(bucket, 3 * DAY_S, True, 2)
    before = beside_rows()
    table.forget_removed(2)
    assert beside_rows() <= before - 64 * 12 * _core.NUM_BUCKETS / 2


def test_a_push_that_was_not_refused_is_applied_if_the_rows_of_a_stripe_find_no_room_together(
    tmp_path: Path,
) -> None:
    rng = np.random.default_rng(1)
    options = {"dims": [8, 200, 400], "rule": "adagrad"}
    in_memory, table = make_table(**options), tiered(tmp_path, 2_700_000, **options)
    for sequence in range(1, 8):
        keys = rng.choice(60_000, 8000, replace=False).astype(np.uint64)
        sizes = zip((4000, 2000, 2000), table.dims, strict=True)
        push = keys, [np.ones(size, np.float32) for size in sizes], [(0, sequence)]
        values = _core.RuleValues(lr=0.1)
        try:
            assert table.claim(keys, POOL) is None  # more than half of the memory
        except ResourceExhausted:  # before a server would record it
            break
        table.update(*push, values, POOL)
        in_memory.update(*push, values, POOL)
        assert table.bytes <= table.tier["memory_bytes"]
    assert sequence > 5
    expected, actual = (dict(zip(*map(list, rows_of(t)), strict=True)) for t in (in_memory, table))
    assert actual.keys() == expected.keys()
    for key, row in expected.items():
        np.testing.assert_array_equal(actual[key], row)


class Recorded(Journal):
    def __init__(self) -> None:
        self.methods = list[str]()

    def record(self, method: str, body: dict[str, Any], arrays: Any = ()) -> None:
        self.methods.append(method)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PushedServer]:
    tier = RowTier(4 << 20, [tmp_path])
    server = PushedServer(tier)
    yield server
    server.state.tables.clear()
    tier.close()


def test_a_shrink_that_finds_no_room_is_refused_before_it_is_recorded(
    server: PushedServer,
) -> None:
    policy = tr.policy.Policy(ttl_s=DAY_S)
    server.state.create_table(tr.Table("t", dim=8, policy=policy).schema)
    rows, keys = server.state.tables["t"].rows, keys_in([5], 40_000, SEED)
    for sequence, some in enumerate(np.array_split(keys, 400), 1):
        push(rows, some, sequence, time=DAY_S)
    server.state.journal = journal = Recorded()
    shrink = {"time": 3 * DAY_S, "day_over": True, "slices": 1, "slice": 0}
    with pytest.raises(ResourceExhausted, match="to fit into its budget"):
        server.state.shrink(shrink)
    assert journal.methods == []
    assert rows.rows == len(keys)
    assert server.state.tier is not None
    server.state.tier.memory_bytes = 16 << 20
    assert server.state.shrink(shrink) == {"t": {"expired": len(keys), "evicted": 0}}
    assert journal.methods == ["policy.shrink"]


def test_a_full_disk_is_not_asked_to_take_what_it_says_it_has_no_room_for(small_disk: Path) -> None:
    """A file system would take what there is and give it back, which took a pull minutes."""
    folder = small_disk / "rows"
    folder.mkdir()
    table = tiered(folder, 1 << 20)
    keys = keys_in(list(range(4096)), 50_000)
    began = folder.stat().st_mtime_ns  # files that come and go change it
    with pytest.raises(ResourceExhausted, match="expected to take 67108864 bytes"):
        push(table, keys, 1, 0)
    table.fetch(keys, POOL)
    assert folder.stat().st_mtime_ns == began
    subprocess.run(["mount", "-o", "remount,size=100m", str(small_disk)], check=True)
    push(table, keys, 2, 0)
    assert folder.stat().st_mtime_ns != began
    assert table.rows == len(keys)
