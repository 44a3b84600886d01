"""The memory of tables with rows on SSD stays within --memory, also while many more rows come in
than it has room for; and each table has its part of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Event, Thread

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

import trireme as tr
from tests.conditions import wait_until
from tests.integration.saved_rows import saved_rows
from tests.seeds import SEED
from trireme import _core
from trireme.job.cluster import Cluster
from trireme.job.embedded import embedded
from trireme.server.row_tier import RowTier

MEMORY, DIM, NUM_ROWS = 14 << 20, 32, 300_000  # of 290 bytes


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        table = tr.Table("ids", dim=DIM, optimizer=tr.optim.Adagrad(lr=0.1))
        self.ids = tr.nn.EmbeddingBag(table, features=["a"])
        self.head = nn.Linear(DIM, 1)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        out: torch.Tensor = self.head(self.ids(batch).flatten(1))
        return out.squeeze(1)


def make_trainer(cluster: Cluster) -> tr.Trainer:
    model = Model()
    return tr.Trainer(
        model,
        torch.optim.Adam(model.parameters(), lr=0.01),
        loss=nn.functional.binary_cross_entropy_with_logits,
        strategy=tr.Strategy("sync"),
        progress=False,
        cluster=cluster,
    )


@contextmanager
def within_memory(tier: RowTier) -> Iterator[None]:
    """Asserts that all tables together, also those that gather rows, never take more."""
    may_end, totals = Event(), []

    def bytes_of_living() -> list[int]:
        living = (table.rows() for table in tier._tables)
        return [0 if rows is None else rows.bytes for rows in living]

    def watch() -> None:
        while not may_end.wait(0.002):
            # Else they are of different moments: one had gone, another grown.
            if (first := bytes_of_living()) == bytes_of_living():
                totals.append(sum(first))

    watcher = Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        may_end.set()
        watcher.join()
    assert len(totals) > 50
    assert max(totals) <= MEMORY


def assert_on_ssd(cluster: Cluster) -> None:
    assert cluster.server is not None
    use = cluster.server.tables["ids"].rows.tier
    assert use is not None
    assert use["rows"] > NUM_ROWS * 0.8


@pytest.fixture
def tier(tmp_path: Path) -> RowTier:
    (tmp_path / "ssd").mkdir()
    return RowTier(MEMORY, [tmp_path / "ssd"])


def parquet_of(folder: Path, rng: np.random.Generator, keys: np.ndarray) -> dict[str, np.ndarray]:
    """Rows of these keys in three files."""
    rows = {
        "key": rng.permutation(keys),
        "weights": rng.standard_normal((len(keys), DIM), np.float32),
        "state": rng.random((len(keys), DIM), np.float32),
    }
    folder.mkdir()
    for number, some in enumerate(np.array_split(np.arange(len(keys)), 3)):
        lists = {
            name: pa.FixedSizeListArray.from_arrays(rows[name][some].ravel(), DIM)
            for name in ("weights", "state")
        }
        pq.write_table(pa.table({"key": rows["key"][some], **lists}), folder / f"{number}.parquet")
    return rows


@pytest.mark.parametrize("replace", [False, True])
def test_an_import_and_a_load_of_many_times_the_memory_stay_within_it(
    tmp_path: Path, tier: RowTier, *, replace: bool
) -> None:
    rng = np.random.default_rng(SEED)
    rows = parquet_of(tmp_path / "rows", rng, np.arange(NUM_ROWS, dtype=np.uint64))
    with embedded(tier=tier) as cluster:
        trainer = make_trainer(cluster)
        with within_memory(tier):
            source = str(tmp_path / "rows")
            tr.interchange.import_parquet(trainer, "ids", source, replace=replace)
        assert_on_ssd(cluster)
        with within_memory(tier):
            for share in (100, 1) if not replace else ():  # by a claim, and in a copy
                some = {name: values[: NUM_ROWS // share] for name, values in rows.items()}
                tr.interchange.import_arrays(trainer, "ids", some)
            trainer.save(tmp_path / "saved")
    saved, order = saved_rows(tmp_path / "saved")["ids"], np.argsort(rows["key"])
    for name in ("key", "weights", "state"):
        np.testing.assert_array_equal(saved[name], rows[name][order])
    if replace:
        return  # the rows are the same
    again = RowTier(MEMORY, [tmp_path / "ssd"])
    with embedded(tier=again) as cluster:
        trainer = make_trainer(cluster)
        for _ in range(2):  # into a table without rows, and into one that has rows
            with within_memory(again):
                trainer.load(tmp_path / "saved")
            assert_on_ssd(cluster)
        trainer.save(tmp_path / "again")
    for name, values in saved_rows(tmp_path / "again")["ids"].items():
        np.testing.assert_array_equal(values, saved[name])


def table_of(
    tier: RowTier, name: str, dim: int, policy: tr.policy.Policy | None = None
) -> _core.Table:
    table = tr.Table(name, dim=dim, optimizer=tr.optim.SGD(lr=1.0), policy=policy)
    return tier.make_rows(table.schema)


def push(tier: RowTier, rows: _core.Table, keys: np.ndarray, number: int) -> None:
    grads = np.ones((len(keys), rows.dim), np.float32)
    values, pool = _core.RuleValues(lr=1.0), _core.Pool(1)
    claim = tier.with_room(partial(rows.claim, keys, pool))
    claims = [] if claim is None else [claim]
    rows.update(keys, grads, [(0, number)], values, pool, claims=claims, time=1)
    tier.note_push()
    wait_until(lambda: not tier._wanted.is_set())
    with tier._lock:  # until it has divided
        pass


@pytest.mark.parametrize("memory", [MEMORY, 21 << 20, 48 << 20])
@pytest.mark.parametrize("expected", [0, 1_000_000])
def test_memory_in_huge_pages_is_within_the_budget(
    tmp_path: Path, memory: int, expected: int
) -> None:
    """They are taken beyond 16 MiB of rows, and by a load for all rows that it will bring."""
    tier = RowTier(memory, [tmp_path])
    rows = table_of(tier, "t", 64)
    rows.expect(expected)
    keys = np.random.default_rng(SEED).permutation(np.arange(240_000, dtype=np.uint64))
    for number, some in enumerate(keys.reshape(-1, 2000), 1):
        push(tier, rows, some, number)
        assert rows.bytes <= memory
    assert rows.tier["evicted"] > 0


def test_a_small_table_that_grows_beside_a_large_one_has_room(tier: RowTier) -> None:
    large, small = table_of(tier, "large", 240), table_of(tier, "small", 1)
    keys = np.arange(200_000, dtype=np.uint64)
    for number in range(1, 300):  # the memory is divided anew: nearly all to the large one
        push(tier, large, keys[40 * number : 40 * (number + 1)], number)
    assert small.tier["memory_bytes"] < large.tier["memory_bytes"] / 2
    for number in range(1, 101):  # not divided anew by the number of pushes
        push(tier, small, keys[2000 * (number - 1) : 2000 * number], number)
    assert small.rows == len(keys)
    assert large.bytes + small.bytes <= MEMORY


def test_a_table_whose_rows_have_all_expired_gives_up_their_memory_and_gets_new_rows(
    tmp_path: Path,
) -> None:
    tier = RowTier(12 << 20, [tmp_path])
    old, new = (table_of(tier, name, 32, tr.policy.Policy(ttl_s=1)) for name in ("old", "new"))
    batches = np.arange(400_000, dtype=np.uint64).reshape(-1, 1000)
    for number, keys in enumerate(batches[:100], 1):
        push(tier, old, keys, number)
    for bucket in range(4096):
        old.shrink(bucket, 10, False, old.version)
    assert old.rows == 0
    before = old.tier["memory_bytes"]
    for number, keys in enumerate(batches, 1):
        push(tier, new, keys, number)
    assert old.tier["memory_bytes"] < before
    for number, keys in enumerate(batches[:10], 101):
        push(tier, old, keys, number)
    assert old.rows == 10_000
    for rows in (old, new):
        assert rows.bytes <= rows.tier["memory_bytes"]


def test_every_table_has_room_beside_what_finds_its_rows(tmp_path: Path) -> None:
    tier = RowTier(6_500_000, [tmp_path])
    tables = [table_of(tier, name, 100) for name in ("large", "small")]
    keys = np.arange(3000, dtype=np.uint64)
    for number in range(1, 258):
        push(tier, tables[0], keys[10 * number : 10 * (number + 1)], number)
    for rows in tables:
        assert rows.tier["memory_bytes"] >= rows.tier["own_bytes"] * 9 / 8


def test_tables_that_are_gone_have_no_part_of_the_memory(tier: RowTier) -> None:
    staged = table_of(tier, "t", 8)
    rows = table_of(tier, "t", 8)
    del staged
    keys = np.arange(10, dtype=np.uint64)
    for number in range(1, 258):
        push(tier, rows, keys, number)
    assert rows.tier["memory_bytes"] > MEMORY - (1 << 16)
