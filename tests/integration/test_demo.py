"""examples/demo.py, small: its result on generated data and on a file in Criteo's format."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from tests.criteo_text import random_line
from tests.integration.processes import Processes
from tests.programs import Template

DEMO = str(Path(__file__).parents[2] / "examples" / "demo.py")
FIELDS = [
    "examples", "examples_per_s", "auc", "auc_possible", "auc_after_reload", "servers", "workers",
    "mode",
]  # fmt: skip


def run_demo(programs: Template, folder: Path, *arguments: str) -> dict[str, object]:
    """What the last line says."""
    with Processes(folder) as processes:
        processes.start(
            "demo", [programs.python, DEMO, "--out", str(folder / "out"), *arguments], {}
        )
        output = processes.finish(110.0)["demo"]
    assert "Warning" not in output
    last = output.splitlines()[-1]
    assert last.startswith("RESULT "), output
    result: dict[str, object] = json.loads(last.removeprefix("RESULT "))
    assert list(result) == FIELDS
    assert result["auc"] == result["auc_after_reload"]
    assert (result["servers"], result["workers"]) == (2, 2)
    return result


def test_the_demo_learns_the_planted_model_and_reloads_on_another_number_of_servers(
    tmp_path: Path, programs: Template
) -> None:
    (tmp_path / "out" / "checkpoint").mkdir(parents=True)  # of an earlier run
    (tmp_path / "out" / "notes").touch()  # somebody's own
    result = run_demo(programs, tmp_path, "--examples", "40000")
    assert (result["examples"], result["mode"]) == (40000, "async")
    assert 0.7 < result["auc"] < result["auc_possible"] < 0.87
    assert (tmp_path / "out" / "notes").exists()


def test_the_demo_takes_a_file_in_criteos_format(tmp_path: Path, programs: Template) -> None:
    random, path = Random(1), tmp_path / "train.txt"
    path.write_bytes(b"".join(random_line(random) + b"\n" for _ in range(3000)))
    result = run_demo(programs, tmp_path, "--data", str(path), "--mode", "sync")
    assert (result["examples"], result["auc_possible"], result["mode"]) == (2700, None, "sync")
    assert 0.3 < result["auc"] < 0.7, "the labels are random"


def test_the_demo_names_a_missing_file(tmp_path: Path, programs: Template) -> None:
    with Processes(tmp_path) as processes:
        processes.start("demo", [programs.python, DEMO, "--data", "none.txt"], {})
        with pytest.raises(AssertionError, match=r"found none at none\.txt"):
            processes.finish(60.0)


def test_a_broken_line_ends_the_job_and_is_named_on_the_console(
    tmp_path: Path, programs: Template
) -> None:
    random, path = Random(1), tmp_path / "train.txt"
    lines = [random_line(random) for _ in range(1000)]
    lines[4] = b"1\tten\x00" + b"\t" * 38
    path.write_bytes(b"\n".join(lines) + b"\n")
    with Processes(tmp_path) as processes:
        options = ["--out", str(tmp_path / "out"), "--data", str(path)]
        processes.start("demo", [programs.python, DEMO, *options], {})
        with pytest.raises(AssertionError):
            processes.finish(110.0)
        output = processes.output("demo")
    where = f"{tmp_path}/out/data/train/part-0.tsv line 5: field 2 (I1)"
    what = r"expected an integer of 64 bits or nothing, found 'ten\x00'"
    assert f"DataError: {where}: {what}" in output
    assert "trireme launch: failed: worker 0 failed with exit code 2" in output
