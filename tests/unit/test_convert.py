"""`trireme convert` refuses what it cannot do before it starts."""

from __future__ import annotations

import re
import shutil

import pyarrow.parquet as pq
import pytest

from tests.repo import tree
from trireme import progress
from trireme.commands import cli

FLEET = tree.ROOT / "tests/golden/fleet_checkpoint/SparseAccessor-adagrad-adam/saved"


@pytest.fixture
def fleet(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(FLEET, tmp_path / "fleet")


ALONE = "--table t --dim 5 --rule SparseAdaGradSGDRule"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("nothing x --to parquet", "expected a checkpoint .* found none of them at 'nothing'"),
        ("fleet x --to parquet", "expected -m config.yaml, or --table, --dim, --rule"),
        (f"fleet x --to checkpoint {ALONE}", "expected -m config.yaml to write a checkpoint"),
        (
            "fleet x --to parquet --table t --dim 5 --rule adagrad",
            "expected --rule as one of Sparse.*'adagrad'",
        ),
        (f"fleet x --to parquet {ALONE} -o a=1", "expected -o with -m config.yaml"),
        (f"fleet fleet --to parquet {ALONE}", "expected a new TARGET, found 'fleet' existing"),
        (f"fleet fleet/x --to parquet {ALONE}", "expected a TARGET outside of SOURCE"),
        (f"fleet x --to parquet {ALONE} --dim 6", "expected 7 or 13 numbers"),
        (f"fleet x --to parquet {ALONE} --gzip", "expected --gzip --to fleet, found True"),
        (f"fleet x --to parquet {ALONE} --shard_num 7", "expected --shard_num --to fleet, found 7"),
        (f"fleet x --to fleet {ALONE} --state", "expected --state --to parquet, found True"),
        (f"fleet x --to parquet {ALONE} --dense_steps 7", "expected --dense_steps from .* with -m"),
    ],
)
def test_what_does_not_fit_is_refused(fleet, command, words, capsys):
    assert cli.main(["convert", *command.split()]) == 2
    shown = capsys.readouterr().err
    assert re.search(words, shown), shown


def test_rows_of_fleet_become_parquet_without_a_model(fleet, tmp_path, caplog, capsys, monkeypatch):
    monkeypatch.setattr(progress, "LINE_S", 0.0)
    caplog.set_level("INFO", "trireme")
    assert cli.main(f"convert fleet x --to parquet --state {ALONE}".split()) == 0
    assert caplog.messages[-1] == "convert: fleet (fleet) is now x (parquet): 139 rows of t"
    assert "import t 100%" in capsys.readouterr().out
    rows = pq.read_table(tmp_path / "x" / "t")
    assert rows.num_rows == 139
    assert set(map(len, rows["weights"].to_pylist())) == {1, 5}  # heads, and whole rows
    assert set(map(len, rows["state"].to_pylist())) == {3}
    assert cli.main(f"convert fleet y --to fleet --shard_num 3 {ALONE}".split()) == 0
    assert len(list((tmp_path / "y" / "000").iterdir())) == 3


@pytest.mark.parametrize(
    "options",
    [
        *("--table t", "--dim 5", "--rule SparseAdaGradSGDRule", "--accessor SparseAccessor"),
        *("--tables t=1", "--time 5", "--dense_steps 5", "--shard_num 5", "--gzip"),
    ],
)
def test_an_option_without_effect_on_a_checkpoint_is_refused(options, tmp_path, capsys):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "manifest.json").touch()
    target = tmp_path / "x"
    command = ["convert", f"{tmp_path}/model", f"{target}", "--to", "parquet", *options.split()]
    assert cli.main(command) == 2
    shown = capsys.readouterr().err
    assert re.search(f"expected {options.split()[0]} .* from a checkpoint to parquet, wh", shown)
    assert not target.exists()


@pytest.mark.parametrize("option", ["--dim 5", "--rule SparseAdaGradSGDRule", "--table t"])
def test_a_table_is_described_by_options_or_by_a_configuration(fleet, option, tmp_path, capsys):
    (tmp_path / "c.yaml").write_text("runner: {}\n")
    assert cli.main(f"convert fleet x --to checkpoint -m c.yaml {option}".split()) == 2
    words = f"expected {option.split()[0]} .*without -m.* from fleet to checkpoint with -m"
    assert re.search(words, capsys.readouterr().err)
