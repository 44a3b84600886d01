"""Zoo models from the command line: copies of their YAML files on MultiSlot text, and the commands
of docs/models.md.
"""

from __future__ import annotations

import re
from pathlib import Path
from random import Random

import pytest

from tests.programs import Template
from trireme.commands import cli
from trireme.config import Config
from trireme.data import Dense, Schema, Sparse
from trireme.models import zoo

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
TWO_OF_EACH = ("hist_item_seq", "hist_cat_seq", "negatives")
SMALL = ["hyper_parameters.fc_sizes=[8]", "hyper_parameters.slot_num=3"]


def write_multislot(folder: Path, schema: Schema, count: int) -> None:
    """Random examples: labels 0 or 1, small ids, numbers below 1."""
    random = Random(count)

    def slot(field: object) -> str:
        if isinstance(field, Sparse):
            size = 2 if field.name in TWO_OF_EACH else 1
            values = [str(random.randint(1, 50)) for _ in range(size)]
        elif isinstance(field, Dense):
            values = [f"{random.random():.3f}" for _ in range(field.dim)]
        else:
            values = [str(random.randint(0, 1))]
        return " ".join([str(len(values)), *values])

    folder.mkdir(parents=True)
    lines = (" ".join(map(slot, schema.fields)) for _ in range(count))
    (folder / "part-0").write_text("\n".join(lines) + "\n")


@pytest.fixture
def yaml_of(tmp_path: Path) -> object:
    """Copies the YAML of a model beside data for it."""

    def copied(name: str) -> Path:
        path = tmp_path / f"{name}.yaml"
        path.write_bytes(zoo.config_path(name).read_bytes())
        schema = zoo.load(name).create(Config.load(path, SMALL)).schema
        for part, count in (("train", 300), ("test", 100)):
            write_multislot(tmp_path / "data" / part, schema, count)
        return path

    return copied


@pytest.mark.parametrize("name", ["ctr_dnn", "slot_dnn", "din", "esmm", "word2vec", "two_tower"])
def test_a_model_trains_and_is_evaluated_from_a_copy_of_its_yaml(
    name: str, yaml_of: object, caplog: pytest.LogCaptureFixture
) -> None:
    path = yaml_of(name)
    options = [argument for option in SMALL for argument in ("-o", option)]
    with caplog.at_level("INFO", logger="trireme"):
        assert cli.main(["run", "-m", str(path), *options]) == 0
        assert cli.main(["run", "-m", str(path), "--infer", *options]) == 0
    reports = [text for text in caplog.messages if "epoch 0: loss" in text]
    assert len(reports) == 2
    assert "examples 100" in reports[1]


def test_the_commands_and_the_script_of_the_page_run(
    tmp_path: Path, yaml_of: object, programs: Template
) -> None:
    yaml_of("deepfm")
    shell, script = re.findall(r"```(?:python)?\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "script.py").write_text(script)
    started = [["script.py"]]
    for number, command in enumerate(shell.splitlines()):
        name, *words = command.split()
        assert name == "trireme"
        options = [f"-o=runner.model_save_path=saved{number}", f"-o={SMALL[0]}"]
        started.append(["-m", "trireme", *words, *options])
    assert len(started) == 3
    for command in started:
        programs.run(tmp_path, command)
