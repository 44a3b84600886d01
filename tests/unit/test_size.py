"""`trireme size`: its estimates are within 5 percent of real tables and files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.tables import POOL
from trireme import _core, optim, policy
from trireme.commands import cli
from trireme.commands import size as size_command
from trireme.data import Bags, Batch
from trireme.errors import BadRequest, ResourceExhausted
from trireme.job.cluster import Cluster
from trireme.job.default import set_default
from trireme.job.embedded import embedded
from trireme.nn import EmbeddingBag
from trireme.rows.core_table import make_core_table
from trireme.server.row_tier import RowTier
from trireme.size import tables as size_tables
from trireme.size.estimate import Need
from trireme.size.tier import TierNeed
from trireme.table import Table
from trireme.train import Trainer

TABLES: dict[str, tuple[int, dict[str, Any]]] = {
    "tiny rows": (300_000, {"dim": 1, "optimizer": optim.SGD(lr=0.1)}),
    "adagrad": (700_000, {"dim": 16, "optimizer": optim.Adagrad()}),
    "adam": (300_000, {"dim": 33, "optimizer": optim.Adam()}),
    "fleet, scored": (
        500_000,
        {"dim": 9, "optimizer": optim.FleetAdagrad(), "policy": policy.ScorePolicy()},
    ),
    "a million": (1_000_000, {"dim": 4, "optimizer": optim.FTRL()}),
    "halves": (300_000, {"dim": 32, "optimizer": optim.SGD(lr=0.1), "dtype": "bfloat16"}),
}


def fill(table: _core.Table, num_keys: int, **columns: Any) -> None:
    rng = np.random.default_rng(1)
    keys = rng.integers(0, 2**64, num_keys, np.uint64)
    values = _core.RuleValues(lr=0.1)
    for number, low in enumerate(range(0, num_keys, 20_000)):
        part = keys[low : low + 20_000]
        grads = np.ones((len(part), table.dim), np.float32)
        if table.is_scored:
            columns["show_click"] = np.ones((len(part), 2), np.float32)
        table.update(part, grads, [(0, number + 1)], values, POOL, **columns)


@pytest.mark.parametrize("name", TABLES)
def test_memory_is_that_of_a_table(name: str) -> None:
    num_rows, options = TABLES[name]
    schema = Table("t", **options).schema
    table = make_core_table(schema)
    fill(table, num_rows)
    need = Need(schema, table.rows)
    assert need.memory == pytest.approx(table.bytes, rel=0.05)
    assert sum(need.parts_of_row().values()) == need.row_bytes


def test_memory_of_heads() -> None:
    options = {"dim": 9, "optimizer": optim.FleetAdagrad(), "policy": policy.SparseAccessor()}
    schema = Table("t", **options).schema
    table = make_core_table(schema)
    fill(table, 500_000)  # a push each: no score is near embedx_threshold
    assert Need(schema, table.rows, head_share=1.0).memory == pytest.approx(table.bytes, rel=0.05)


def test_memory_of_rows_of_several_dims() -> None:
    rule, counted = optim.Adam(shared=True), policy.ScorePolicy(embedx_threshold=10.0)
    dims = {"a": 5, "b": 32, "c": 1}
    schema = Table("t", dims=dims, salt=True, optimizer=rule, policy=counted).schema
    table, num_rows = make_core_table(schema), (200_000, 150_000, 100_000, 150_000)
    rng = np.random.default_rng(2)
    for row_class, (dim, num) in enumerate(zip(table.dims, num_rows, strict=True)):
        keys = rng.integers(0, 2**64, num, np.uint64)
        show_click = np.full((num, 2), 1.0 if row_class == 3 else 20.0, np.float32)
        row_class %= 3  # a head is of any
        grads = [
            np.ones((num * (i == row_class), dim), np.float32)
            for i, dim in enumerate(table.dims[:3])
        ]
        values = _core.RuleValues(lr=0.1)
        sequence = table.rows + 1
        table.update(keys, grads, [(0, sequence)], values, POOL, show_click=show_click)
    whole = sum(num_rows[:3])
    shares = tuple(num / whole for num in num_rows[:3])
    need = Need(schema, table.rows, head_share=num_rows[3] / table.rows, shares=shares)
    assert need.memory == pytest.approx(table.bytes, rel=0.05)
    assert sum(need.parts_of_row().values()) == pytest.approx(need.row_bytes)


@pytest.mark.parametrize("sketch_bytes", [None, 1 << 22])
def test_memory_of_keys_that_wait(sketch_bytes: int | None) -> None:
    admit = policy.CountFilter(2, sketch_bytes=sketch_bytes)
    schema = Table("t", dim=4, admit=admit).schema
    table = make_core_table(schema)
    fill(table, 300_000)
    need = Need(schema, table.rows, num_pending=300_000 - table.rows)
    assert need.memory == pytest.approx(table.bytes, rel=0.05)


@pytest.fixture
def home() -> Iterator[Cluster]:
    with embedded(threads=2) as cluster:
        set_default(cluster)
        yield cluster


@pytest.mark.parametrize("options", [{"dim": 16}, {"dim": 9, "policy": policy.ScorePolicy()}])
def test_disk_is_that_of_a_checkpoint(
    home: Cluster, tmp_path: Path, options: dict[str, Any]
) -> None:
    model = EmbeddingBag(Table("t", **options), features=["a"], mode="sum")
    trainer = Trainer(model, None, loss=lambda outputs, labels: outputs.sum())

    def fit(low: int, high: int) -> None:
        ids = torch.arange(low, high)
        bags = Bags(("a",), ids, torch.tensor([0, len(ids)]))
        trainer.fit([Batch({"label": torch.ones(1)}, bags)])

    fit(0, 300_000)
    need = Need(model.table.schema, 300_000)
    trainer.save(tmp_path / "full")
    assert need.checkpoint == pytest.approx(bytes_of(tmp_path / "full"), rel=0.05)
    fit(0, 30_000)
    trainer.save(tmp_path / "delta", mode="delta")
    assert need.delta(0.1) == pytest.approx(bytes_of(tmp_path / "delta"), rel=0.25)


def bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_servers_share_and_have_a_limit() -> None:
    schema = Table("t", dim=16).schema
    alone, part = Need.on_one_of(1, schema, 10**9), Need.on_one_of(3, schema, 10**9)
    assert part.num_buckets == 1366
    assert part.memory == pytest.approx(alone.memory * 1366 / 4096, rel=0.01)
    with pytest.raises(BadRequest, match=r"found 5,000,000,000; give --server_num 2 or more"):
        Need.on_one_of(1, schema, 5 * 10**9)


def output_of(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert cli.main(["size", *argv]) == 0
    return capsys.readouterr().out


def test_the_command_says_what_each_server_needs(capsys: pytest.CaptureFixture[str]) -> None:
    text = output_of(
        capsys, "--keys", "1e9", "--dim", "16", "--optimizer", "adam", "--server_num", "4"
    )
    assert "table table: 1,000,000,000 rows of 16 float32 weights, rule adam" in text
    lines = {
        line.split("  ")[1].strip(): line.split() for line in text.splitlines() if line[:1] == " "
    }
    assert lines["weights"][1:] == ["64.0", "B", "59.6", "GiB", "14.9", "GiB"]
    assert lines["state"][1:3] == ["128.0", "B"]
    assert 6.5 <= float(lines["index"][1]) <= 7.4
    assert "while a checkpoint is written" in text
    assert "--memory B estimates a table with rows on SSD" in text
    options = ["--policy", "score", "--count_filter", "3", "--pending_keys", "1e9"]
    text = output_of(capsys, "--keys", "1e6", "--dims", "16=10", "4=90", "--optimizer", "adam")
    assert "1,000,000 rows of 16, 4 float32 weights" in text
    weights = next(line.split() for line in text.splitlines() if line.startswith("  weights"))
    assert weights[1:3] == [f"{4 * (1.6 + 3.6):.1f}", "B"]
    waits = output_of(capsys, "--keys", "1e6", "--dim", "9", *options)
    assert "policy score, admission count_filter" in waits
    assert "pending keys" in waits


def test_the_command_reads_a_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("hyper_parameters: {sparse_feature_dim: 9}\n")
    text = output_of(capsys, "-m", str(path), "--keys", "1e6", "-o", "model=wide_deep")
    assert "table wide: 1,000,000 rows of 1 float32 weights" in text
    assert "table embedding: 1,000,000 rows of 9 float32 weights" in text
    command = ["size", "-m", str(path), "--keys", "1e6", "--heads", "50", "-o", "model=wide_deep"]
    assert cli.main(command) == 2
    assert "expected --heads with a policy whose rows begin" in capsys.readouterr().err


def test_rows_that_a_budget_holds_are_estimated(tmp_path: Path) -> None:
    table = Table("t", dim=16, optimizer=optim.Adagrad(lr=0.1))
    num_rows, memory = 400_000, 24 << 20
    row_tier = RowTier(memory, [tmp_path])
    rows = row_tier.make_rows(table.schema)
    pool, values = _core.Pool(1), _core.RuleValues(lr=0.1)
    for number, keys in enumerate(np.array_split(np.arange(num_rows, dtype=np.uint64), 100), 1):
        rows.update(keys, np.ones((len(keys), 16), np.float32), [(0, number)], values, pool)
    assert rows.tier is not None
    tier = TierNeed(Need.on_one_of(1, table.schema, num_rows), memory)
    assert tier.hot_rows == pytest.approx(num_rows - rows.tier["rows"], rel=0.1)
    assert tier.least < memory
    assert TierNeed(tier.need, tier.least).hot_rows > 0


def fills(table: Table, num_rows: int, memory: int, folder: Path) -> bool:
    """Whether a server with so much memory takes the table and all its rows."""
    row_tier = RowTier(memory, [folder])
    pool, values = _core.Pool(1), _core.RuleValues(lr=0.1)
    keys = np.arange(num_rows, dtype=np.uint64)
    per_push = max((256 << 10) // (12 * table.schema.dims[0]), 1)
    try:
        rows = row_tier.make_rows(table.schema)
        for number, some in enumerate(np.array_split(keys, -(-num_rows // per_push)), 1):
            grads = np.ones((len(some), rows.dim), np.float32)
            rows.update(some, grads, [(0, number)], values, pool)
            assert rows.bytes <= memory
    except ResourceExhausted:
        return False
    assert rows.rows == num_rows
    assert rows.tier is not None
    assert rows.tier["rows"] > num_rows * 0.8
    return True


@pytest.mark.parametrize(("dim", "num_rows"), [(16, 60_000), (1500, 1500), (4096, 700)])
def test_a_server_takes_a_table_with_the_least_memory_that_is_told_and_not_with_half_of_it(
    dim: int, num_rows: int, tmp_path: Path
) -> None:
    table = Table("t", dim=dim, optimizer=optim.Adam())
    tier = TierNeed(Need.on_one_of(1, table.schema, num_rows), 1 << 20)
    assert TierNeed(tier.need, tier.least).least == tier.least
    assert fills(table, num_rows, tier.least, tmp_path)
    assert not fills(table, num_rows, tier.least // 2, tmp_path)


def test_the_command_tells_memory_disk_and_wear_of_rows_on_ssd(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["size", "--keys", "1e9", "--dim", "16", "--memory"]
    assert cli.main([*command, "20GiB", "--evicted_rows", "1e5", "--endurance", "600"]) == 0
    out = capsys.readouterr().out
    assert "with 20.0 GiB of memory on each server (--memory), and rows on SSD:" in out
    # 28 rows of 144 B in a page of 4096 B, written 1.8 times
    days = 600e12 / (1e5 * 4096 / 28 * 1.8 * 86_400)
    assert f": {days:,.0f} days until 600 TB" in out
    assert "all rows are in memory" not in out
    assert cli.main([*command, "1GiB"]) == 0
    assert "too little: it takes at least 4.2 GiB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--keys", "1", "--dim", "4", "--evicted_rows", "1"], "expected --memory with"),
        (["--keys", "1", "--dim", "4", "--endurance", "9"], "expected --evicted_rows with"),
        (["--keys", "1", "--dim", "4", "--memory", "much"], "--memory: expected a number of bytes"),
        *(
            (
                ["--keys", "1", "--dim", "4", option, wrong],
                f"expected a number > 0, found '{wrong}'",
            )
            for option in ("--evicted_rows", "--endurance")
            for wrong in ("0", "nan", "many", "inf")
        ),
        (["--keys", "1e6"], "expected --dim D, --dims D=P ... or -m config.yaml, found none"),
        (["--keys", "1.5", "--dim", "4"], "a whole number >= 0, such as 1e8, found '1.5'"),
        (["--keys=-5", "--dim", "4"], "a whole number >= 0, such as 1e8, found '-5'"),
        (["--keys", "1e6", "--dim", "0"], "expected dim as a whole number from 1 to 4096, found 0"),
        (["--keys", "1e6", "--dim", "4", "--sketch_bytes", "1e6"], "with --count_filter N"),
        (
            ["--keys", "1", "--dims", "4=50", "8=40"],
            "100 per cent in all, found {4: '50 %', 8: '40",
        ),
        (["--keys", "1", "--dims", "4"], "expected D=P, as in 16=90, found '4'"),
        (["--keys", "1", "--dims", "4=50", "4=50"], "expected each dim once, found"),
        (["--keys", "1", "--dims", "4=100", "--dim", "4"], "expected dim or dims, found 4 and"),
        (["--keys", "1", "--dim", "4", "-m", "x.yaml"], "found -m x.yaml and --dim"),
        (["--keys", "1", "--dim", "4", "-o", "a=1"], "expected -o with -m config.yaml"),
        (["--keys", "1", "--dim", "4", "--server_num", "0"], "--server_num as an integer >= 1"),
        (["--keys", "1", "--dim", "4", "--delta", "101"], "0 to 100 per cent, found '101'"),
        (["--keys", "1", "--dim", "4", "--optimizer", "lion"], "found 'lion'"),
    ],
)
def test_wrong_use_is_explained(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = cli.main(["size", *argv])
    except SystemExit as ended:
        code = int(str(ended.code))
    assert code == 2
    assert message in capsys.readouterr().err


def test_counted_keys_need_a_table_of_the_model_that_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.yaml").write_text("model: ctr_dnn\n")
    command = ["size", "--keys", "1e6", "-m", str(tmp_path / "c.yaml"), "--pending_keys"]
    assert cli.main([*command, "0"]) == 0
    assert cli.main([*command, "5"]) == 2
    assert "expected --pending_keys with tables that count keys" in capsys.readouterr().err


def test_the_help_of_the_command_names_all_rules_and_policies() -> None:
    assert sorted(size_tables.OPTIMIZERS) == list(size_command.OPTIMIZERS)
    assert sorted(size_tables.POLICIES) == size_command.POLICIES
