"""A load is on all servers or on none, whichever process is killed, whichever disk is full."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.durable_servers import DurableServers
from tests.integration.test_whole_imports import (
    TABLE,
    die_at,
    end_log_with_page,
    fill,
    import_ones,
    values,
)
from tests.programs import Template
from trireme.checkpoint.worker_side.load import load_checkpoint
from trireme.checkpoint.worker_side.save import save_checkpoint
from trireme.errors import BadRequest, Corruption, ResourceExhausted, Unavailable
from trireme.job.cluster import Cluster


def saved_ones(cluster: Cluster, folder: Path) -> Path:
    """A checkpoint of ones; the tables then have twos."""
    cluster.client.create_table(TABLE.schema)
    return saved(cluster, folder / "ones", 1.0, 2.0)


def saved(cluster: Cluster, path: Path, value: float, after: float, mode: str = "full") -> Path:
    """A checkpoint of one value; the tables then have another."""
    import_ones(cluster, value, replace=False)
    save_checkpoint(cluster.client, path, extra={}, tensors={}, mode=mode)
    import_ones(cluster, after, replace=False)
    return path


@pytest.mark.parametrize(
    ("call", "reached", "expected"),
    [
        ("prepare", (0,), 2.0),
        ("coord.decide", (), 2.0),
        ("coord.decide", (0,), 1.0),
        ("load", (0,), 1.0),
        ("load", (1,), 1.0),
    ],
)
def test_a_load_is_whole_or_not_at_all_wherever_its_worker_and_a_server_are_killed(
    programs: Template,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    reached: tuple[int, ...],
    expected: float,
) -> None:
    with DurableServers(programs, 2, tmp_path) as servers:
        cluster = servers.join(0, 1)
        ones = saved_ones(cluster, tmp_path)
        die_at(cluster, call, monkeypatch, *reached)
        with pytest.raises(Unavailable, match="is killed here"):
            load_checkpoint(cluster.client, ones)
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
        load_checkpoint(successor.client, ones)
        assert values(successor) == {1.0}
        successor.abandon()


def test_a_worker_that_dies_leaves_no_half_load_without_durability(
    programs: Template, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DurableServers(programs, 2, tmp_path, durability="none") as servers:
        cluster = servers.join(0, 1)
        ones = saved_ones(cluster, tmp_path)
        die_at(cluster, "load", monkeypatch, 1)
        with pytest.raises(Unavailable, match="is killed here"):
            load_checkpoint(cluster.client, ones)
        cluster.abandon()
        successor = servers.join(0, 1)
        assert values(successor) == {1.0}
        successor.abandon()


def test_a_delta_is_loaded_whole_when_servers_are_killed_in_it(
    programs: Template, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DurableServers(programs, 2, tmp_path) as servers:
        cluster = servers.join(0, 1)
        cluster.client.create_table(TABLE.schema)
        base = saved(cluster, tmp_path / "base", 1.0, 2.0, "base")
        delta = saved(cluster, tmp_path / "delta", 2.0, 3.0, "delta")
        load_checkpoint(cluster.client, base)
        assert values(cluster) == {1.0}
        die_at(cluster, "load", monkeypatch, 0)
        with pytest.raises(Unavailable, match="is killed here"):
            load_checkpoint(cluster.client, delta)
        cluster.abandon()
        for server in (0, 1):
            servers.kill(server)
            servers.start(server)
        successor = servers.join(0, 1)
        assert values(successor) == {2.0}
        next_delta = saved(successor, tmp_path / "next", 4.0, 5.0, "delta")
        load_checkpoint(successor.client, base)
        for path, value in ((delta, 2.0), (next_delta, 4.0)):
            load_checkpoint(successor.client, path)
            assert values(successor) == {value}
        successor.abandon()


def test_a_load_that_is_decided_waits_for_a_checkpoint_that_has_gone(
    programs: Template, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DurableServers(programs, 2, tmp_path) as servers:
        cluster = servers.join(0, 1)
        ones = saved_ones(cluster, tmp_path)
        others = saved(cluster, tmp_path / "others", 3.0, 2.0)
        die_at(cluster, "load", monkeypatch)
        with pytest.raises(Unavailable, match="is killed here"):
            load_checkpoint(cluster.client, ones)
        monkeypatch.undo()
        servers.kill(1)
        servers.start(1)
        ones.rename(tmp_path / "away")
        for _ in range(2):
            with pytest.raises(
                (BadRequest, Corruption), match=f"{ones} is decided.*Put this checkpoint back"
            ):
                values(cluster)
        with pytest.raises((BadRequest, Corruption), match=f"{ones} is decided.*Put this"):
            load_checkpoint(cluster.client, others)
        (tmp_path / "away").rename(ones)
        assert values(cluster) == {1.0}
        cluster.abandon()


def test_a_load_that_a_full_disk_refuses_before_it_is_decided_changes_nothing(
    programs: Template, small_disk: Path
) -> None:
    with DurableServers(
        programs, 1, small_disk.parent, state=small_disk, log_bytes=1 << 30
    ) as servers:
        cluster = servers.join(0, 1)
        ones = saved_ones(cluster, small_disk.parent)
        end_log_with_page(cluster, small_disk / "state-0")
        other = fill(small_disk)
        with pytest.raises(ResourceExhausted, match="No space left"):
            load_checkpoint(cluster.client, ones, tables=["t"])
        other.unlink()
        assert values(cluster) == {2.0}
        import_ones(cluster, 3.0)
        servers.kill(0)
        servers.start(0)
        assert values(cluster) == {3.0}
        cluster.abandon()


def test_a_load_that_a_disk_is_too_full_to_keep_is_read_nowhere_before_there_is_room(
    programs: Template, small_disk: Path
) -> None:
    with DurableServers(
        programs, 1, small_disk.parent, state=small_disk, log_bytes=1 << 30
    ) as servers:
        cluster = servers.join(0, 1)
        ones = saved_ones(cluster, small_disk.parent)
        other = fill(small_disk, 32768)  # enough for its record, not for its rows
        with pytest.raises(ResourceExhausted, match="No space left"):
            load_checkpoint(cluster.client, ones)
        for _ in range(2):
            with pytest.raises(ResourceExhausted, match="No space left"):
                values(cluster)
            with pytest.raises(ResourceExhausted, match="No space left"):
                import_ones(cluster, 3.0)
        other.unlink()
        servers.kill(0)
        servers.start(0)
        assert values(cluster) == {1.0}
        servers.kill(0)
        servers.start(0)
        assert values(cluster) == {1.0}
        cluster.abandon()
