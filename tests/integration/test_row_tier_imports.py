"""Imports into tables with rows on SSD: two or three tables for a while, which share the memory.
What is decided finds the room that was taken for it, and what would find none is refused before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import trireme as tr
from tests.integration.durable_servers import DurableServers
from tests.integration.test_row_tier import Kept
from tests.integration.test_row_tier_loads import (
    DAY_S,
    MEMORY,
    TABLES,
    Trained,
    assert_same,
    in_memory,
    on_ssd,
    takes_all,
)
from tests.integration.test_whole_imports import die_at
from tests.programs import Template
from tests.tables import POOL, T_ROWS
from trireme import _core
from trireme.errors import NotReady, ResourceExhausted, Unavailable
from trireme.interchange.worker_side.import_requests import importing, send_rows
from trireme.job.cluster import Cluster
from trireme.job.embedded import embedded
from trireme.rpc import Call
from trireme.server.prepared_import import PreparedImport
from trireme.server.row_tier import RowTier

NUM_IMPORTED = 600_000


def import_rows(
    cluster: Cluster,
    name: str,
    low: int,
    high: int,
    value: float = 1.0,
    decide: Callable[[str], bool] | None = None,
) -> None:
    keys = np.arange(low, high, dtype=np.uint64)
    rows = {"key": keys, "weights": np.full((len(keys), 4), value, np.float32)}
    with importing(cluster.client, [name], replace=False, decide=decide) as id:
        send_rows(cluster.client, name, rows, time=5 * DAY_S, pool=POOL, id=id)


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


# ---- what finds no room ----


def test_an_import_is_refused_or_goes_through_with_any_memory(tmp_path: Path) -> None:
    low, high = 2 << 20, 16 << 20
    while high - low > 1 << 17:
        memory, decided = (low + high) // 2, list[str]()

        def decide(id: str, decided: list[str] = decided) -> bool:
            decided.append(id)
            return True

        try:
            with on_ssd(tmp_path, memory) as server:
                server.train("t", 0, 50_000)
                import_rows(server.cluster, "t", 40_000, 440_000, decide=decide)
                assert server.rows("t").rows == 440_000
            high = memory
        except ResourceExhausted:
            assert not decided
            low = memory
    assert 2 << 20 < low < high < 16 << 20


def test_an_import_without_room_changes_nothing(tmp_path: Path) -> None:
    with in_memory() as expected, on_ssd(tmp_path, 6 << 20) as server:
        for one in (expected, server):
            one.train("t", 0, 2000)
        for _ in range(2):
            with pytest.raises(ResourceExhausted, match=r"'t' finds no room.*Nothing was imported"):
                import_rows(server.cluster, "t", 1000, 200_000)
            assert server.server.prepared is None
            assert server.server.tier is not None
            assert len(server.server.tier._living()) == 1
            for one in (expected, server):
                one.train("t", 1000, 3000)
        for one in (expected, server):
            import_rows(one.cluster, "t", 2500, 4000)
            one.train("t", 0, 5000)
        assert_same(expected, server, tmp_path)


# ---- what has found it ----


@pytest.mark.parametrize("num_rows", [3000, 400_000])
@pytest.mark.parametrize("name", ["t", "admitted", "shown"])
def test_an_import_that_is_prepared_finds_its_room_whatever_others_take(
    tmp_path: Path, name: str, num_rows: int
) -> None:
    tables = [table for table in TABLES if table.name in ("t", name)]
    with in_memory(tables) as expected, on_ssd(tmp_path, tables=tables) as server:
        for one in (expected, server):
            one.train("t", 0, 40_000)
            one.train(name, 0, 60_000)
            one.train(name, 0, 30_000, time=4 * DAY_S)
            one.save(tmp_path / f"base-{id(one)}", "base")
            one.shrink(4 * DAY_S)
        num_tables = len(tables) + (1 if num_rows == 3000 else 2)

        def decide(_: str) -> bool:
            assert server.server.tier is not None
            assert len(server.server.tier._living()) == num_tables
            takes_all(server)
            return True

        import_rows(server.cluster, name, 20_000, 20_000 + num_rows, decide=decide)
        import_rows(expected.cluster, name, 20_000, 20_000 + num_rows)
        for other in [other for other in server.server.tables if other.startswith("other")]:
            server.server.tables.drop([other])
        deltas = [one.save(tmp_path / f"delta-{id(one)}", "delta") for one in (expected, server)]
        for one in (expected, server):
            one.train(name, 10_000, 60_000, time=6 * DAY_S)
            one.shrink(8 * DAY_S)
        assert_same(expected, server, tmp_path)
        assert server.bytes() <= MEMORY
    with in_memory(tables) as one, in_memory(tables) as other:
        for loaded, source, delta in zip((one, other), (expected, server), deltas, strict=True):
            loaded.load(tmp_path / f"base-{id(source)}")
            loaded.load(delta)
        folder = tmp_path / "loaded"
        folder.mkdir()
        assert_same(one, other, folder)


def test_rows_that_change_after_a_copy_was_made_keep_their_change(tmp_path: Path) -> None:
    with in_memory() as expected, on_ssd(tmp_path) as server:
        for one in (expected, server):
            one.train("t", 0, 60_000)
            one.train("t", 0, 30_000, time=4 * DAY_S)

        def decide(_: str, one: Trained) -> bool:
            one.shrink(4 * DAY_S)
            return True

        for one in (expected, server):
            import_rows(one.cluster, "t", 50_000, 300_000, decide=partial(decide, one=one))
            assert one.rows("t").rows == 280_000
        assert_same(expected, server, tmp_path)


def test_rows_come_into_a_table_without_any_in_the_place_of_a_copy(tmp_path: Path) -> None:
    with on_ssd(tmp_path, 5 << 20) as server:  # for two tables
        import_rows(server.cluster, "t", 0, 300_000)
        assert server.rows("t").rows == 300_000


def test_an_error_while_an_import_is_prepared_keeps_none_of_its_rows(tmp_path: Path) -> None:
    with on_ssd(tmp_path) as server:
        server.train("t", 0, 5000)
        errors = []

        def decide(_: str) -> bool:
            with pytest.raises(NotReady, match="which is prepared") as error:
                server.server.check_settled()
            errors.append(error)
            return True

        import_rows(server.cluster, "t", 0, 3000, decide=decide)
        assert server.server.tier is not None
        assert len(server.server.tier._living()) == 1


# ---- who goes away ----


def test_a_server_that_was_restarted_takes_the_room_when_it_is_asked_again(tmp_path: Path) -> None:
    with on_ssd(tmp_path) as server:
        server.train("t", 0, 50_000)

        def decide(id: str) -> bool:
            prepared = server.server.prepared
            assert isinstance(prepared, PreparedImport)
            prepared.copies.clear()
            [endpoint] = server.cluster.client.servers.endpoints
            body = {"id": id, "tables": ["t"], "replace": False}
            server.cluster.client.servers.call_all([Call(endpoint, "import.prepare", body, [])], 60)
            assert prepared.copies.keys() == {"t"}
            takes_all(server)
            return True

        import_rows(server.cluster, "t", 0, 400_000, decide=decide)
        assert server.rows("t").rows == 400_000


@pytest.mark.parametrize("num_rows", [400_000, 9000])
def test_servers_that_are_killed_before_they_have_an_import_have_room_when_they_start_again(
    programs: Template, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_rows: int
) -> None:
    folder = tmp_path / "ssd"
    folder.mkdir()
    table = tr.Table("t", dim=4, optimizer=tr.optim.SGD(lr=1.0), absent="zeros")

    def values(cluster: Cluster, low: int, high: int) -> set[float]:
        distinct = set[float]()
        for keys in np.array_split(np.arange(low, high, 7, dtype=np.uint64), 20):
            pulled = cluster.client.pull({T_ROWS: _core.unique(keys, POOL)[0]}).rows[T_ROWS]
            distinct |= set(np.unique(pulled.numpy()).tolist())
        return distinct

    options = ["--memory", "9000000", "--ssd_dir", str(folder)]
    with DurableServers(programs, 2, tmp_path, options=options) as servers:
        cluster = servers.join(0, 1)
        cluster.client.create_table(table.schema)
        import_rows(cluster, "t", 0, 100_000, 2.0)
        die_at(cluster, "import.finish", monkeypatch)
        with pytest.raises(Unavailable, match="is killed here"):
            import_rows(cluster, "t", 50_000, 50_000 + num_rows)
        cluster.abandon()
        for server in (0, 1):
            servers.kill(server)
            servers.start(server)
        successor = servers.join(0, 1)
        assert values(successor, 0, 50_000) == {2.0}
        assert values(successor, 50_000, 50_000 + num_rows) == {1.0}
        servers.kill(0)
        servers.start(0)
        assert values(successor, 50_000, 50_000 + num_rows) == {1.0}
        successor.abandon()
