"""An import is on all servers or on none, whichever process is killed, whichever disk is full."""

from __future__ import annotations

import itertools
import mmap
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trireme as tr
from tests.integration.durable_servers import DurableServers
from tests.long import sampled
from tests.programs import Template
from tests.tables import T_ROWS
from trireme import _core
from trireme.errors import BadRequest, NotReady, ResourceExhausted, Unavailable
from trireme.interchange.worker_side.dense_blocks import read_blocks
from trireme.interchange.worker_side.import_requests import importing, send_rows
from trireme.job.cluster import Cluster
from trireme.job.embedded import embedded
from trireme.rpc import Call

TABLE = tr.Table("t", dim=4, optimizer=tr.optim.SGD(lr=1.0), absent="zeros")
NUM_KEYS = 600
KEYS = np.arange(NUM_KEYS, dtype=np.uint64)


def import_ones(cluster: Cluster, value: float = 1.0, replace: bool = True) -> None:
    weights = np.full((NUM_KEYS, 4), value, np.float32)
    with importing(cluster.client, ["t"], replace=replace) as id:
        rows = {"key": KEYS, "weights": weights}
        send_rows(cluster.client, "t", rows, time=0, pool=cluster.pool, id=id)


def values(cluster: Cluster) -> set[float]:
    keys = _core.unique(KEYS, cluster.pool)[0]
    return set(np.unique(cluster.client.pull({T_ROWS: keys}).rows[T_ROWS].numpy()).tolist())


def test_rows_of_an_import_that_nobody_reads_are_not_read() -> None:
    with embedded() as cluster:
        client = cluster.client
        client.create_table(TABLE.schema)
        call = Call(client.servers.endpoints[0], "import.read", {"table": "t", "id": "x"}, [KEYS])
        with importing(client, ["t"], replace=False, id="x"):
            [reply] = client.servers.call_all([call], 60.0)
            assert not reply.arrays[0].any()
        with (
            pytest.raises(
                BadRequest, match=r"expected import\.begin with is_read, found it without"
            ),
            importing(client, ["t"], replace=False, id="x", is_read=False),
        ):
            client.servers.call_all([call], 60.0)


@pytest.mark.parametrize("replace", [True, False])
def test_an_import_does_not_end_with_the_rows_of_another(replace: bool) -> None:
    with embedded() as cluster:
        cluster.client.create_table(TABLE.schema)
        import_ones(cluster)
        with ExitStack() as stack:
            stack.enter_context(pytest.raises(NotReady, match="another import into them has begun"))
            id = stack.enter_context(importing(cluster.client, ["t"], replace=replace))
            rows = {"key": KEYS, "weights": np.full((NUM_KEYS, 4), 2.0, np.float32)}
            send_rows(cluster.client, "t", rows, time=0, pool=cluster.pool, id=id)
            body = {"table": "t", "id": "of another worker"}
            cluster.client.servers.everywhere("import.begin", body)
        assert values(cluster) == {1.0}


def test_rows_do_not_come_into_an_import_of_another() -> None:
    with embedded() as cluster:
        cluster.client.create_table(TABLE.schema)
        with ExitStack() as stack:
            stack.enter_context(pytest.raises(NotReady, match="another import into them has begun"))
            earlier = stack.enter_context(importing(cluster.client, ["t"], replace=False))
            import_ones(cluster, replace=False)
            with importing(cluster.client, ["t"], replace=False) as later:
                some = {"key": KEYS[:5], "weights": np.full((5, 4), 2.0, np.float32)}
                send_rows(cluster.client, "t", some, time=0, pool=cluster.pool, id=later)
                rows = {"key": KEYS, "weights": np.full((NUM_KEYS, 4), 3.0, np.float32)}
                with pytest.raises(NotReady, match="another import into them has begun"):
                    send_rows(cluster.client, "t", rows, time=0, pool=cluster.pool, id=earlier)
        assert values(cluster) == {1.0, 2.0}


def refuse() -> None:
    raise Unavailable("the worker is killed here")


def die_at(cluster: Cluster, method: str, monkeypatch: pytest.MonkeyPatch, *reached: int) -> None:
    """The worker ends when it would call `method`, or start an operation of this name; only these
    servers get its call.
    """
    servers = cluster.client.servers
    call_all = servers.call_all
    monkeypatch.setattr(
        servers, "call_all", lambda calls, timeout_s, aside=False: stop(calls, timeout_s)
    )
    monkeypatch.setattr(
        servers, "everywhere", lambda name, body, **options: everywhere(name, body, **options)
    )
    is_dead = False

    def stop(calls: Any, timeout_s: float) -> Any:
        nonlocal is_dead
        if is_dead or method in (calls[0].method, calls[0].body.get("action")):
            some = [] if is_dead else [calls[server] for server in reached]
            is_dead = True
            call_all(some, timeout_s)
            refuse()
        return call_all(calls, timeout_s)

    def everywhere(name: str, body: dict[str, Any], **options: Any) -> Any:
        calls = [Call(endpoint, name, body, []) for endpoint in servers.endpoints]
        return stop(calls, 60.0)


@sampled(keep=5)
@pytest.mark.parametrize("replace", [True, False])
@pytest.mark.parametrize(
    ("method", "reached", "expected"),
    [
        ("import.prepare", (0,), 1.0),
        ("coord.decide", (), 1.0),
        ("coord.decide", (0,), 2.0),
        ("import.finish", (0,), 2.0),
        ("import.finish", (1,), 2.0),
    ],
)
def test_an_import_is_whole_or_not_at_all_wherever_its_worker_and_a_server_are_killed(
    programs: Template,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    reached: tuple[int, ...],
    expected: float,
    replace: bool,
) -> None:
    with DurableServers(programs, 2, tmp_path) as servers:
        cluster = servers.join(0, 1)
        cluster.client.create_table(TABLE.schema)
        import_ones(cluster)
        die_at(cluster, method, monkeypatch, *reached)
        with pytest.raises(Unavailable, match="is killed here"):
            import_ones(cluster, 2.0, replace)
        cluster.abandon()
        for server in (0, 1, 1):  # the last of them during or after its recovery
            servers.kill(server)
            servers.start(server)
        successor = servers.join(0, 1)
        assert values(successor) == {expected}
        for server in (0, 1):
            servers.kill(server)
            servers.start(server)
        assert values(successor) == {expected}
        import_ones(successor, 3.0)
        assert values(successor) == {3.0}
        successor.abandon()


@pytest.mark.parametrize(
    ("method", "reached", "expected"), [("coord.decide", (), 0.0), ("import.finish", (1,), 2.0)]
)
def test_the_dense_part_is_imported_with_the_rows_or_not_at_all(
    programs: Template,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    reached: tuple[int, ...],
    expected: float,
) -> None:
    with DurableServers(programs, 2, tmp_path) as servers:
        cluster = servers.join(0, 1)
        model = nn.Linear(64, 4, bias=False)
        nn.init.zeros_(model.weight)
        dense = torch.optim.SGD(model.parameters(), lr=1.0)
        tr.DistributedOptimizer(dense, model, blocks=tr.Blocks(64), cluster=cluster)
        _, blocks = read_blocks(cluster.client)
        twos = {block_id: {"weights": np.full(64, 2.0, np.float32)} for block_id in blocks}
        die_at(cluster, method, monkeypatch, *reached)
        with (
            pytest.raises(Unavailable, match="is killed here"),
            importing(cluster.client, [], replace=True, blocks=twos),
        ):
            pass
        cluster.abandon()
        for server in (0, 1, 1):
            servers.kill(server)
            servers.start(server)
        successor = servers.join(0, 1)
        for _ in range(2):
            successor.client.pull({}, blocks=True)
            _, blocks = read_blocks(successor.client)
            assert {v for b in blocks.values() for v in b["weights"].tolist()} == {expected}
            for server in (0, 1):
                servers.kill(server)
                servers.start(server)
        successor.abandon()


def test_a_worker_that_dies_leaves_no_half_import_without_durability(
    programs: Template, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DurableServers(programs, 2, tmp_path, durability="none") as servers:
        cluster = servers.join(0, 1)
        cluster.client.create_table(TABLE.schema)
        import_ones(cluster)
        die_at(cluster, "import.finish", monkeypatch, 1)
        with pytest.raises(Unavailable, match="is killed here"):
            import_ones(cluster, 2.0)
        cluster.abandon()
        successor = servers.join(0, 1)
        assert values(successor) == {2.0}
        successor.abandon()


def fill(disk: Path, left: int = 0) -> Path:
    """A file that fills the disk but for `left` bytes."""
    other, size = disk / "other", shutil.disk_usage(disk).free - left
    other.write_bytes(bytes(size))
    return other


def end_log_with_page(cluster: Cluster, disk: Path) -> None:
    """Have the log on this disk end where a page ends, by records of tables with names of the right
    length: a full disk has room for what still fits into the last page.
    """
    [log] = disk.glob("log-*")
    numbers = itertools.count()

    def record(length: int) -> None:
        cluster.client.create_table(tr.Table(f"{next(numbers):0{length}}", dim=1).schema)

    before = log.stat().st_size
    record(8)
    shortest = log.stat().st_size - before
    while (left := -log.stat().st_size % mmap.PAGESIZE) >= 64:
        more = left - shortest
        record(8 + (more if 0 <= more <= 192 else 0))  # names have at most 200 bytes


@pytest.mark.parametrize("left", [0, 8192])  # the latter for some of its rows
def test_an_import_on_a_full_disk_changes_nothing(
    programs: Template, small_disk: Path, left: int
) -> None:
    with DurableServers(programs, 1, small_disk, log_bytes=1 << 30) as servers:
        cluster = servers.join(0, 1)
        cluster.client.create_table(TABLE.schema)
        import_ones(cluster)
        other = fill(small_disk, left)
        with pytest.raises(ResourceExhausted, match="No space left"):
            import_ones(cluster, 2.0)
        assert values(cluster) == {1.0}
        other.unlink()
        for value in (1.0, 2.0):
            servers.kill(0)
            servers.start(0)
            assert values(cluster) == {value}
            import_ones(cluster, 2.0)
        cluster.abandon()


def test_an_import_that_a_disk_is_too_full_to_end_is_read_nowhere_before_there_is_room(
    programs: Template, tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "state"
    state.mkdir()
    (state / "state-1").symlink_to(small_disk)
    with DurableServers(programs, 2, tmp_path, state=state, log_bytes=1 << 30) as servers:
        cluster = servers.join(0, 1)
        cluster.client.create_table(TABLE.schema)
        import_ones(cluster)
        finish = cluster.client.servers.finish
        filled = list[Path]()

        def finish_on_a_full_disk(what: str, id: str, *, commit: bool, timeout_s: float) -> bool:
            end_log_with_page(cluster, small_disk)
            filled.append(fill(small_disk))
            monkeypatch.undo()
            return finish(what, id, commit=commit, timeout_s=timeout_s)

        monkeypatch.setattr(cluster.client.servers, "finish", finish_on_a_full_disk)
        with pytest.raises(ResourceExhausted, match="No space left"):
            import_ones(cluster, 2.0)
        for _ in range(2):
            with pytest.raises(ResourceExhausted, match="No space left"):
                values(cluster)
        filled[0].unlink()
        assert values(cluster) == {2.0}
        servers.kill(1)
        servers.start(1)
        assert values(cluster) == {2.0}
        cluster.abandon()


def test_a_table_that_an_import_names_twice_is_imported_once() -> None:
    with embedded() as cluster:
        cluster.client.create_table(TABLE.schema)
        with importing(cluster.client, ["t", "t"], replace=True) as id:
            rows = {"key": KEYS, "weights": np.ones((NUM_KEYS, 4), np.float32)}
            send_rows(cluster.client, "t", rows, time=0, pool=cluster.pool, id=id)
        assert values(cluster) == {1.0}


def test_rows_for_a_table_that_was_dropped_since_come_into_no_other() -> None:
    with embedded() as cluster:
        client = cluster.client
        client.create_table(TABLE.schema)
        rows = {"key": KEYS, "weights": np.ones((NUM_KEYS, 4), np.float32)}
        with ExitStack() as stack:
            stack.enter_context(pytest.raises(NotReady, match=r"of tables \['t'\], found none"))
            id = stack.enter_context(importing(client, ["t"], replace=False))
            send_rows(client, "t", rows, time=0, pool=cluster.pool, id=id)
            client.begin_anew(["t"], blocks=False)
            client.forget_tables(["t"])
            client.create_table(tr.Table("t", dim=8, absent="zeros").schema)
        assert values(cluster) == {0.0}
        [stats] = client.stats()
        assert stats["tables"]["t"]["rows"] == 0
