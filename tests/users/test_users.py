"""What a new user writes runs as it is, and does what it says."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import torch

from tests.programs import Template
from tests.repo import tree


def test_a_dataframe_trains_scores_and_predicts(tmp_path: Path, programs: Template) -> None:
    output = written(tmp_path, programs, "examples/ratings.py").splitlines()
    assert float(output[-3]) < 0.1
    shown = re.findall(r"^tensor\(.*\)$", (tree.ROOT / "README.md").read_text(), re.MULTILINE)
    assert torch.allclose(tensor(output[-1]), tensor(shown[0]), atol=0.01)  # it has a seed


def tensor(line: str) -> torch.Tensor:
    return torch.tensor([float(value) for value in re.findall(r"[\d.]+", line)])


def test_strings_are_the_same_in_training_and_serving(tmp_path: Path, programs: Template) -> None:
    output = written(tmp_path, programs, "tests/users/strings_served.py").splitlines()
    assert output[-1].startswith("True [")
    predict = ["-m", "trireme", "predict", "-m", "export", "--format", "csv"]
    programs.run(tmp_path, [*predict, "--input", "asked.csv", "--output", "scores.tsv"])
    scores = list(map(float, (tmp_path / "scores.tsv").read_text().split()))
    assert len(scores) == 2
    shown = programs.run(tmp_path, ["-m", "trireme", "inspect", "ckpt", "--key", "movie=Heat"])
    assert "table ids, movie=Heat, key " in shown
    assert "weights (4): " in shown


def test_a_dataset_of_hugging_face_trains(tmp_path: Path, programs: Template) -> None:
    shutil.copy(tree.ROOT / "examples/hf_datasets.py", tmp_path)
    output = programs.run(tmp_path, ["hf_datasets.py", "data"]).splitlines()
    assert float(output[-2 if output[-2][0].isdigit() else -3]) > 0.95
    assert output[-1].startswith("tensor([")


def written(folder: Path, programs: Template, script: str) -> str:
    shutil.copy(tree.ROOT / script, folder)
    return programs.run(folder, [Path(script).name])
