"""examples/adult.py (Wide & Deep on census data) through the real launcher: on the UCI files if
present, and always on generated files of the same format.
"""

from __future__ import annotations

import json
import math
import runpy
from pathlib import Path
from random import Random

import numpy as np
import pytest

from tests.integration.processes import Processes
from tests.programs import Template
from tests.real_data import real_data
from trireme.metrics import AUC

SCRIPT = str(Path(__file__).parents[2] / "examples" / "adult.py")
LAUNCH = ["-m", "trireme", "launch", "--server_num", "1", "--worker_num", "2"]
WAIT_S = 100.0

EDUCATION = {"HS-grad": 9, "Some-college": 10, "Bachelors": 13, "Masters": 14, "11th": 7}
OCCUPATIONS = ("Sales", "Craft-repair", "Exec-managerial", "Tech-support", "?")
EFFECTS = {"Exec-managerial": 1.5, "Tech-support": 1.0, "Craft-repair": -1.0}
CROSSED = {("Sales", "Masters"): 4.0, ("Craft-repair", "11th"): 4.0, ("Sales", "HS-grad"): -4.0}


def planted_row(random: Random, ending: str) -> tuple[str, float, bool]:
    """A line, its true logit and its label: effects of age, of categories and of pairs of them."""
    age, gain = random.randint(17, 80), random.choice([0] * 9 + [9000])
    education, occupation = random.choice([*EDUCATION]), random.choice(OCCUPATIONS)
    logit = 0.5 * (EDUCATION[education] - 11) - ((age - 48) / 15) ** 2 + 2.0 * (gain > 0)
    logit += EFFECTS.get(occupation, 0.0) + CROSSED.get((occupation, education), 0.0)
    is_rich = random.random() < 1 / (1 + math.exp(-logit))
    fields = [
        age, random.choice(["Private", "?", "State-gov"]), random.randint(12285, 1484705),
        education, EDUCATION[education], random.choice(["Divorced", "Never-married"]), occupation,
        random.choice(["Husband", "Wife", "Own-child"]), "White", random.choice(["Male", "Female"]),
        gain, 0, random.randint(1, 99), "United-States", (">50K" if is_rich else "<=50K") + ending,
    ]  # fmt: skip
    return ", ".join(map(str, fields)), logit, is_rich


def write_planted(path: Path, count: int, ending: str, seed: int) -> float:
    """Write `count` lines and an empty one, as the UCI files have it; returns the possible AUC."""
    random = Random(seed)
    lines, logits, labels = zip(*(planted_row(random, ending) for _ in range(count)), strict=True)
    path.write_text("\n".join(lines) + "\n\n")
    auc = AUC()
    auc.update(np.array(logits, np.float32), np.array(labels, np.float32))
    return auc.compute()


def train(programs: Template, folder: Path, train: Path, test: Path) -> dict[str, object]:
    with Processes(folder) as processes:
        processes.start("launch", [programs.python, *LAUNCH, SCRIPT, str(train), str(test)], {})
        processes.finish(WAIT_S)
    log = (folder / "log" / "workerlog.0").read_text()
    assert "trireme: worker 0 of 2" in log
    last = log.splitlines()[-1]
    assert last.startswith("RESULT ")
    return json.loads(last.removeprefix("RESULT "))


def test_wide_and_deep_reaches_the_usual_auc_on_the_census(
    tmp_path: Path, programs: Template
) -> None:
    result = train(programs, tmp_path, real_data("adult/adult.data"), real_data("adult/adult.test"))
    assert (result["examples"], result["workers"], result["mode"]) == (16281, 2, "async")
    assert result["auc"] >= 0.90


def test_wide_and_deep_learns_numbers_categories_and_crosses_of_a_csv_file(
    tmp_path: Path, programs: Template
) -> None:
    write_planted(tmp_path / "train", 8000, "", seed=1)
    possible = write_planted(tmp_path / "test", 2001, ".", seed=2)
    result = train(programs, tmp_path, tmp_path / "train", tmp_path / "test")
    assert result["examples"] == 2001
    assert possible - 0.03 < result["auc"] < possible + 0.01


def test_the_columns_of_a_line_are_what_the_schema_lists(tmp_path: Path) -> None:
    script = runpy.run_path(SCRIPT)
    path = tmp_path / "two"
    path.write_text(
        "39, State-gov, 77516, Bachelors, 13, Never-married, ?, Husband, White, Male, 2174, 0, 40,"
        " United-States, <=50K.\n25,?,1,11th,7,Wife,Sales,Wife,White,Male,0,0,60,Peru,>50K\n"
    )
    columns = script["prepare"](script["read_csv"](str(path)))
    assert set(columns) == set(script["SCHEMA"].names)
    assert columns["label"].tolist() == [False, True]
    assert columns["age_bucket"].tolist() == ["4", "2"]
    assert columns["capital_gain_bucket"].tolist() == ["1", "0"]
    assert columns["education_x_occupation"].tolist() == ["Bachelors & ?", "11th & Sales"]
    dense = [[39, 13, 2174, 0, 40], [25, 7, 0, 0, 60]]
    np.testing.assert_allclose(columns["dense"], np.log1p(dense))


def test_a_row_of_another_width_is_named(tmp_path: Path) -> None:
    path = tmp_path / "part"
    path.write_text("39, State-gov\n")
    with pytest.raises(ValueError, match=r"part row 1: expected 15 columns, found \['39'"):
        runpy.run_path(SCRIPT)["read_csv"](str(path))
