"""Loads into servers with rows on SSD: what is decided finds the memory that was taken for it, and
what would find none is refused before anything changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trireme as tr
from tests.integration.durable_servers import DurableServers
from tests.integration.saved_rows import saved_rows
from tests.integration.test_whole_imports import die_at
from tests.programs import Template
from tests.tables import POOL, T_ROWS
from trireme import _core
from trireme.checkpoint.worker_side.load import load_checkpoint
from trireme.checkpoint.worker_side.save import save_checkpoint
from trireme.errors import BadRequest, NotReady, ResourceExhausted, Unavailable
from trireme.interchange.worker_side.import_requests import importing, send_rows
from trireme.job.cluster import Cluster
from trireme.job.embedded import embedded
from trireme.server.row_tier import RowTier
from trireme.server.state import ServerState

DAY_S = 86_400
TABLES = [
    tr.Table(
        "t",
        dim=4,
        optimizer=tr.optim.Adagrad(lr=0.1),
        policy=tr.policy.Policy(ttl_s=2 * DAY_S),
    ),
    tr.Table("shown", dim=4, optimizer=tr.optim.SGD(lr=1.0), policy=tr.policy.CtrCommonAccessor()),
    tr.Table("admitted", dim=4, optimizer=tr.optim.SGD(lr=1.0), admit=tr.policy.CountFilter(2)),
    tr.Table("classes", dims={"few": 4, "many": 16}, salt=True, optimizer=tr.optim.SGD(lr=1.0)),
]
MEMORY = 28 << 20


class Trained:
    """A cluster in this process, whose rows a test updates."""

    def __init__(self, cluster: Cluster, tables: list[tr.Table]) -> None:
        assert cluster.server is not None
        self.cluster, self.server = cluster, cluster.server
        self.sequence = 0
        for table in tables:
            cluster.client.create_table(table.schema)

    def rows(self, name: str) -> _core.Table:
        return self.server.tables[name].rows

    def train(self, name: str, low: int, high: int, time: int = DAY_S) -> None:
        table = self.server.tables[name]
        all_keys = np.arange(low, high, dtype=np.uint64)
        for keys in np.array_split(all_keys, max(len(all_keys) // 4000, 1)):
            self.sequence += 1
            dims = table.schema.dims
            parts = np.array_split(np.zeros(len(keys)), len(dims))
            gradients: Any = [
                np.full((len(part), dim), self.sequence, np.float32)
                for part, dim in zip(parts, dims, strict=True)
            ]
            if len(dims) == 1:
                gradients = gradients[0]
            columns: dict[str, Any] = {}
            if "show_click" in table.schema.columns:
                columns["show_click"] = np.ones((len(keys), 2), np.float32)
            if "count" in table.schema.columns:
                columns["counts"] = np.ones(len(keys), np.uint32)
            args = keys, gradients, [(0, self.sequence)], _core.RuleValues(lr=0.1), POOL

            def update(table: Any = table, args: Any = args, columns: Any = columns) -> None:
                table.rows.update(*args, time=time, **columns)

            self.server.with_room(update)

    def shrink(self, time: int) -> None:
        for table in self.server.tables.values():
            for bucket in range(_core.NUM_BUCKETS):
                table.rows.shrink(bucket, time, True, table.rows.version)

    def save(self, path: Path, mode: str = "full") -> Path:
        save_checkpoint(self.cluster.client, path, extra={}, tensors={}, mode=mode)
        return path

    def load(self, path: Path, **options: Any) -> None:
        load_checkpoint(self.cluster.client, path, **options)

    def bytes(self) -> int:
        return sum(table.rows.bytes for table in self.server.tables.values())


@contextmanager
def in_memory(tables: list[tr.Table] = TABLES[:1]) -> Iterator[Trained]:
    with embedded(threads=1) as cluster:
        yield Trained(cluster, tables)


@contextmanager
def on_ssd(
    folder: Path, memory: int = MEMORY, tables: list[tr.Table] = TABLES[:1]
) -> Iterator[Trained]:
    rows = folder / "ssd"
    rows.mkdir(exist_ok=True)
    with embedded(threads=1, tier=RowTier(memory, [rows])) as cluster:
        yield Trained(cluster, tables)


def assert_same(expected: Trained, actual: Trained, folder: Path) -> None:
    paths = expected.save(folder / "expected"), actual.save(folder / "actual")
    one, other = map(saved_rows, paths)
    for name, columns in one.items():
        for column, values in columns.items():
            np.testing.assert_array_equal(other[name][column], values, err_msg=f"{name} {column}")


def never() -> None:
    raise AssertionError("the load is decided")


# ---- what finds no room ----


def test_a_load_without_room_is_refused_before_it_is_decided_and_changes_nothing(
    tmp_path: Path,
) -> None:
    with in_memory() as source:
        source.train("t", 0, 400_000)
        large = source.save(tmp_path / "large")
    with in_memory() as expected, on_ssd(tmp_path, 5 << 20) as server:
        for one in (expected, server):
            one.train("t", 0, 2000)
            small = one.save(tmp_path / f"small-{id(one)}")
        for _ in range(2):
            with pytest.raises(ResourceExhausted, match=r"'t' finds no room.*Nothing was loaded"):
                server.load(large, begins=never)
            assert server.server.prepared is None
            assert server.server.tier is not None
            assert len(server.server.tier._living()) == 1
            for one in (expected, server):
                one.train("t", 1000, 3000)
        server.load(small)
        for one in (expected, server):
            one.train("t", 0, 5000)
        expected.load(small)
        for one in (expected, server):
            one.train("t", 500, 8000)
        server.load(small)
        expected.load(small)
        assert_same(expected, server, tmp_path)
        assert server.bytes() <= 5 << 20


def test_a_delta_without_room_is_refused_before_it_is_decided_and_changes_nothing(
    tmp_path: Path,
) -> None:
    with in_memory() as source:
        source.train("t", 0, 2000)
        base = source.save(tmp_path / "base", "base")
        source.train("t", 0, 500_000)
        large = source.save(tmp_path / "large", "delta")
    with in_memory() as expected, on_ssd(tmp_path, 5 << 20) as server:
        server.load(base)
        expected.load(base)
        with pytest.raises(ResourceExhausted, match=r"'t' finds no room.*Nothing was loaded"):
            server.load(large, begins=never)
        assert_same(expected, server, tmp_path)


def test_tables_that_a_load_would_make_are_counted_before_it_is_decided(tmp_path: Path) -> None:
    with in_memory(TABLES) as source:
        source.train("t", 0, 1000)
        saved = source.save(tmp_path / "saved")
    with on_ssd(tmp_path, 5 << 20) as server:  # for two of them
        with pytest.raises(ResourceExhausted, match=r"finds no room.*expected at least \d+ bytes"):
            server.load(saved, begins=never)
        assert server.server.tables.keys() == {"t"}
    with on_ssd(tmp_path, 9 << 20, []) as server:  # for four, and not for one more
        server.load(saved)
        assert server.server.tables.keys() == {table.name for table in TABLES}


# ---- what has found it ----


def takes_all(server: Trained) -> None:
    """Whatever others may do takes what memory is left."""
    state: ServerState = server.server
    assert state.tier is not None
    for number in range(8):
        try:
            state.create_table(tr.Table(f"other {number}", dim=4).schema)
        except ResourceExhausted:
            break
    with pytest.raises(NotReady, match="which is prepared"):
        state.check_settled()
    for name, table in state.tables.items():
        if name.startswith("other"):
            keys = np.arange(2000, dtype=np.uint64)
            ones = np.ones((len(keys), 4), np.float32)
            try:
                table.rows.update(keys, ones, [(0, 1)], _core.RuleValues(lr=0.1), POOL)
            except ResourceExhausted:
                continue
    with state.tier._lock:
        state.tier._divide_anew()
    for table in list(state.tables.values()):
        table.rows.fetch(np.arange(30_000, dtype=np.uint64), POOL)


CASES = {
    "many rows, in a table beside": (120_000, "full", 0),
    "few rows, by a claim": (3000, "full", 0),
    "few rows of a delta, by a claim": (2000, "delta", 0),
    "many rows of a delta, in a copy": (100_000, "delta", 0),
    "many rows, and many removed": (70_000, "full", 4 * DAY_S),
    "a delta, and many removed": (20_000, "delta", 4 * DAY_S),
}


@pytest.mark.parametrize("case", CASES)
def test_a_load_that_is_prepared_finds_its_room_whatever_others_take(
    tmp_path: Path, case: str
) -> None:
    num_rows, mode, shrinks_at = CASES[case]
    with in_memory(TABLES) as source:
        for table in TABLES:
            source.train(table.name, 0, 30_000)
        base = source.save(tmp_path / "base", "base")
        if shrinks_at:
            source.shrink(shrinks_at)
        source.train("t", 15_000, 15_000 + num_rows, time=5 * DAY_S)
        source.train("classes", 20_000, 32_000, time=5 * DAY_S)
        source.train("admitted", 29_000, 31_000, time=5 * DAY_S)
        saved = source.save(tmp_path / "saved", mode)
    with in_memory(TABLES) as expected, on_ssd(tmp_path, tables=TABLES) as server:
        for one in (expected, server):
            one.load(base)
        if mode == "full":
            for one in (expected, server):
                one.train("t", 0, 50_000)
        server.load(saved, begins=lambda: takes_all(server))
        expected.load(saved)
        for name in [name for name in server.server.tables if name.startswith("other")]:
            server.server.tables.drop([name])
        for one in (expected, server):
            one.train("t", 10_000, 60_000, time=6 * DAY_S)
            one.shrink(8 * DAY_S)
            one.train("classes", 0, 3000, time=8 * DAY_S)
        assert_same(expected, server, tmp_path)
        assert server.bytes() <= MEMORY


@pytest.mark.parametrize("mode", ["full", "delta"])
def test_a_load_is_refused_or_goes_through_with_any_memory(tmp_path: Path, mode: str) -> None:
    with in_memory() as source:
        source.train("t", 0, 20_000)
        base = source.save(tmp_path / "base", "base")
        source.train("t", 0, 120_000)
        saved = source.save(tmp_path / "saved", mode)
    low, high = 2 << 20, 12 << 20
    while high - low > 1 << 17:
        memory, decided = (low + high) // 2, list[bool]()
        try:
            with on_ssd(tmp_path, memory) as server:
                server.load(base)
                server.load(saved, begins=partial(decided.append, True))
                assert server.rows("t").rows == 120_000
            high = memory
        except ResourceExhausted:
            assert not decided
            low = memory
    assert 2 << 20 < low < high < 12 << 20


# ---- who goes away ----


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = tr.nn.EmbeddingBag(TABLES[0], features=["key"])

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.bag(batch).sum((1, 2))


def test_a_load_whose_worker_has_gone_leaves_its_room_to_the_next_push(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with in_memory() as source:
        source.train("t", 0, 200_000)
        saved = source.save(tmp_path / "saved")
    with on_ssd(tmp_path, 8 << 20) as server:
        server.train("t", 0, 30_000)
        tier, servers = server.server.tier, server.cluster.client.servers
        assert tier is not None

        def die(_: object) -> None:
            monkeypatch.setattr(servers, "finish", lambda *_, **__: None)
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            server.load(saved, check=die)
        monkeypatch.undo()
        assert len(tier._living()) == 2
        batch = {"key": torch.arange(10), "label": torch.zeros(10)}
        trainer = tr.Trainer(
            Model(), None, loss=nn.functional.mse_loss, progress=False, cluster=server.cluster
        )
        trainer.fit([batch])
        assert len(tier._living()) == 1
        server.load(saved)
        assert server.rows("t").rows == 200_000


def test_a_load_after_which_somebody_has_pushed_is_not_prepared(tmp_path: Path) -> None:
    with on_ssd(tmp_path) as server:
        server.train("t", 0, 30_000)
        saved = server.save(tmp_path / "saved")
        with pytest.raises(BadRequest, match=r"somebody has pushed.*nothing was loaded"):
            server.load(saved, check=lambda _: server.server.checked_load.give_up())
        server.load(saved)


@pytest.mark.parametrize("num_rows", [250_000, 8000])
def test_servers_that_are_killed_before_they_load_have_room_for_it_when_they_start_again(
    programs: Template, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_rows: int
) -> None:
    folder = tmp_path / "ssd"
    folder.mkdir()
    saved, keys = tmp_path / "saved", np.arange(0, num_rows, 7, dtype=np.uint64)
    table = tr.Table("t", dim=4, optimizer=tr.optim.SGD(lr=1.0), absent="zeros")

    def put(cluster: Cluster, num: int, value: float) -> None:
        some = np.arange(num, dtype=np.uint64)
        rows = {"key": some, "weights": np.full((num, 4), value, np.float32)}
        with importing(cluster.client, ["t"], replace=False) as id:
            send_rows(cluster.client, "t", rows, time=0, pool=POOL, id=id)

    def values(cluster: Cluster) -> set[float]:
        distinct = set[float]()
        for some in np.array_split(keys, 20):
            pulled = cluster.client.pull({T_ROWS: _core.unique(some, POOL)[0]}).rows[T_ROWS]
            distinct |= set(np.unique(pulled.numpy()).tolist())
        return distinct

    with embedded(threads=1) as cluster:
        cluster.client.create_table(table.schema)
        put(cluster, num_rows, 1.0)
        save_checkpoint(cluster.client, saved, extra={}, tensors={}, mode="full")
    options = ["--memory", "6000000", "--ssd_dir", str(folder)]
    with DurableServers(programs, 2, tmp_path, options=options) as servers:
        cluster = servers.join(0, 1)
        cluster.client.create_table(table.schema)
        put(cluster, 30_000, 2.0)
        die_at(cluster, "load", monkeypatch)
        with pytest.raises(Unavailable, match="is killed here"):
            load_checkpoint(cluster.client, saved)
        cluster.abandon()
        for server in (0, 1):
            servers.kill(server)
            servers.start(server)
        successor = servers.join(0, 1)
        assert values(successor) == {1.0}
        servers.kill(0)
        servers.start(0)
        assert values(successor) == {1.0}
        load_checkpoint(successor.client, saved)
        assert values(successor) == {1.0}
        successor.abandon()
