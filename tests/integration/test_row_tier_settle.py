"""Settling a checkpoint on a server whose rows lie on SSD: each row once, whatever fails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trireme as tr
from tests.integration.test_row_tier import Kept
from tests.tables import rows_of
from trireme import _core
from trireme.errors import ResourceExhausted
from trireme.rows.wide_rows import RowLayout
from trireme.server.journal import Journal
from trireme.server.row_tier import RowTier
from trireme.server.served_tables import ServedTable
from trireme.server.state import ServerState

DIM, KEYS = 768, np.arange(20_000, dtype=np.uint64)
SCORED = tr.Table(
    "scored", dim=DIM, optimizer=tr.optim.SGD(lr=1.0), policy=tr.policy.CtrCommonAccessor()
)
GAINED = np.linspace(1, 2, len(KEYS), dtype=np.float32)


class Full(Journal):
    """A log whose disk has room for so many records."""

    def __init__(self) -> None:
        self.room, self.records = 0, list[dict[str, Any]]()

    def record(self, method: str, body: dict[str, Any], arrays: Any = ()) -> None:
        if not self.room:
            raise ResourceExhausted("the disk is full")
        self.room -= 1
        self.records.append(body)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerState]:
    tier = RowTier(9 << 20, [tmp_path])
    state = ServerState(_core.Pool(2), tier=tier)
    state.create_table(SCORED.schema)
    for keys in np.array_split(KEYS, 20):
        push(state.tables["scored"], keys)
    state.journal = Full()
    yield state
    state.tables.clear()
    tier.close()


def push(table: ServedTable, keys: Any) -> None:
    gradients = np.ones((len(keys), DIM), np.float32)
    ids = [(0, int(keys[0]) + 1)]
    scores = np.ones((len(keys), 2), np.float32)
    values, pool = _core.RuleValues(lr=1.0), _core.Pool(1)
    table.rows.update(keys, gradients, ids, values, pool, show_click=scores)


def gains(server: ServerState) -> Any:
    """What each row has gained since the last export, by key."""
    table = server.tables["scored"]
    layout = RowLayout.of(table.schema, table.rows)
    by_key = np.empty(len(KEYS), np.float32)
    keys, rows = rows_of(table.rows)
    by_key[keys.astype(np.int64)] = layout.statistics(rows)["delta_score"]
    return by_key


def settle(server: ServerState, id: str = "a", version: int = 0) -> None:
    assert server.settle(server.tables["scored"], (id, version), "part", KEYS, GAINED)


def test_a_part_that_was_settled_in_part_is_settled_once(server: ServerState) -> None:
    before, journal = gains(server), server.journal
    assert isinstance(journal, Full)
    for journal.room in (0, 2, 1):
        with pytest.raises(ResourceExhausted, match="disk is full"):
            settle(server)
    num_settled = journal.records[-1]["first"] + 256
    assert (len(journal.records), num_settled) == (3, 3 * 256)
    expected = before.copy()
    expected[:num_settled] -= GAINED[:num_settled]
    np.testing.assert_array_equal(gains(server), expected)
    journal.room = 1000
    for _ in range(2):
        settle(server)
        np.testing.assert_array_equal(gains(server), before - GAINED)
    settle(server, "another checkpoint", server.tables.version)
    np.testing.assert_array_equal(gains(server), before - GAINED - GAINED)


def test_rows_without_room_are_refused_before_they_are_recorded(
    server: ServerState,
) -> None:
    before, journal, tier = gains(server), server.journal, server.tier
    assert isinstance(journal, Full)
    assert tier is not None
    journal.room = 1000
    table = server.tables["scored"]
    use = table.rows.tier
    assert use is not None
    tier.memory_bytes = use["own_bytes"] * 9 // 8
    table.rows.set_memory(tier.memory_bytes)
    with pytest.raises(ResourceExhausted, match="to fit into its budget"):
        settle(server)
    num_settled = 256 * len(journal.records)  # whose rows found room, one part after the other
    assert num_settled < len(KEYS)
    expected = before.copy()
    expected[:num_settled] -= GAINED[:num_settled]
    np.testing.assert_array_equal(gains(server), expected)
    tier.memory_bytes = 12 << 20
    settle(server)
    np.testing.assert_array_equal(gains(server), before - GAINED)


def test_what_was_settled_is_so_after_a_start(tmp_path: Path) -> None:
    server = Kept(tmp_path / "state", [tmp_path / "rows"])
    server.begin()
    server.close()
    server.memory = "16MiB"
    server.open()
    server.ask("ps.create_table", {"schema": SCORED.schema.to_wire()}, [])
    for keys in np.array_split(KEYS, 20):
        push(server.state.tables["scored"], keys)
    server.snapshot()
    before = gains(server.state)
    settle(server.state)
    for _ in range(2):  # from the log, and from the state that goes with a snapshot
        server.close()
        server.open()
        np.testing.assert_array_equal(gains(server.state), before - GAINED)
        settle(server.state)
        np.testing.assert_array_equal(gains(server.state), before - GAINED)
        server.snapshot()
    server.close()
