"""Servers whose tables share a budget, with the other rows on SSD: the same bits as in memory."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Event
from threading import enumerate as enumerate_threads
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trireme as tr
from tests.conditions import wait_until
from tests.integration.durable_servers import DurableServers
from tests.integration.saved_rows import saved_rows
from tests.long import sampled
from tests.programs import Template
from tests.seeds import SEED
from trireme import _core
from trireme.byte_size import parse_bytes
from trireme.coordinator.coordinator import Coordinator
from trireme.errors import BadRequest, Corruption, ResourceExhausted, Unavailable
from trireme.job.cluster import Cluster
from trireme.job.durability import Durability, kept
from trireme.job.embedded import embedded
from trireme.job.handlers import handlers_of
from trireme.protocol.block_messages import map_to_wire
from trireme.protocol.routing import BucketMap
from trireme.rpc import Request
from trireme.server.attendance import Attendance
from trireme.server.log import snapshot as snapshots
from trireme.server.row_tier import RowTier, make_row_tier
from trireme.server.state import ServerState

BATCH, NUM_BATCHES, NUM_KEYS, MEMORY = 2048, 20, 60_000, "12MiB"


STRATEGIES = {
    "sync": tr.Strategy("sync"),
    "async": tr.Strategy("async"),
    "bounded": tr.Strategy("bounded", staleness=2),
    "geo": tr.Strategy("geo", k=1),
    "geo of windows": tr.Strategy("geo", k=4),
    "hybrid": tr.Strategy("hybrid"),
}


class Model(nn.Module):
    """Two tables of about 60,000 rows, several times what the budget has room for."""

    def __init__(self) -> None:
        super().__init__()
        ids = tr.Table("ids", dim=16, optimizer=tr.optim.Adam(lr=0.1))
        rare = tr.Table(
            "rare", dim=8, optimizer=tr.optim.Adagrad(lr=0.1), admit=tr.policy.CountFilter(2)
        )
        self.ids = tr.nn.EmbeddingBag(ids, features=["a", "b"])
        self.rare = tr.nn.EmbeddingBag(rare, features=["a"])
        self.head = nn.Linear(40, 1)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        rows = torch.cat([self.ids(batch).flatten(1), self.rare(batch).flatten(1)], 1)
        out: torch.Tensor = self.head(rows)
        return out.squeeze(1)


def batches(number: int) -> list[dict[str, torch.Tensor]]:
    rng = np.random.default_rng([SEED, number])
    return [
        {
            "a": torch.from_numpy(rng.integers(0, NUM_KEYS, BATCH)),
            "b": torch.from_numpy(rng.zipf(1.2, BATCH) % NUM_KEYS),
            "label": torch.from_numpy(rng.integers(0, 2, BATCH).astype(np.float32)),
        }
        for _ in range(NUM_BATCHES)
    ]


def train(
    cluster: Cluster, folder: Path, between: Callable[[], None], strategy: str = "sync"
) -> nn.Module:
    torch.manual_seed(1)
    model = Model()
    trainer = tr.Trainer(
        model,
        torch.optim.Adam(model.parameters(), lr=0.01),
        loss=nn.functional.binary_cross_entropy_with_logits,
        strategy=STRATEGIES[strategy],
        progress=False,
        cluster=cluster,
    )
    trainer.fit(batches(0))
    between()
    trainer.fit(batches(1))
    trainer.save(folder)
    return model


def assert_same_rows(first: Path, second: Path) -> None:
    expected, actual = saved_rows(first), saved_rows(second)
    for name in ("ids", "rare"):
        for column, values in expected[name].items():
            np.testing.assert_array_equal(actual[name][column], values, err_msg=f"{name} {column}")


def nothing() -> None:
    pass


@pytest.fixture
def ssd_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "ssd"
    folder.mkdir()
    return folder


def test_an_embedded_job_ends_with_the_same_bits(tmp_path: Path, ssd_dir: Path) -> None:
    with embedded() as cluster:
        train(cluster, tmp_path / "memory", nothing)
    tier = make_row_tier(MEMORY, str(ssd_dir))
    assert tier is not None
    with embedded(tier=tier) as cluster:
        train(cluster, tmp_path / "tier", nothing)
        assert cluster.server is not None
        use = cluster.server.tables["ids"].rows.tier
        assert use is not None
        assert use["rows"] > 0
        assert use["misses"] > 0
        num_bytes = sum(table.rows.bytes for table in cluster.server.tables.values())
        assert num_bytes <= tier.memory_bytes
    assert_same_rows(tmp_path / "memory", tmp_path / "tier")
    assert list(ssd_dir.iterdir()) == []


@sampled(keep=6)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("is_embedded", [True, False])
def test_rows_of_batches_to_come_are_fetched_before_they_are_pulled(
    strategy: str, tmp_path: Path, ssd_dir: Path, programs: Template, *, is_embedded: bool
) -> None:
    with ExitStack() as stack:
        if is_embedded:
            cluster = stack.enter_context(embedded(tier=make_row_tier(MEMORY, str(ssd_dir))))
        else:
            options = ["--memory", MEMORY, "--ssd_dir", str(ssd_dir)]
            servers = DurableServers(programs, 1, tmp_path, durability="none", options=options)
            cluster = stack.enter_context(stack.enter_context(servers).join(0, 1))
        train(cluster, tmp_path / "saved", nothing, strategy)
        [stats] = cluster.client.stats()
        assert stats["tables"]["ids"]["tier"]["fetched"] > 1000


class Slow:
    """Rows whose fetch waits."""

    def __init__(self) -> None:
        self.may_go, self.num_fetched = Event(), 0

    def fetch(self, keys: Any, pool: Any) -> None:
        assert self.may_go.wait(30)
        self.num_fetched += 1
        if self.num_fetched == 1:
            raise Unavailable("the device is gone")


def test_announcements_beyond_a_bound_are_dropped_and_a_failed_one_stops_no_other(
    ssd_dir: Path,
) -> None:
    tier, rows = RowTier(1 << 30, [ssd_dir]), Slow()
    for _ in range(100):
        tier.fetcher.announce([(rows, np.zeros(1, np.uint64))])  # type: ignore[list-item]
    tier.fetcher.announce([(rows, np.zeros(5 << 20, np.uint64))])  # type: ignore[list-item]
    assert 100 - 34 <= tier.fetcher.num_dropped <= 100 - 31
    rows.may_go.set()
    while tier.fetcher._waiting.qsize():
        rows.may_go.wait(0.01)
    tier.close()
    assert rows.num_fetched + tier.fetcher.num_dropped == 101


def test_a_job_that_fails_ends_the_fetches_and_leaves_no_rows_behind(ssd_dir: Path) -> None:
    tier, rows = RowTier(1 << 30, [ssd_dir]), Slow()
    rows.may_go.set()

    def fail() -> None:
        with embedded(tier=tier):
            tier.fetcher.announce([(rows, np.zeros(1, np.uint64))])  # type: ignore[list-item]
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not [thread for thread in enumerate_threads() if thread.name == "trireme-fetch"]
    assert not any(ssd_dir.iterdir())


def test_servers_that_are_killed_lose_nothing_of_what_lay_on_ssd(
    programs: Template, tmp_path: Path, ssd_dir: Path
) -> None:
    roots = [tmp_path / name for name in ("memory", "tier")]
    for root in roots:
        root.mkdir()
    with DurableServers(programs, 1, roots[0]) as servers, servers.join(0, 1) as cluster:
        train(cluster, roots[0] / "saved", nothing)
    options = ["--memory", MEMORY, "--ssd_dir", str(ssd_dir)]
    with DurableServers(programs, 1, roots[1], options=options) as servers:

        def restart() -> None:
            servers.kill(0)
            servers.start(0)

        with servers.join(0, 1) as cluster:
            train(cluster, roots[1] / "saved", restart)
        # What the killed one left behind is gone, and what older snapshots kept.
        assert len(list(ssd_dir.glob("trireme-rows-*"))) == 1
        assert len(list(ssd_dir.glob("trireme-kept-*/*"))) == 1
    assert_same_rows(roots[0] / "saved", roots[1] / "saved")


class Kept:
    """A server without a network with a state folder, and half of its rows on SSD. `counts`: how
    often each row was pushed.
    """

    KEYS = np.arange(100_000, dtype=np.uint64)

    def __init__(self, folder: Path, ssd_dirs: list[Path]) -> None:
        self.folder, self.ssd_dirs = folder, ssd_dirs
        self.memory = "7MiB"
        self.counts = np.zeros(len(self.KEYS))
        self.number = 0
        for path in ssd_dirs:
            path.mkdir(exist_ok=True)
        self.open()

    def open(self, *, has_tier: bool = True) -> None:
        self._exit = ExitStack()
        folders = ",".join(map(str, self.ssd_dirs))
        tier = make_row_tier(self.memory, folders) if has_tier else None
        if tier is not None:
            self._exit.callback(tier.close)
        self.state = ServerState(_core.Pool(1), tier=tier)
        coordinator, attendance = Coordinator(), Attendance()
        durability = Durability(mode="process", folder=self.folder, log_bytes=1 << 40)
        self.end = self._exit.enter_context(kept(durability, self.state, coordinator, attendance))
        self._handlers = handlers_of(self.state, coordinator, attendance.handlers(), self.folder)

    def ask(self, method: str, body: dict[str, Any], arrays: list[Any]) -> None:
        request = Request(1, method, body, arrays, "test", "test", "", time.monotonic() + 10)
        self._handlers[method](request)

    def begin(self, **options: Any) -> None:
        """options: of the table."""
        head, arrays = map_to_wire(BucketMap.even(("here",)))
        join = {"servers": ["here"], "worker": 0, "num_workers": 1, "token": "a"}
        self.ask("coord.join", join, [])
        self.ask("ps.map", {"map": head, "index": 0, "job": "j", "state": ""}, list(arrays))
        table = tr.Table(
            "t",
            dim=16,
            optimizer=tr.optim.SGD(lr=1.0),
            initializer=tr.initializer.Constant(0.0),
            **options,
        )
        self.ask("ps.create_table", {"schema": table.schema.to_wire()}, [])

    def push(self, keys: Any, *, time: int = 0) -> None:
        rows = self.state.tables["t"].rows
        self.number += 1
        grads, ids = np.full((len(keys), 16), -1.0, np.float32), [(0, self.number)]
        rows.update(keys, grads, ids, _core.RuleValues(lr=1.0), _core.Pool(1), time=time)
        self.counts[keys.astype(np.int64)] += 1

    def snapshot(self) -> None:
        with self.state.journal.replacing():
            pass

    def read(self) -> Any:
        rows = np.empty((len(self.KEYS), 16), np.float32)
        self.state.tables["t"].rows.lookup(self.KEYS, rows, _core.Pool(1))
        return rows[:, 0]

    def close(self) -> None:
        self.state.tables.clear()
        self._exit.close()

    def kept_files(self) -> list[Path]:
        files = (path.glob("trireme-kept-*/*/*/*.rows") for path in self.ssd_dirs)
        return sorted(file for some in files for file in some)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Kept]:
    server = Kept(tmp_path / "state", [tmp_path / "first", tmp_path / "second"])
    server.begin()
    for begin in range(0, len(server.KEYS), 1000):
        server.push(server.KEYS[begin : begin + 1000])
    yield server
    server.close()


def test_a_snapshot_leaves_rows_where_they_are_and_a_start_goes_on_with_them(
    server: Kept, tmp_path: Path
) -> None:
    rng = np.random.default_rng(SEED)
    for _ in range(3):
        server.push(rng.choice(server.KEYS, 20_000, replace=False))
        server.snapshot()
        expected = server.counts.copy()
        files = [file for file in (tmp_path / "state").rglob("*") if file.is_file()]
        assert sum(file.stat().st_size for file in files) < 100_000 * 80 * 3 / 4
        for _ in range(30):
            server.push(rng.choice(server.KEYS, 2000, replace=False))
        kept = server.kept_files()
        server.close()
        server.ssd_dirs.reverse()
        server.open()  # what was pushed here has no record, so it is as if it had been lost
        np.testing.assert_array_equal(server.read(), expected)
        server.counts = expected
        use = server.state.tables["t"].rows.tier
        assert use is not None
        assert use["rows"] > 30_000
        assert (len(kept), use["segments"]) == (1, 1)  # appended to, so that no start needs another


@pytest.mark.parametrize("memory", ["5MiB", "30MiB"])
def test_a_start_with_other_memory_keeps_all_rows(server: Kept, memory: str) -> None:
    server.snapshot()
    server.close()
    server.memory = memory
    server.open()
    np.testing.assert_array_equal(server.read(), server.counts)
    for some in np.array_split(server.KEYS[::2], 25):
        server.push(some.copy())
    np.testing.assert_array_equal(server.read(), server.counts)
    rows = server.state.tables["t"].rows
    assert rows.bytes <= parse_bytes("memory", memory)


def test_a_start_that_lacks_room_says_how_to_make_it_and_loses_nothing(
    server: Kept, tmp_path: Path
) -> None:
    server.close()
    server.memory = "1MiB"
    roots = f"{tmp_path}/first, {tmp_path}/second"
    with pytest.raises(ResourceExhausted, match=rf"free space in {roots} .*larger --memory") as e:
        server.open()
    assert "--skip_records" not in str(e.value)
    server.memory = "7MiB"
    server.open()
    assert server.state.tables["t"].rows.rows == 0  # its pushes have no record


def test_what_a_table_says_about_its_memory_survives_a_start(server: Kept) -> None:
    server.close()
    server.memory = "12MiB"
    server.open()
    own = tr.Table("own", dim=4, ssd=True, memory="4500000")
    server.ask("ps.create_table", {"schema": own.schema.declaration()}, [])
    for _ in range(2):  # from the log, and from the state that goes with a snapshot
        server.close()
        server.open()
        use = server.state.tables["own"].rows.tier
        assert use is not None
        assert use["memory_bytes"] == 4_500_000
        server.snapshot()


def test_what_the_snapshots_of_a_job_kept_goes_with_it(server: Kept) -> None:
    server.snapshot()
    assert server.kept_files()
    server.end()
    server.close()
    assert not any(path for folder in server.ssd_dirs for path in folder.iterdir())
    server.open()


def test_a_snapshot_that_fails_keeps_what_the_last_one_has(
    server: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.snapshot()
    files = server.kept_files()
    expected = server.read()
    server.push(server.KEYS[:1000])
    with monkeypatch.context() as patched:
        patched.setattr(snapshots, "publish_folder", full_disk)
        with pytest.raises(ResourceExhausted):
            server.snapshot()
    assert server.kept_files() == files
    server.close()
    server.open()
    np.testing.assert_array_equal(server.read(), expected)


def test_a_push_that_finds_no_room_has_a_snapshot_made_for_files_of_the_last(server: Kept) -> None:
    def refuse() -> None:
        with pytest.raises(ResourceExhausted), server.state.journal.in_order():
            raise ResourceExhausted("the disk is full")

    server.snapshot()
    [last] = server.folder.glob("snapshot-*")
    refuse()  # one more would keep the same files
    server.state.journal.record("log.version", {"version": 1})
    refuse()
    wait_until(last.with_name(f"snapshot-{int(last.name[-8:]) + 1:08d}").exists)


def full_disk(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


def test_a_snapshot_that_fails_once_it_has_its_name_keeps_the_files_of_its_rows(
    server: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next start reads it: the sync of its name failed, and the name is there."""
    server.snapshot()
    server.push(server.KEYS[:1000])
    expected = server.read()

    def publish(partial: Path, path: Path) -> None:
        partial.rename(path)
        full_disk()

    with monkeypatch.context() as patched:
        patched.setattr(snapshots, "publish_folder", publish)
        with pytest.raises(ResourceExhausted):
            server.snapshot()
    server.close()
    server.open()
    np.testing.assert_array_equal(server.read(), expected)


def test_a_kept_file_that_is_gone_or_cut_short_is_named(server: Kept) -> None:
    server.snapshot()
    server.close()
    victim = server.kept_files()[0]
    content = victim.read_bytes()
    victim.unlink()
    with pytest.raises(Corruption, match=f"expected rows in {re.escape(str(victim))}"):
        server.open()
    victim.write_bytes(content[:4096])
    with pytest.raises(Corruption, match=victim.name):
        server.open()
    victim.write_bytes(content)
    server.open()
    np.testing.assert_array_equal(server.read(), server.counts)


def test_a_flipped_bit_is_an_error_of_its_rows_alone(server: Kept) -> None:
    server.snapshot()
    server.close()
    victim = server.kept_files()[0]
    content = bytearray(victim.read_bytes())
    content[4096 + 2000] ^= 16
    victim.write_bytes(content)
    server.open()
    rows = server.state.tables["t"].rows
    out, errors = np.empty((1, 16), np.float32), set()
    for key in server.KEYS[::3]:
        try:
            rows.lookup(np.array([key]), out, _core.Pool(1))
            assert out[0, 0] == server.counts[int(key)]
        except Corruption as error:
            errors.add(str(error))
    assert len(errors) == 1
    assert re.search(rf"bucket \d+ in .*{victim.name} at offset 4096", errors.pop())


@pytest.mark.parametrize("has_tier", [False, True])
def test_a_state_with_rows_on_ssd_needs_the_folders_of_them(
    server: Kept, tmp_path: Path, *, has_tier: bool
) -> None:
    server.snapshot()
    server.close()
    old, server.ssd_dirs = server.ssd_dirs, [tmp_path / "other"]
    (tmp_path / "other").mkdir()
    with pytest.raises(BadRequest, match=r"expected --memory and --ssd_dir with .*first, .*second"):
        server.open(has_tier=has_tier)
    server.ssd_dirs = [tmp_path / "other", *reversed(old)]  # others may come, in any order
    server.open()
    np.testing.assert_array_equal(server.read(), server.counts)


def test_a_checkpoint_of_more_rows_than_memory_is_loaded(tmp_path: Path, ssd_dir: Path) -> None:
    with embedded() as cluster:
        train(cluster, tmp_path / "saved", nothing)
    with embedded(tier=make_row_tier(MEMORY, str(ssd_dir))) as cluster:
        model = Model()
        trainer = tr.Trainer(
            model,
            torch.optim.Adam(model.parameters(), lr=0.01),
            loss=nn.functional.binary_cross_entropy_with_logits,
            strategy=tr.Strategy("sync"),
            progress=False,
            cluster=cluster,
        )
        trainer.load(tmp_path / "saved")
        trainer.save(tmp_path / "again")
    assert_same_rows(tmp_path / "saved", tmp_path / "again")


def memory_of(cluster: Cluster, name: str) -> int | None:
    assert cluster.server is not None
    use = cluster.server.tables[name].rows.tier
    return None if use is None else use["memory_bytes"]


def test_a_table_says_itself_that_its_rows_lie_on_ssd(ssd_dir: Path) -> None:
    tables = [
        tr.Table("own", dim=4, ssd=True, memory="6MiB"),
        tr.Table("shared", dim=4, ssd=True),
        tr.Table("plain", dim=4),
    ]
    with embedded(tier=make_row_tier(None, str(ssd_dir))) as cluster:
        cluster.client.create_table(tables[0].schema)
        cluster.client.create_table(tables[2].schema)
        assert [memory_of(cluster, name) for name in ("own", "plain")] == [6 << 20, None]
        with pytest.raises(BadRequest, match=r"'shared': ssd=True: expected memory= or .*--memory"):
            cluster.client.create_table(tables[1].schema)
    with embedded(tier=make_row_tier("20MiB", str(ssd_dir))) as cluster:
        for table in tables:
            cluster.client.create_table(table.schema)
        parts = [memory_of(cluster, table.name) for table in tables]
        assert parts[0] == 6 << 20
        assert sum(part or 0 for part in parts) <= 20 << 20
        greedy = tr.Table("greedy", dim=4, ssd=True, memory="13MiB")
        with pytest.raises(
            ResourceExhausted, match=r"--memory without .* beside their rows \(2 here"
        ):
            cluster.client.create_table(greedy.schema)
        glutton = tr.Table("glutton", dim=4, ssd=True, memory="15MiB")
        with pytest.raises(ResourceExhausted, match=r"--memory: .* 22020096 bytes, which the mem"):
            cluster.client.create_table(glutton.schema)
    with embedded() as cluster, pytest.raises(BadRequest, match=r"expected a server with a folder"):
        cluster.client.create_table(tables[0].schema)


def test_a_later_declaration_says_how_much_memory(ssd_dir: Path) -> None:
    tables = [tr.Table("t", dim=4, ssd=True, memory=memory) for memory in ("6MiB", "9MiB")]
    other = tr.Table("other", dim=4)
    with embedded(tier=make_row_tier(None, str(ssd_dir))) as cluster:
        cluster.client.create_table(other.schema)
        cluster.client.create_table(tables[0].schema)
        assert cluster.server is not None
        for table, size in zip((*tables, tr.Table("t", dim=4)), (6, 9, 9), strict=True):
            cluster.server.create_table(table.schema)
            assert memory_of(cluster, "t") == size << 20
        late = tr.Table("other", dim=4, ssd=True, memory="6MiB")
        with pytest.raises(BadRequest, match=r"'other': ssd=True: expected a new table, found one"):
            cluster.server.create_table(late.schema)


def test_memory_that_the_tables_alone_exceed_is_refused(ssd_dir: Path) -> None:
    tier = make_row_tier("1MiB", str(ssd_dir))
    with (
        embedded(tier=tier) as cluster,
        pytest.raises(ResourceExhausted, match=r"--memory: .* beside their rows \(1 here"),
    ):
        cluster.client.create_table(tr.Table("ids", dim=4).schema)


@pytest.mark.parametrize(
    ("memory", "folder", "message"),
    [
        ("1GiB", None, "expected --ssd_dir with --memory"),
        ("much", "/", "--memory: expected a number of bytes such as 2GiB, found 'much'"),
        ("1GiB", "/no/such", "--ssd_dir: expected a folder, found '/no/such'"),
        ("1GiB", " ,", "--ssd_dir: expected a folder, found none"),
        ("1GiB", "/,/.", "--ssd_dir: expected each folder once, found ['/', '/']"),
    ],
)
def test_half_a_tier_is_refused(memory: str | None, folder: str | None, message: str) -> None:
    with pytest.raises(BadRequest, match=re.escape(message)):
        make_row_tier(memory, folder)


def test_what_an_ended_process_left_is_removed_and_what_a_living_one_has_is_not(
    ssd_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    left = ssd_dir / "trireme-rows-left"
    left.mkdir()
    (left / "000000000001.rows").write_bytes(b"rows")
    living = RowTier(1 << 30, [ssd_dir])
    assert not left.exists()
    folders = set(ssd_dir.iterdir())
    with caplog.at_level(logging.INFO, logger="trireme.server"):
        other = RowTier(1 << 30, [ssd_dir])
    assert folders < set(ssd_dir.iterdir())
    other.close()
    assert set(ssd_dir.iterdir()) == folders
    living.close()
