"""The script that runs PaddleRec's models: which it finds, what it says, where it writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import paddlerec

OUTPUT = """Traceback (most recent call last):
trireme run: error: {folder}/reader.py: expected 3 arrays
trireme launch: failed: worker 0 failed with exit code 2
"""


def test_a_yaml_with_its_data_is_a_case_and_has_the_zoos_name(tmp_path: Path) -> None:
    for name, data in (("rank/dnn", "data"), ("rank/other", "[data, nowhere]"), ("rank/new", "d")):
        folder = tmp_path / "models" / name
        (folder / "data").mkdir(parents=True)
        (folder / "config.yaml").write_text(f"runner: {{train_data_dir: {data}}}\n")
    (tmp_path / "models" / "rank" / "new" / "d").mkdir()
    (tmp_path / "models" / "broken.yaml").write_text("{")
    assert [(str(case.path), case.model) for case in paddlerec.find_cases(tmp_path)] == [
        ("rank/dnn/config.yaml", "ctr_dnn"),
        ("rank/new/config.yaml", None),
    ]
    assert list(paddlerec.find_cases(tmp_path, "absent")) == []


def test_a_yaml_that_starts_from_what_another_one_saves_names_it(tmp_path: Path) -> None:
    for name, runner in (
        ("a", "{model_save_path: out, train_data_dir: absent}"),
        ("b", "{model_save_path: out, train_data_dir: .}"),
        ("c", "{model_init_path: out/0, model_save_path: elsewhere}"),
        ("d", "{warmup_model_path: somewhere/0}"),
    ):
        (tmp_path / f"{name}.yaml").write_text(f"runner: {runner}\n")
    starts = [paddlerec.start_of(tmp_path / f"{name}.yaml") for name in "bcd"]
    warm, init = "runner.warmup_model_path", "runner.model_init_path"
    assert starts == [(warm, None), (init, tmp_path / "b.yaml"), (warm, None)]


def test_a_cell_is_the_sentence_of_the_error(tmp_path: Path) -> None:
    sentence = paddlerec.reason(OUTPUT.format(folder=tmp_path), tmp_path)
    assert sentence == "trireme run: error: reader.py: expected 3 arrays"
    assert paddlerec.reason("line\nValueError: bad\nlast", tmp_path) == "ValueError: bad"
    assert paddlerec.reason("", tmp_path) == "no output"


def test_a_command_that_does_not_end_is_ended(tmp_path: Path) -> None:
    outcome = paddlerec.outcome(["sh", "-c", "sleep 60 & wait"], tmp_path, tmp_path, 0.2)
    assert outcome == "no end within 0.2 s"
    assert paddlerec.outcome(["true"], tmp_path, tmp_path, 30) == "yes"


def test_the_table_goes_between_the_marks_of_the_page(tmp_path: Path) -> None:
    case = paddlerec.Case(Path("rank/dnn/config.yaml"), "ctr_dnn")
    cells = dict.fromkeys(paddlerec.STEPS, "yes") | {"launch": "error: a"}
    text = paddlerec.table([(case, cells), (case, cells | {"infer": "error: b"})])
    page = tmp_path / "page.md"
    page.write_text(f"before\n{paddlerec.BEGIN}old\n{paddlerec.END}after\n")
    paddlerec.write_page(page, text)
    assert page.read_text().startswith(f"before\n{paddlerec.BEGIN}\n| YAML | model | train |")
    assert "| `ctr_dnn` | yes | no (1) | yes | yes |" in page.read_text()
    assert "| `ctr_dnn` | yes | no (1) | no (2) | yes |" in page.read_text()
    assert "\n1. `error: a`\n2. `error: b`\n" in page.read_text()
    assert "old" not in page.read_text()
    assert page.read_text().endswith(f"{paddlerec.END}after\n")
    page.write_text("no marks")
    with pytest.raises(ValueError, match="expected the marks"):
        paddlerec.write_page(page, text)
