"""A job in sync ends with the same bits however little of its rows has room in memory: rows of all
kinds, and all that reads and writes them whole: checkpoints, deltas, shrinking, exports, imports.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

import trireme as tr
from tests.integration.durable_servers import DurableServers
from tests.integration.saved_rows import saved_rows
from tests.long import sampled
from tests.programs import Template
from tests.seeds import SEED
from trireme.commands import cli
from trireme.data import Batch
from trireme.job.cluster import Cluster
from trireme.policy import CountFilter, CtrCommonAccessor, Policy, Probability, ShowClick
from trireme.table import Table

BATCH, NUM_IDS, NUM_BATCHES, DAY_S = 180, 12_000, 40, 86_400
MEMORIES = ("70MiB", "16MiB", "7MiB", "4MiB")
"""Of a server: for all of the 5 to 50 MB of rows, and less, beside 2 MB for what finds them. The
least holds the rows of a push.
"""
WITH_LARGE_PAGES = {("heads", "momentum"), ("heads", "adagrad")}
"""Rows of 1.64 kB have pages of 12 KiB, whose buffers alone take more than 4 MiB."""
MEMORY_OF_LOAD = "8MiB"  # for two tables: the new one gathers the rows
SHOWN = ShowClick("show", "label")
HEADS = CtrCommonAccessor(
    show_click=SHOWN, embedx_threshold=2.0, delete_threshold=0.3, delete_after_unseen_days=2
)
RULES = {
    "sgd": tr.optim.SGD(lr=0.1),
    "momentum": tr.optim.SGD(lr=0.1, momentum=0.9),
    "adagrad": tr.optim.Adagrad(lr=0.1),
    "adam": tr.optim.Adam(lr=0.01),
    "row adam": tr.optim.Adam(lr=0.01, bias_correction="row"),
    "ftrl": tr.optim.FTRL(lr=0.1),
    "fleet adagrad": tr.optim.FleetAdagrad(lr=0.05),
    "fleet adam": tr.optim.FleetAdam(lr=0.01),
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"dim": 200, "salt": True},
    "classes": {"dims": {"a": 240, "b": 130}, "dtype": "bfloat16", "salt": True},
    "admitted": {"dim": 200, "dtype": "float16", "admit": CountFilter(2), "salt": True},
    "by chance": {
        "dim": 200,
        "admit": Probability(0.7),
        "policy": Policy(max_rows=9000),
        "salt": True,
    },
    "heads": {"dim": 200, "policy": HEADS, "absent": "zeros", "salt": True},
    "for a time": {"dim": 200, "policy": Policy(ttl_s=2 * DAY_S), "salt": True},
}


class Model(nn.Module):
    def __init__(self, table: Table) -> None:
        super().__init__()
        self.rows = tr.nn.EmbeddingBag(table, features=["a", "b"])
        self.head = nn.Linear(sum(self.rows.dims), 1)

    def forward(self, batch: Any) -> torch.Tensor:
        out: torch.Tensor = self.head(self.rows(batch).flatten(1))
        return out.squeeze(1)


def batches(number: int) -> list[Batch]:
    rng = np.random.default_rng([SEED, number])
    return [
        Batch(
            {
                "a": torch.from_numpy(rng.integers(0, NUM_IDS, BATCH)),
                "b": torch.from_numpy(rng.integers(0, NUM_IDS, BATCH)),
                "label": torch.from_numpy(rng.integers(0, 2, BATCH).astype(np.float32)),
                "show": torch.ones(BATCH),
            }
        )
        for _ in range(NUM_BATCHES)
    ]


def trainer_of(cluster: Cluster, rule: str, kind: str) -> tr.Trainer:
    torch.manual_seed(1)
    model = Model(Table("t", optimizer=RULES[rule], seed=3, **KINDS[kind]))
    return tr.Trainer(
        model,
        torch.optim.Adam(model.parameters(), lr=0.01),
        loss=nn.functional.binary_cross_entropy_with_logits,
        strategy=tr.Strategy("sync"),
        progress=False,
        cluster=cluster,
    )


def on_ssd(cluster: Cluster) -> float:
    """The share of the rows there."""
    [stats] = cluster.client.stats()
    table = stats["tables"]["t"]
    return 0.0 if table["tier"] is None else table["tier"]["rows"] / table["rows"]


def train(trainer: tr.Trainer, folder: Path) -> list[Any]:
    """A base, a delta with removed keys on top of it, and the end of the job, with an export."""
    counts = []
    for day in range(3):
        trainer.set_time((1000 + 2 * day) * DAY_S)
        trainer.fit(batches(day))
        counts.append(trainer.shrink())
        trainer.save(folder / str(day), mode="delta" if day == 1 else "base")
    tr.interchange.export_parquet(trainer, folder / "parquet")
    return [*counts, trainer.counters()]


@contextmanager
def job(programs: Template, folder: Path, memory: str = "") -> Iterator[Cluster]:
    (folder / "ssd-0").mkdir(parents=True)
    (folder / "ssd-1").mkdir()
    ssd_dir = f"{folder / 'ssd-0'},{folder / 'ssd-1'}"
    options = ["--memory", memory, "--ssd_dir", ssd_dir] if memory else []
    with (
        DurableServers(programs, 1, folder.parent, durability="none", options=options) as servers,
        servers.join(0, 1) as cluster,
    ):
        yield cluster


def assert_same(first: Path, second: Path) -> None:
    (expected,), (actual,) = saved_rows(first).values(), saved_rows(second).values()
    assert expected.keys() == actual.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(actual[name], values, err_msg=name)


def exported(folder: Path) -> Any:
    [path] = folder.iterdir()
    return pq.read_table(path).sort_by("key")


def inspected(path: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Without the lines that say where the checkpoint is and when it was saved."""
    assert cli.main(["inspect", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    return [line for line in lines if str(path) not in line and not line.startswith("saved ")]


@sampled(keep=8)
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_job_ends_with_the_bits_of_one_in_memory(
    programs: Template,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    memory: str,
    rule: str,
    kind: str,
) -> None:
    plain, tiered = tmp_path / "plain", tmp_path / "tiered"
    is_least = memory == MEMORIES[-1]
    if is_least and (kind, rule) in WITH_LARGE_PAGES:
        memory = "5MiB"
    with job(programs, plain) as cluster:
        expected = train(trainer_of(cluster, rule, kind), plain)
    with job(programs, tiered, memory) as cluster:
        assert train(trainer_of(cluster, rule, kind), tiered) == expected
        assert on_ssd(cluster) > 0.2 or not is_least
    for day in "012":
        assert_same(plain / day, tiered / day)
        assert inspected(plain / day, capsys) == inspected(tiered / day, capsys)
    assert exported(plain / "parquet") == exported(tiered / "parquet")
    loads = {"memory": (tiered, ""), "ssd": (plain, MEMORY_OF_LOAD)}
    for name, (source, of_load) in loads.items():
        with job(programs, tmp_path / name, of_load) as cluster:
            trainer = trainer_of(cluster, rule, kind)
            for day in "01":
                trainer.load(source / day)
            trainer.save(tmp_path / name / "saved")
    assert_same(tmp_path / "memory" / "saved", tmp_path / "ssd" / "saved")
