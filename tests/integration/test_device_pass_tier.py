"""Passes on a device over a server with rows on SSD: buckets are scanned, and rows have the same
bits as without SSD and without passes.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trireme as tr
from tests.integration.saved_rows import saved_rows
from tests.integration.test_row_tier import batches
from trireme import _core
from trireme.job.cluster import Cluster
from trireme.job.embedded import embedded
from trireme.protocol.routing import buckets_of
from trireme.server.row_scan import read_rows
from trireme.server.row_tier import make_row_tier

MEMORY = "8MiB"  # for 60,000 rows of 232 bytes and what finds them
ABSENT = np.uint64(1 << 60)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        ids = tr.Table("ids", dim=16, optimizer=tr.optim.Adam(lr=0.1))
        self.ids = tr.nn.EmbeddingBag(ids, features=["a", "b"])
        self.head = nn.Linear(32, 1)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        out: torch.Tensor = self.head(self.ids(batch).flatten(1))
        return out.squeeze(1)


def train(cluster: Cluster, folder: Path, *, in_passes: bool) -> None:
    torch.manual_seed(1)
    model = Model()
    trainer = tr.Trainer(
        model,
        torch.optim.Adam(model.parameters(), lr=0.01),
        loss=nn.functional.binary_cross_entropy_with_logits,
        strategy=tr.Strategy("sync"),
        progress=False,
        cluster=cluster,
    )
    for number in (0, 1):
        day = batches(number)
        with trainer.on_device(day) if in_passes else nullcontext():
            trainer.fit(day)
    trainer.save(folder)


def tier_of(cluster: Cluster) -> tuple[_core.Table, dict[str, Any]]:
    assert cluster.server is not None
    rows = cluster.server.tables["ids"].rows
    assert rows.tier is not None
    return rows, rows.tier


def test_passes_over_rows_on_ssd_train_to_the_same_bits(tmp_path: Path) -> None:
    with embedded() as cluster:
        train(cluster, tmp_path / "memory", in_passes=False)
    (tmp_path / "ssd").mkdir()
    with embedded(tier=make_row_tier(MEMORY, str(tmp_path / "ssd"))) as cluster:
        train(cluster, tmp_path / "tier", in_passes=True)
        _, use = tier_of(cluster)
        assert use["rows"] > 10_000
        assert use["fetched"] == 0  # a scan brings no rows into memory
    expected, actual = saved_rows(tmp_path / "memory"), saved_rows(tmp_path / "tier")
    for column, values in expected["ids"].items():
        np.testing.assert_array_equal(actual["ids"][column], values, err_msg=column)


@pytest.mark.parametrize(("every", "is_scanned"), [(1, True), (2000, False)])
def test_buckets_are_scanned_where_a_pass_wants_many_of_their_rows(
    tmp_path: Path, every: int, is_scanned: bool
) -> None:
    (tmp_path / "ssd").mkdir()
    pool = _core.Pool(1)
    with embedded(tier=make_row_tier(MEMORY, str(tmp_path / "ssd"))) as cluster:
        train(cluster, tmp_path / "tier", in_passes=False)
        keys = saved_rows(tmp_path / "tier")["ids"]["key"]
        wanted = np.append(keys[np.argsort(buckets_of(keys), kind="stable")][::every], ABSENT)
        rows, before = tier_of(cluster)
        # As if few buckets had these rows: otherwise one wanted key is a hundredth of a bucket.
        is_present, actual = read_rows(rows, wanted, 4096 if is_scanned else 1, pool)
        _, after = tier_of(cluster)
        num_pages = after["pages_read"] - before["pages_read"]
        if is_scanned:  # each page once, and no row moves into memory
            assert 0 < num_pages <= before["pages_written"]
            assert after["misses"] == before["misses"]
            assert after["evicted"] == before["evicted"]
        else:
            assert 0 < num_pages <= len(wanted)
        assert is_present.tolist() == [True] * (len(wanted) - 1) + [False]
        expected = np.empty_like(actual)
        rows.read_wide(wanted, np.empty(len(wanted), np.uint8), expected, pool)
        np.testing.assert_array_equal(actual, expected)
