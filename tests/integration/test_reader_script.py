"""PaddleRec's reader scripts run unchanged except for one import."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.integration.processes import clean_environment
from trireme.data.pipe import Pipe
from trireme.data.pipe_process import plain_words
from trireme.data.sources import find_files
from trireme.errors import BadRequest, DataError
from trireme.fleet.reader_command import UTILS_PATH, reader_command

SCRIPT = Path(__file__).with_name("paddlerec_reader.py")
CONFIG = """
runner:
  train_batch_size: 1000
hyper_parameters:
  dense_input_dim: 13
  sparse_inputs_slots: 27
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with config.yaml and reader.py in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", clean_environment()["PYTHONPATH"])
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "reader.py").write_text(SCRIPT.read_text())
    return tmp_path


def examples(num: int) -> tuple[str, str]:
    """Lines in front of the reader, and what must come out; some features are absent."""
    rng = random.Random(7)
    before, behind = [], []
    for _ in range(num):
        click, dense = rng.randint(0, 1), [round(rng.random(), 3) for _ in range(13)]
        ids = {slot: [rng.randrange(1, 10**6)] for slot in range(1, 27) if rng.random() < 0.9}
        pairs = [f"click:{click}", *(f"dense_feature:{value}" for value in dense)]
        pairs += [f"{slot}:{id}" for slot, [id] in ids.items()]
        before.append(" ".join(pairs))
        slots = [f"1 {ids.get(slot, [0])[0]}" for slot in range(1, 27)]
        behind.append(f"1 {click} {' '.join(slots)} 13 {' '.join(map(str, dense))}")
    return "\n".join(before) + "\n", "\n".join(behind) + "\n"


def through(command: str, folder: Path, text: str) -> str:
    path = folder / "part-0"
    path.write_text(text)
    [file] = find_files(path)
    out, buffer = b"", np.empty(1 << 16, np.uint8)
    with Pipe(command) as pipe, pipe.open(file) as stream:
        while num_bytes := stream.readinto(buffer):
            out += buffer[:num_bytes].tobytes()
    return out.decode()


@pytest.mark.parametrize(
    "written", ["python reader.py", "python3 -u reader.py", "cat | {} reader.py"]
)
def test_a_reader_script_makes_multislot_text(written: str, folder: Path) -> None:
    before, behind = examples(500)
    command = reader_command(written.format(sys.executable), "config.yaml")
    assert through(command, folder, before) == behind


@pytest.mark.parametrize("name", ["python3.7", "python3.99"])
def test_a_python_3_that_cannot_run_the_script_gives_way_to_ours(
    name: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before, behind = examples(5)
    assert through(reader_command(f"{name} reader.py", "config.yaml"), folder, before) == behind
    assert f"{name} is not here, or too old for trireme" in caplog.text


def test_overrides_reach_the_script(folder: Path) -> None:
    overrides = ["hyper_parameters.sparse_inputs_slots=2", "hyper_parameters.dense_input_dim=1"]
    for command in ("python reader.py", f"cat | {sys.executable} reader.py"):
        text = through(reader_command(command, "config.yaml", overrides), folder, "click:1\n")
        assert text == "1 1 1 0 1 0\n"


def test_the_command_is_one_plain_program_with_absolute_paths(folder: Path) -> None:
    words = plain_words(reader_command("python reader.py", "config.yaml"))
    assert words == [sys.executable, f"{folder}/reader.py", f"{folder}/config.yaml", UTILS_PATH]
    words = plain_words(reader_command("python reader.py", "config.yaml", ["a=[1]"]))
    assert words is not None
    assert words[1:3] == ['TRIREME_OVERRIDES=["a=[1]"]', sys.executable]


@pytest.mark.parametrize("command", ["python reader.py", f"cat | {sys.executable} reader.py"])
def test_an_error_shows_the_command_as_it_was_written(command: str, folder: Path) -> None:
    made = reader_command(command, "config.yaml", ["a=[1]"])
    with pytest.raises(DataError, match=re.escape(f"pipe_command '{command}' on ")):
        through(made, folder, "no pair\n")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("python9.9 reader.py", r"program 'python9\.9' on PATH, found none; write python3 for"),
        ("python missing.py", r"expected a script at .*/missing\.py, found none"),
        ("python 'reader.py", "expected a command, found .*No closing quotation"),
    ],
)
def test_impossible_settings_are_refused_by_name(command: str, message: str, folder: Path) -> None:
    with pytest.raises(BadRequest, match=message):
        reader_command(command, "config.yaml")


@pytest.mark.parametrize(
    ("start", "script", "advice"),
    [
        ("models", "reader.py", "cd {}/models/rank, then -m config.yaml"),
        ("models/rank", "models/rank/reader.py", "cd {}, then -m models/rank/config.yaml"),
    ],
)
def test_a_script_that_is_elsewhere_is_named_with_where_to_start(
    start: str, script: str, advice: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "models/rank").mkdir(parents=True)
    (folder / "reader.py").unlink()
    (folder / "models/rank/reader.py").touch()
    monkeypatch.chdir(folder / start)
    with pytest.raises(BadRequest) as caught:
        reader_command(f"python {script}", folder / "models/rank/config.yaml")
    assert str(caught.value).endswith(
        f"and {folder}/models/rank/reader.py is there: {advice.format(folder)}"
    )


def test_a_command_without_a_script_is_unchanged(folder: Path) -> None:
    assert reader_command("cat", "config.yaml", ["a=1"]) == "cat"


def test_the_import_of_a_reader_script_is_light() -> None:
    heavy = "{'torch', 'numpy', 'pyarrow', 'zmq', 'yaml'}"
    code = (
        "import sys, trireme.fleet as fleet; fleet.MultiSlotDataGenerator; "
        f"sys.exit(str(found) if (found := {heavy} & set(sys.modules)) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=clean_environment(), timeout=60)
    assert done.returncode == 0
