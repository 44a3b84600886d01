"""What checkpoints of each mode hold, chains of deltas and their retention, and other readers of
the rows.
"""

from __future__ import annotations

import dataclasses
import datetime
from pathlib import Path
from typing import Any, ClassVar

import duckdb
import numpy as np
import polars
import pyarrow.dataset
import pytest

import trireme as tr
from tests.integration.saved_rows import saved_rows
from tests.jobs import InProcessServer, Job
from trireme import _core
from trireme.checkpoint.format.manifest import read_manifest
from trireme.checkpoint.server_side.rows_to_save import exported
from trireme.checkpoint.worker_side import publication
from trireme.checkpoint.worker_side.load import load_checkpoint
from trireme.checkpoint.worker_side.publication import open_draft
from trireme.checkpoint.worker_side.save import save_checkpoint
from trireme.checkpoint.worker_side.server_operations import ServerOperations
from trireme.errors import BadRequest
from trireme.job.cluster import Cluster
from trireme.optim import rule_values, values_of_group
from trireme.rows.row_statistics import DAY_S
from trireme.rows.wide_rows import RowLayout
from trireme.storage.storage import open_storage

DIM, NUM_KEYS = 2, 600
RULE = tr.optim.Adagrad(lr=0.5)
POLICY = tr.policy.CtrCommonAccessor()
PLAIN = tr.Table("plain", dim=DIM, optimizer=RULE)
SCORED = tr.Table("scored", dim=DIM, optimizer=RULE, policy=POLICY)
Content = dict[tuple[str, int], tuple[bytes, bytes, dict[int, int]]]


class Writer:
    """Applies updates to the tables of a job's servers, as pushes of stream 0 would."""

    def __init__(self, job: Job, cluster: Cluster) -> None:
        for table in (PLAIN, SCORED):
            cluster.client.create_table(table.schema)
        self._job, self._pool, self._number = job, cluster.pool, 0

    def update(self, keys: np.ndarray, *, shows: int = 1, day: int = 20_000) -> None:
        self._number += 1
        values = rule_values(values_of_group(RULE.group(), self._number))
        distinct = _core.unique(keys.astype(np.uint64), self._pool)[0]
        owners = np.empty(len(distinct), np.uint16)
        _core.buckets(distinct, owners)
        for server in self._job.servers:
            mine = distinct[np.isin(owners, server.state.assignment.owned_buckets())]
            gradients = np.ones((len(mine), DIM), np.float32)
            for name, table in server.state.tables.items():
                scores: dict[str, Any] = {}
                if name == "scored":
                    scores["show_click"] = np.tile(np.float32([shows, 1]), (len(mine), 1))
                    scores["features"] = np.ones(len(mine), np.uint32)
                ids = [(0, self._number)]
                table.rows.update(
                    mine, gradients, ids, values, self._pool, time=day * DAY_S, **scores
                )

    def erase(self, keys: np.ndarray) -> None:
        for server in self._job.servers:
            for table in server.state.tables.values():
                table.rows.erase(keys.astype(np.uint64), self._pool)


def content(servers: list[InProcessServer]) -> Content:
    """Every row of every bucket, with the bucket's marks."""
    actual = {}
    for server in servers:
        for name, table in server.state.tables.items():
            for bucket in server.state.assignment.owned_buckets().tolist():
                content = table.rows.snapshot(bucket)
                order = np.argsort(content.keys)
                rows = (content.keys[order].tobytes(), content.rows[order].tobytes())
                actual[name, bucket] = (*rows, dict(content.marks))
    return actual


def save(cluster: Cluster, path: Path, mode: str | int = "full", **options: Any) -> Any:
    return save_checkpoint(cluster.client, path, extra={}, tensors={}, mode=mode, **options)


def some(*, seed: int, num: int) -> np.ndarray:
    return np.random.default_rng(seed).choice(NUM_KEYS, num, replace=False)


# ---- deltas ----


def test_a_chain_of_deltas_restores_the_trained_state(tmp_path: Path) -> None:
    """Rows changed, made and removed, and removed and made again; on other numbers of servers."""
    with Job(2) as job, job.join(0, 1) as cluster:
        writer = Writer(job, cluster)
        writer.update(some(seed=0, num=400))
        save(cluster, tmp_path / "full")
        wanted = [content(job.servers)]
        for number in range(1, 4):
            changed, gone = some(seed=number, num=30), some(seed=10 + number, num=50)
            writer.update(changed)
            writer.erase(gone)
            writer.update(gone[:10])
            manifest = save(cluster, tmp_path / f"{number}", "delta")
            of_plain = manifest.tables["plain"]
            assert of_plain.num_rows <= 40
            assert 10 <= sum(piece.num_removed for piece in of_plain.files) <= 50
            wanted.append(content(job.servers))
    for num_servers in (1, 3):
        with Job(num_servers) as job, job.join(0, 1) as cluster:
            Writer(job, cluster)
            for path, expected in zip(("full", "1", "2", "3"), wanted, strict=True):
                load_checkpoint(cluster.client, tmp_path / path)
                actual = content(job.servers)
                plain = {place for place in expected if place[0] == "plain"}
                assert {place: actual[place] for place in plain} == {
                    place: expected[place] for place in plain
                }
    found_keys = saved_rows(tmp_path / "1")["plain"]["key"]
    assert set(found_keys) <= {*some(seed=1, num=30), *some(seed=11, num=50)[:10]}


def test_deltas_that_do_not_follow_are_refused(tmp_path: Path) -> None:
    with Job(1) as job, job.join(0, 1) as cluster:
        writer = Writer(job, cluster)
        writer.update(some(seed=0, num=50))
        with pytest.raises(BadRequest, match="expected a full or base checkpoint before the first"):
            save(cluster, tmp_path / "delta", "delta")
        assert list(tmp_path.iterdir()) == []
        save(cluster, tmp_path / "full")
        for name in ("1", "2"):
            writer.update(some(seed=int(name), num=50))
            save(cluster, tmp_path / name, "delta")
    with Job(1) as job, job.join(0, 1) as cluster:
        writer = Writer(job, cluster)
        load = cluster.client
        with pytest.raises(
            BadRequest, match=r"the checkpoint of version 1 .*found none \(`trireme verify"
        ):
            load_checkpoint(load, tmp_path / "1")
        load_checkpoint(load, tmp_path / "full")
        with pytest.raises(BadRequest, match=r"to be loaded before the delta .*2 of version 3"):
            load_checkpoint(load, tmp_path / "2")
        writer.update(some(seed=3, num=1))
        before = content(job.servers)
        with pytest.raises(BadRequest, match=r"to be loaded before the delta .*2 of version 3"):
            load_checkpoint(load, tmp_path / "2")
        assert content(job.servers) == before


def test_a_load_whose_check_was_of_another_is_refused(tmp_path: Path) -> None:
    with Job(1) as job, job.join(0, 1) as cluster:
        writer = Writer(job, cluster)
        writer.update(some(seed=0, num=50))
        first, second = save(cluster, tmp_path / "1"), save(cluster, tmp_path / "2")
        before = content(job.servers)
        jobs = ServerOperations(cluster.client, open_storage(tmp_path / "1", None), None, 30)
        order = {"tables": None, "parameters": None, "resumes": True}
        jobs.run("check", id=first.id, **order)
        with pytest.raises(BadRequest, match="expected a load that was checked before"):
            jobs.run("prepare", load="a", id=second.id, **order)
        with pytest.raises(BadRequest, match="expected a load that was checked before"):
            jobs.run("prepare", load="b", id=first.id, **order)
        assert content(job.servers) == before


# ---- modes ----


def test_modes_hold_the_rows_that_they_name(tmp_path: Path) -> None:
    with Job(2) as job, job.join(0, 1) as cluster:
        writer = Writer(job, cluster)
        writer.update(some(seed=0, num=300), shows=1)
        writer.update(some(seed=1, num=100), shows=9)
        time = 20_001 * DAY_S
        before = statistics(job)
        for number, name in ((0, "full"), (3, "batch"), (2, "base")):
            assert save(cluster, tmp_path / name, number, time=time).mode == name
        full = saved_rows(tmp_path / "full")
        for name in ("plain", "scored"):
            for column, values in full[name].items():
                batch = saved_rows(tmp_path / "batch")[name][column]
                np.testing.assert_array_equal(batch, values, err_msg=f"{name} {column}")
        policy = SCORED.policy
        chosen = exported(policy, before, "base", time)
        assert 0 < chosen.sum() < len(chosen)
        base = saved_rows(tmp_path / "base")
        np.testing.assert_array_equal(base["scored"]["key"], full["scored"]["key"][chosen])
        np.testing.assert_array_equal(base["plain"]["key"], full["plain"]["key"])

        writer.update(some(seed=2, num=40), shows=9, day=20_001)
        after = statistics(job)
        was_exported = np.isin(all_keys(job), base["scored"]["key"])
        pushed = np.isin(all_keys(job), some(seed=2, num=40))
        assert (after["delta_score"][was_exported & ~pushed] == 0).all()  # settled by the base
        assert (after["delta_score"][pushed] > 0).all()
        save(cluster, tmp_path / "delta", 1, time=time)
        delta = saved_rows(tmp_path / "delta")
        chosen = exported(policy, after, "delta", time)
        np.testing.assert_array_equal(delta["scored"]["key"], all_keys(job)[chosen])
        np.testing.assert_array_equal(delta["plain"]["key"], np.sort(some(seed=2, num=40)))


def all_keys(job: Job) -> np.ndarray:
    tables = [(s.state, s.state.tables["scored"].rows) for s in job.servers]
    owned = [(rows, b) for state, rows in tables for b in state.assignment.owned_buckets()]
    return np.sort(np.concatenate([rows.snapshot(int(b)).keys for rows, b in owned]))


def statistics(job: Job) -> np.ndarray:
    """Of the scored table, by key."""
    keys, actual = [], []
    for server in job.servers:
        table = server.state.tables["scored"]
        layout = RowLayout.of(table.schema, table.rows)
        for bucket in server.state.assignment.owned_buckets().tolist():
            content = table.rows.snapshot(bucket)
            keys.append(content.keys)
            actual.append(layout.statistics(content.rows))
    return np.concatenate(actual)[np.argsort(np.concatenate(keys))]


@pytest.mark.parametrize("hot", [25, 0.25])
def test_the_hot_set_is_the_most_shown_or_most_recent_of_all_servers(
    tmp_path: Path, hot: float
) -> None:
    with Job(2) as job, job.join(0, 1) as cluster:
        writer = Writer(job, cluster)
        writer.update(np.arange(100))
        writer.update(np.arange(40, 65), shows=7, day=20_002)
        save(cluster, tmp_path / "hot", "hot", hot=hot)
        for name, columns in saved_rows(tmp_path / "hot").items():
            assert columns["key"].tolist() == list(range(40, 65)), name
        for wrong in (0, 0.0, 1.5, -1, True, None):
            with pytest.raises(BadRequest, match="expected hot"):
                save(cluster, tmp_path / "wrong", "hot", hot=wrong)
        with pytest.raises(BadRequest, match="with mode 'hot' and no other"):
            save(cluster, tmp_path / "wrong", "full", hot=3)
        with pytest.raises(BadRequest, match="expected mode full, delta, base, batch, hot or one"):
            save(cluster, tmp_path / "wrong", 4)


# ---- retention of checkpoints ----


def test_checkpoints_that_kept_deltas_need_are_kept(tmp_path: Path) -> None:
    with Job(1) as job, job.join(0, 1) as cluster:
        writer = Writer(job, cluster)
        (tmp_path / "notes").mkdir()

        def names() -> list[str]:
            return sorted(path.name for path in tmp_path.iterdir())

        for number, mode in enumerate(("full", "full", "delta", "delta")):
            writer.update(some(seed=number, num=50))
            save(cluster, tmp_path / str(number), mode, keep=1)
        assert names() == ["1", "2", "3", "notes"]
        save(cluster, tmp_path / "4", "full", keep=2)
        assert names() == ["1", "2", "3", "4", "notes"]
        save(cluster, tmp_path / "5", "full", keep=1)
        assert names() == ["5", "notes"]
        with pytest.raises(BadRequest, match="expected keep as an integer >= 1, found 0"):
            save(cluster, tmp_path / "6", keep=0)


def test_a_long_chain_of_deltas_is_looked_up_once_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Chain(dict[str, int]):
        num_looks = 0

        def __contains__(self, id: object) -> bool:
            Chain.num_looks += 1
            return super().__contains__(id)

    with Job(1) as job, job.join(0, 1) as cluster:
        Writer(job, cluster)
        save(cluster, tmp_path / "1")
    first, num = read_manifest(open_storage(tmp_path / "1", None)), 200
    manifests = {"1": first}
    for version in range(2, num + 1):
        before, id = manifests[str(version - 1)].id, f"{version:032x}"
        chain = Chain({before: version - 1})
        changed = {"id": id, "mode": "delta", "version": version, "chain": chain}
        manifests[str(version)] = dataclasses.replace(first, **changed)
        (tmp_path / str(version)).mkdir()
    read = {str(tmp_path / name): manifest for name, manifest in manifests.items()}
    monkeypatch.setattr(publication, "read_manifest", lambda storage: read[storage.name])
    publication.retain(open_storage(tmp_path / str(num), None), 1)
    assert len(list(tmp_path.iterdir())) == num
    assert Chain.num_looks <= num


def test_the_newest_checkpoints_are_kept_when_the_clock_is_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of another job are older, whatever its clock said."""

    class Clock(datetime.datetime):
        hours: ClassVar = iter([20, 20, 21, 3, 4, 5])

        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Clock:
            return cls(2030, 1, 1, next(cls.hours), tzinfo=tz)

    monkeypatch.setattr(datetime, "datetime", Clock)
    with Job(1) as job, job.join(0, 1) as cluster:
        Writer(job, cluster).update(some(seed=0, num=50))
        for number in range(6):
            extra = {"saved_by": f"{'job' if number else 'another'} 1/save"}
            place = tmp_path / f"saved-{number}"
            save_checkpoint(cluster.client, place, extra=extra, tensors={}, keep=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved-3", "saved-4", "saved-5"]


def test_files_of_a_killed_save_are_removed_and_live_ones_stay(tmp_path: Path) -> None:
    dead = tmp_path / f".7.{'a' * 32}.partial"
    dead.mkdir()
    (dead / "saving").touch()
    (dead / "rows").write_bytes(b"half")
    with Job(1) as job, job.join(0, 1) as cluster:
        Writer(job, cluster)
        with open_draft(open_storage(tmp_path / "8", None)) as living:
            save(cluster, tmp_path / "9")
            assert not dead.exists()
            assert Path(living.storage.name).is_dir()
    assert [path.name for path in tmp_path.iterdir()] == ["9"]


# ---- other readers ----


def test_polars_duckdb_and_pyarrow_read_the_rows(tmp_path: Path) -> None:
    with Job(2) as job, job.join(0, 1) as cluster:
        Writer(job, cluster).update(some(seed=0, num=300), shows=3)
        manifest = save(cluster, tmp_path / "c")
    assert read_manifest(open_storage(tmp_path / "c", None)) == manifest
    files = [str(tmp_path / "c" / p.rows.path) for p in manifest.tables["scored"].files]
    wanted = saved_rows(tmp_path / "c")["scored"]
    dataset = pyarrow.dataset.dataset(files, format="ipc")
    assert dataset.count_rows() == len(wanted["key"]) == 300
    frame = polars.concat([polars.read_ipc(file) for file in files]).sort("key")
    assert frame["key"].to_list() == wanted["key"].tolist()
    assert frame["weights"].to_list() == wanted["weights"].tolist()
    assert frame["state"].to_list() == wanted["state"].tolist()
    connection = duckdb.connect()
    connection.register("rows", dataset)
    actual = connection.sql('select key, weights, "show" from rows order by key').fetchall()
    assert [key for key, _, _ in actual] == wanted["key"].tolist()
    assert [list(weights) for _, weights, _ in actual] == wanted["weights"].tolist()
    assert {show for _, _, show in actual} == {3.0}
    lines = [str(tmp_path / "c" / p.buckets.path) for p in manifest.tables["scored"].files]
    buckets = polars.concat([polars.read_ipc(file) for file in lines])
    assert buckets["bucket"].to_list() == list(range(4096))
    assert buckets["num_rows"].sum() == 300
