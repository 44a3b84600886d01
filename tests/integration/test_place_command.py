"""`trireme place`: a real script is measured, and the placement is printed."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.programs import Template

SCRIPT = str(Path(__file__).with_name("placed_script.py"))
TYPES = """
types:
  cpu:
    cores: 1
    price: 0.5
    network: 1e9
    reads: true
  gpu:
    cores: 1
    device: gpu
    price: 0.1
    network: 1e9
"""
ON_CPU = {"TRIREME_DEVICE_GPU": "cpu"}


def place(
    programs: Template, folder: Path, *options: str, code: int = 0, types: str = TYPES
) -> str:
    (folder / "types.yaml").write_text(types)
    arguments = ["-m", "trireme", "place", *options, "--types", "types.yaml"]
    return programs.run(folder, arguments, ON_CPU, code=code)


def test_place_measures_a_script_here_and_prints_a_placement(
    programs: Template, tmp_path: Path
) -> None:
    output = place(programs, tmp_path, SCRIPT, "--throughput", "1e9", "--args", "- async")
    assert "trained" not in output
    for stage in ("read", "model"):
        assert re.search(rf"^  {stage} +[\d.,]+ +[\d.,]+ +[\d,]+ +[\d,]+$", output, re.MULTILINE)
    assert "1,000,000,000 examples/s take" in output
    assert re.search(r"^  1 +cpu +read +[\d,]+ ", output, re.MULTILINE)
    assert re.search(r"^  2 +gpu +model +[\d,]+ ", output, re.MULTILINE)
    assert "next cheaper: " in output
    assert "next dearer:  " in output
    command = re.escape(f"--heter_devices gpu {SCRIPT} - async")
    assert re.search(
        rf"launch --server_num 1 --worker_num \d+ --heter_worker_num \d+ {command}", output
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["types.yaml"]


def test_types_are_measured_one_by_one_and_solved_elsewhere(
    programs: Template, tmp_path: Path
) -> None:
    for name in ("cpu", "gpu"):
        options = ["--type", name, "--measure", f"{name}.json", "--args", "- sync"]
        output = place(programs, tmp_path, SCRIPT, *options)
        assert f"placed_script.py on type {name} with 1 core" in output
    measured = json.loads((tmp_path / "gpu.json").read_text())
    assert (measured["type"], measured["device"], measured["cores"]) == ("gpu", "gpu", 1)
    assert (measured["examples"], measured["num_first"]) == (64.0, 1)
    assert measured["batches"] >= 64
    assert measured["seconds_per_byte"] > 0
    read, model = measured["stages"]
    assert all(seconds > 0 for stage in (read, model) for seconds in stage["seconds"].values())
    # Columns and label, ids, positions of 128 bags, and 64 rows there and back.
    rows = 64 * 4 * 4
    weights = (8 * 16 + 16 + 16 + 1) * 4
    assert read["bytes_before"] == 2 * (rows + 64 * 8 + weights) / 64
    assert model["bytes_sent_to"] == 2 * weights / 64
    assert model["bytes_before"] * 64 > 2 * rows + 64 * (2 * 8 + 3 * 4 + 4)
    for seconds in (read["seconds"], model["seconds"]):
        seconds.update(dict.fromkeys(seconds, 1e-3))
    (tmp_path / "gpu.json").write_text(json.dumps(measured))
    (tmp_path / "cpu.json").write_text(json.dumps({**measured, "type": "cpu", "device": "cpu"}))
    options = ["--throughput", "1000", "--from", "cpu.json,gpu.json"]
    output = place(programs, tmp_path, *options)
    assert "next cheaper: " in output
    assert f"--worker_num 5 --heter_worker_num 3 --heter_devices gpu {SCRIPT}" in output
    other = place(programs, tmp_path, "other.py", "--args", "x y", *options)
    assert "--heter_devices gpu other.py x y" in other


@pytest.mark.parametrize("mode", ["bounded", "geo", "hybrid", "collective"])
def test_every_mode_is_measured(programs: Template, tmp_path: Path, mode: str) -> None:
    options = ["--type", "cpu", "--measure", "cpu.json", "--args", f"- {mode}"]
    place(programs, tmp_path, SCRIPT, *options)
    stages = json.loads((tmp_path / "cpu.json").read_text())["stages"]
    assert all(seconds > 0 for stage in stages for seconds in stage["seconds"].values())


def test_each_stage_of_a_model_is_measured(programs: Template, tmp_path: Path) -> None:
    for name in ("cpu", "gpu"):
        options = ["--type", name, "--measure", f"{name}.json", "--args", "stages async"]
        place(programs, tmp_path, SCRIPT, *options)
    measured = json.loads((tmp_path / "cpu.json").read_text())
    assert [stage["name"] for stage in measured["stages"]] == ["read", "cpu", "gpu"]
    assert measured["num_first"] == 2  # "cpu" has a table
    _, wide, tower = measured["stages"]
    assert all(seconds > 0 for stage in (wide, tower) for seconds in stage["seconds"].values())
    # Bags there and back, dense values and the label there.
    assert tower["bytes_before"] == 2 * 8 * 4 + 3 * 4 + 4
    assert wide["bytes_sent_to"] == 0
    assert tower["bytes_sent_to"] == 2 * 12 * 4 / 64
    options = ["--throughput", "1e9", "--from", "cpu.json,gpu.json"]
    output = place(programs, tmp_path, *options)
    assert re.search(r"^  1 +cpu +read, cpu +[\d,]+ ", output, re.MULTILINE)
    assert re.search(r"^  2 +gpu +gpu +[\d,]+ ", output, re.MULTILINE)
    assert "  the stages of the model as they are\n" in output


def test_a_script_that_evaluates_first_is_measured_there(
    programs: Template, tmp_path: Path
) -> None:
    options = ["--type", "cpu", "--measure", "cpu.json"]
    output = place(programs, tmp_path, SCRIPT, *options, "--args", "evaluate async")
    assert "batches of 64 examples" in output
    # Without labels there is nothing to train on.
    output = place(programs, tmp_path, SCRIPT, *options, "--args", "infer async")
    assert "inferred 1\n" in output
    assert "batches of 64 examples" in output
    assert "trained" not in output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("end async", "to call Trainer.fit or Trainer.evaluate, found that it ended without"),
        ("fail async", "found that it ended with code 1; what it printed is above"),
        ("empty async", "expected examples to measure with, found none in the dataset"),
    ],
)
def test_a_script_that_cannot_be_measured_is_an_error(
    programs: Template, tmp_path: Path, arguments: str, words: str
) -> None:
    options = ["--type", "cpu", "--measure", "cpu.json", "--args", arguments]
    output = place(programs, tmp_path, SCRIPT, *options, code=2)
    assert words in output
    assert ("no data today" in output) == arguments.startswith("fail")
    assert not (tmp_path / "cpu.json").exists()


def test_a_script_that_takes_too_long_is_ended(programs: Template, tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text("input_that_never_comes = __import__('signal').pause()")
    options = ["--type", "cpu", "--measure", "cpu.json", "--timeout_s", "0.5"]
    output = place(programs, tmp_path, "waits.py", *options, code=1)
    assert "expected waits.py to be measured on type 'cpu' within 0.5 s" in output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["x.py"], "expected --throughput without --measure, found none"),
        (["--throughput", "1"], "expected SCRIPT to measure, found none"),
        (["x.py", "--measure", "f"], "expected --type with --measure, found none"),
        (["x.py", "--throughput", "1", "--type", "cpu"], "expected no --type without --measure"),
        (
            ["x.py", "--measure", "f", "--type", "cpu", "--throughput", "1"],
            "expected no --throughput with --measure, found 1.0",
        ),
        (
            ["x.py", "--measure", "f", "--type", "cpu", "--from", "g"],
            "expected no --from with --measure, found g",
        ),
        (
            ["--throughput", "1", "--from", "g", "--timeout_s", "3"],
            "expected no --timeout_s with --from, found 3.0",
        ),
        (["--throughput", "1", "--from", "g", "--args", "x"], "expected no --args without SCRIPT"),
        (["--throughput", "1", "--from", "g"], "cannot read g: No such file"),
        (["x.py", "--throughput", "1"], "expected SCRIPT to be a file, found 'x.py'"),
        (
            ["x.py", "--measure", "f", "--type", "tpu"],
            "expected --type to be one of cpu, gpu of types.yaml, found 'tpu'",
        ),
        (["x.py", "--throughput", "0"], "expected examples per second in (0, 1e+15], found '0'"),
        (
            ["x.py", "--throughput", "many"],
            "expected examples per second in (0, 1e+15], found 'many'",
        ),
        (["types.yaml", "--throughput", "1", "--args", "'"], "expected --args as in a shell"),
    ],
)
def test_wrong_options_are_refused(
    programs: Template, tmp_path: Path, options: list[str], words: str
) -> None:
    assert words in place(programs, tmp_path, *options, code=2)


def test_a_type_with_more_cores_than_there_are_is_refused(
    programs: Template, tmp_path: Path
) -> None:
    num_cores = len(os.sched_getaffinity(0))
    types = TYPES.replace("cores: 1", f"cores: {num_cores + 1}")
    options = ["--throughput", "1", "--args", "- async"]
    output = place(programs, tmp_path, SCRIPT, *options, code=2, types=types)
    assert f"expected at least the {num_cores + 1} cores of type 'cpu' to measure it here" in output
    assert f"found {num_cores}; on such a machine: trireme place" in output
