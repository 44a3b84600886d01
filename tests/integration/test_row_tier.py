"""Servers whose tables share a budget, with the other rows on SSD: the same bits as in memory."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import trireme as tr
from tests.integration.durable_servers import DurableServers
from tests.integration.saved_rows import saved_rows
from tests.programs import Template
from tests.seeds import SEED
from trireme.errors import BadRequest, ResourceExhausted
from trireme.job.cluster import Cluster
from trireme.job.embedded import embedded
from trireme.server.row_tier import RowTier, make_row_tier

BATCH, NUM_KEYS, MEMORY = 2048, 60_000, "12MiB"


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
        for _ in range(25)
    ]


def train(cluster: Cluster, folder: Path, between: Callable[[], None]) -> nn.Module:
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
        # What the killed one left behind is gone.
        assert len(list(ssd_dir.iterdir())) == 1
    assert_same_rows(roots[0] / "saved", roots[1] / "saved")


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


def test_memory_that_the_tables_alone_exceed_is_refused(ssd_dir: Path) -> None:
    tier = make_row_tier("1MiB", str(ssd_dir))
    with (
        embedded(tier=tier) as cluster,
        pytest.raises(ResourceExhausted, match=r"--memory is 1048576 bytes, and 1 tables take"),
    ):
        cluster.client.create_table(tr.Table("ids", dim=4).schema)


@pytest.mark.parametrize(
    ("memory", "folder", "message"),
    [
        ("1GiB", None, "expected --memory and --ssd_dir together"),
        (None, "/", "expected --memory and --ssd_dir together"),
        ("much", "/", "--memory: expected a number of bytes such as 2GiB, found 'much'"),
        ("1GiB", "/no/such", "--ssd_dir: expected a folder, found '/no/such'"),
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
