"""A chain of a base and its deltas gives the job's rows, whatever imports, passes on a device and
removals are on their way when a save begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np
import pytest

import trireme as tr
from tests.integration.durable_servers import DurableServers
from tests.integration.saved_rows import saved_rows
from tests.integration.test_device_passes import (
    RULES,
    assert_equal,
    contents,
    data,
    trainer,
)
from tests.integration.test_device_windows import memory_of
from tests.integration.test_row_tier_loads import DAY_S, TABLES, Trained, assert_same, on_ssd
from tests.integration.test_row_tier_loads import in_memory as one_in_memory
from tests.programs import Template
from tests.tables import POOL, T_ROWS
from trireme import _core
from trireme.checkpoint.worker_side.load import load_checkpoint
from trireme.checkpoint.worker_side.save import save_checkpoint
from trireme.device import BlockLayout
from trireme.errors import BadRequest
from trireme.interchange.worker_side.import_requests import (
    importing,
    new_id,
    send_rows,
    send_wide_rows,
)
from trireme.job.cluster import Cluster
from trireme.job.default import set_default
from trireme.job.embedded import embedded

Importing = Callable[[Cluster, int, int], AbstractContextManager[None]]
LAYOUT = BlockLayout.of(TABLES[0].schema, 0)


@contextmanager
def arrays(cluster: Cluster, low: int, high: int) -> Iterator[None]:
    keys = np.arange(low, high, dtype=np.uint64)
    rows = {"key": keys, "weights": np.full((len(keys), 4), 2.0, np.float32)}
    with importing(cluster.client, ["t"], replace=False) as id:
        send_rows(cluster.client, "t", rows, time=DAY_S, pool=POOL, id=id)
        yield


@contextmanager
def wide(cluster: Cluster, low: int, high: int, *, is_read: bool = False) -> Iterator[None]:
    """As a pass on a device gives its rows to the servers."""
    keys = _core.unique(np.arange(low, high, dtype=np.uint64), POOL)[0]
    rows = np.asarray(LAYOUT.new_rows(np.full((len(keys), 4), 2.0, np.float32)))
    id = new_id()
    with importing(cluster.client, ["t"], replace=False, id=id, is_read=is_read):
        send_wide_rows(cluster.client, T_ROWS, keys, rows, POOL, id)
        yield


@contextmanager
def wide_read(cluster: Cluster, low: int, high: int) -> Iterator[None]:
    with wide(cluster, low, high, is_read=True):
        yield


def check_chain(expected: Trained, chain: list[Path], folder: Path) -> None:
    """That these checkpoints, loaded into a job without rows, give those of `expected`."""
    with one_in_memory([]) as loaded:
        for path in chain:
            loaded.load(path)
        assert_same(expected, loaded, folder)


@pytest.mark.parametrize("import_of", [arrays, wide, wide_read])
@pytest.mark.parametrize(
    ("place", "num_trained", "num_imported"),
    [
        ("memory", 3000, 2000),
        ("ssd", 3000, 2000),  # has a claim
        ("ssd", 40_000, 300_000),  # has a copy of the table
        ("ssd", 0, 300_000),  # comes in the place of a table without rows
    ],
)
def test_rows_that_were_prepared_before_a_save_are_in_the_next_delta(
    tmp_path: Path, import_of: Importing, place: str, num_trained: int, num_imported: int
) -> None:
    opened = one_in_memory() if place == "memory" else on_ssd(tmp_path, 32 << 20)
    with opened as server:
        if num_trained:
            server.train("t", 0, num_trained)
        low = num_trained // 2
        with import_of(server.cluster, low, low + num_imported):
            base = server.save(tmp_path / "base", "base")
        delta = server.save(tmp_path / "delta", "delta")
        with import_of(server.cluster, low + 100, low + 200):
            last = server.save(tmp_path / "last", "delta")
        chain = [base, delta, last, server.save(tmp_path / "end", "delta")]
        check_chain(server, chain, tmp_path)
        for name, num_changed in (("delta", num_imported), ("last", 0), ("end", 100)):
            assert len(saved_rows(tmp_path / name)["t"]["key"]) == num_changed


def test_a_copy_that_was_made_before_a_save_is_given_up(tmp_path: Path) -> None:
    with on_ssd(tmp_path, 32 << 20) as server:
        server.train("t", 0, 40_000)

        def decide(_: str) -> bool:
            server.server.raise_version(server.server.tables.version + 1)  # as a save that began
            return True

        base = server.save(tmp_path / "base", "base")
        keys = np.arange(20_000, 320_000, dtype=np.uint64)
        rows = {"key": keys, "weights": np.full((len(keys), 4), 2.0, np.float32)}
        with importing(server.cluster.client, ["t"], replace=False, decide=decide) as id:
            send_rows(server.cluster.client, "t", rows, time=DAY_S, pool=POOL, id=id)
        versions = {
            int(version)
            for bucket in range(0, _core.NUM_BUCKETS, 64)
            for version in _versions(server.rows("t"), bucket, since=1)
        }
        assert versions == {3}
        check_chain(server, [base, server.save(tmp_path / "delta", "delta")], tmp_path)


def _versions(rows: _core.Table, bucket: int, since: int) -> np.ndarray:
    return LAYOUT.wide.statistics(rows.snapshot(bucket, since).rows)["version"]


def test_servers_that_are_killed_around_an_import_have_it_in_the_next_delta(
    programs: Template, tmp_path: Path
) -> None:
    with DurableServers(programs, 2, tmp_path) as servers, servers.join(0, 1) as cluster:
        client = cluster.client
        client.create_table(TABLES[0].schema)

        def save(name: str, mode: str) -> Path:
            save_checkpoint(client, tmp_path / name, extra={}, tensors={}, mode=mode)
            return tmp_path / name

        def kill(server: int) -> None:
            servers.kill(server)
            servers.start(server)

        def decide(_: str) -> bool:
            kill(0)
            return True

        with arrays(cluster, 0, 900):
            pass
        keys = np.arange(600, 1500, dtype=np.uint64)
        rows = {"key": keys, "weights": np.full((len(keys), 4), 3.0, np.float32)}
        with importing(client, ["t"], replace=False, decide=decide) as id:
            send_rows(client, "t", rows, time=DAY_S, pool=POOL, id=id)
            chain = [save("base", "base")]
        kill(1)
        chain.append(save("delta", "delta"))
        expected = saved_rows(save("all", "full"))["t"]
        assert len(saved_rows(chain[1])["t"]["key"]) == len(keys)
    with one_in_memory([]) as loaded:
        for path in chain:
            loaded.load(path)
        actual = saved_rows(loaded.save(tmp_path / "loaded"))["t"]
    for column, values in expected.items():
        np.testing.assert_array_equal(actual[column], values, err_msg=column)


@pytest.mark.parametrize("in_window", [False, True])
def test_what_a_pass_on_a_device_has_trained_is_in_the_next_delta(
    tmp_path: Path, in_window: bool
) -> None:
    """A window gives rows to the servers long before its end."""
    batches, others = data(1), [{**batch, "a": batch["a"] + 500} for batch in data(2)]
    with embedded() as cluster:
        set_default(cluster)
        one = trainer(RULES["adam"]())
        one.fit(data(0))
        one.save(tmp_path / "base", mode="base")
        window = one.in_window(1, memory_of(one, 100))
        with window if in_window else one.on_device([*batches, *others]):
            one.fit(batches)
            one.fit(others)
            save_checkpoint(cluster.client, tmp_path / "within", extra={}, tensors={}, mode="delta")
            one.fit(others)
        one.save(tmp_path / "delta", mode="delta")
        expected = contents(cluster)
    with embedded() as cluster:
        set_default(cluster)
        one = trainer(RULES["adam"]())
        for name in ("base", "within", "delta"):
            load_checkpoint(cluster.client, tmp_path / name)
        assert_equal(contents(cluster), expected)


# ---- removed keys ----


def test_a_delta_after_a_load_removes_no_row_that_had_come_back(tmp_path: Path) -> None:
    """An export for inference has the servers remember removals from before the base."""
    tables = TABLES[:1]
    with one_in_memory(tables) as server:
        server.train("t", 0, 500)
        ask = server.cluster.client.servers.ask
        export = ask("coord.export", {"mode": "inference", "follows": ""}).body
        server.server.raise_version(export["version"] + 1)
        published = {"id": "first", "mode": "inference", "follows": ""}
        ask("coord.published", {**published, "version": export["version"]})
        server.shrink(9 * DAY_S)
        assert server.rows("t").rows == 0
        server.train("t", 0, 300, time=9 * DAY_S)
        base = server.save(tmp_path / "base", "base")
        full = server.save(tmp_path / "full")
    with one_in_memory(tables) as server:
        server.load(full)
        server.sequence = 10
        server.train("t", 200, 350, time=9 * DAY_S)
        delta = server.save(tmp_path / "delta", "delta")
        assert server.rows("t").rows == 350
        check_chain(server, [base, delta], tmp_path)


def test_no_delta_follows_the_rows_of_a_model_that_was_dropped(tmp_path: Path) -> None:
    with embedded() as cluster:
        set_default(cluster)
        one = trainer(RULES["adam"]())
        one.fit(data(0))
        one.save(tmp_path / "base", mode="base")
        other = trainer(RULES["adam"](), fresh=True)
        other.fit(data(1)[:1])
        with pytest.raises(BadRequest, match="expected a full or base checkpoint before the first"):
            other.save(tmp_path / "delta", mode="delta")
        other.save(tmp_path / "full")
        other.fit(data(2)[:1])
        other.save(tmp_path / "delta", mode="delta")
        expected = contents(cluster)
    with embedded() as cluster:
        set_default(cluster)
        one = trainer(RULES["adam"]())
        for name in ("full", "delta"):
            one.load(tmp_path / name)
        assert_equal(contents(cluster), expected)


# ---- changes between two loads ----


def shrink(one: tr.Trainer) -> None:
    one.shrink()


def import_rows(one: tr.Trainer) -> None:
    rows = {"key": np.arange(5, dtype=np.uint64), "weights": np.zeros((5, 4), np.float32)}
    tr.interchange.import_arrays(one, "keys", rows)


def train_on_device(one: tr.Trainer) -> None:
    with one.on_device(data(3)):
        one.fit(data(3))


@pytest.mark.parametrize("change", [shrink, import_rows, train_on_device])
def test_a_delta_is_not_loaded_over_other_rows_than_it_follows(
    tmp_path: Path, change: Callable[[tr.Trainer], None]
) -> None:
    with embedded() as cluster:
        set_default(cluster)
        one = trainer(RULES["adam"]())
        one.fit(data(0))
        one.save(tmp_path / "base", mode="base")
        one.fit(data(1))
        one.save(tmp_path / "delta", mode="delta")
        expected = contents(cluster)
        one.load(tmp_path / "base")
        change(one)
        with pytest.raises(BadRequest, match="expected no training, import or expiry between"):
            one.load(tmp_path / "delta")
        one.load(tmp_path / "base")
        one.load(tmp_path / "delta")
        assert_equal(contents(cluster), expected)
