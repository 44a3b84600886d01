"""Imports into tables with rows on SSD: two tables for a while, which share the memory."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

import trireme as tr
from tests.integration.test_row_tier import Kept
from tests.tables import POOL
from trireme.job.embedded import embedded
from trireme.rpc import Call
from trireme.server.prepared_import import PreparedImport
from trireme.server.row_tier import RowTier

NUM_IMPORTED = 600_000


def test_a_start_has_room_for_an_import_that_had_room_before(tmp_path: Path) -> None:
    server = Kept(tmp_path / "state", [tmp_path / "rows"])
    server.begin()
    server.close()
    server.memory = "9MiB"
    server.open()
    for some in np.array_split(server.KEYS, 50):
        server.push(some)
    server.snapshot()
    rows = server.state.make_rows(server.state.tables["t"].schema)
    for keys in np.array_split(np.arange(NUM_IMPORTED, dtype=np.uint64), 50):
        wide = np.zeros((len(keys), rows.row_bytes), np.uint8)
        part = keys, np.zeros(len(keys), np.uint8), wide
        server.state.with_room(partial(rows.write_wide, *part, POOL))
    server.state.prepare(PreparedImport("a", True, {"t": rows}))
    del rows
    server.close()
    server.open()
    with server.state.journal.changing():
        server.state.finish("a", commit=True)
    assert server.state.tables["t"].rows.rows == NUM_IMPORTED
    server.close()


def test_an_import_that_was_not_finished_leaves_its_room_to_the_next(tmp_path: Path) -> None:
    tier = RowTier(5 << 20, [tmp_path])  # for two tables
    with embedded(tier=tier) as cluster:
        cluster.client.create_table(tr.Table("t", dim=4).schema)
        [endpoint] = cluster.client.servers.endpoints
        for id in ("a", "b"):
            begin = Call(endpoint, "import.begin", {"table": "t", "id": id}, [])
            cluster.client.servers.call_all([begin], 60.0)
