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
            "expected --rule Sparse.*'adagrad'",
        ),
        (f"fleet x --to parquet {ALONE} -o a=1", "expected -o with -m config.yaml"),
        (f"fleet fleet --to parquet {ALONE}", "expected a new TARGET, found 'fleet' existing"),
        (f"fleet x --to parquet {ALONE} --dim 6", "expected 7 or 13 numbers"),
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
