"""QueueDataset through a command: batches, positions and streams; a failing command ends it."""

from __future__ import annotations

import gzip
import re
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.criteo_text import Example, examples_of, random_line
from tests.integration.processes import clean_environment
from tests.programs import Template
from trireme.data import QueueDataset, arrow, criteo
from trireme.errors import BadRequest, DataError

# Criteo's text, upper and lower case of the hexadecimal ids exchanged, on our loop over files.
SCRIPT = """\
import sys
from trireme.fleet.data_generator import MultiSlotStringDataGenerator
class Swap(MultiSlotStringDataGenerator):
    def generate_sample(self, line):
        return lambda: [line.swapcase()]
    def _gen_str(self, line):
        return line
with open(sys.argv[1], "a") as starts:
    starts.write("x")
Swap().run_from_stdin()
"""
TRAIN = """\
import sys
import torch
from torch import nn
import trireme as tr

class LR(nn.Module):
    def __init__(self):
        super().__init__()
        rows = tr.Table("lr", dim=1)
        self.weights = tr.nn.EmbeddingBag(rows, features=[f"C{i}" for i in range(1, 27)])
    def forward(self, batch):
        return self.weights(batch).sum((1, 2))

tr.init()
data = tr.data.QueueDataset("part-*", schema=tr.data.criteo(), batch_size=50,
                            pipe_command=sys.argv[1])
loss = nn.functional.binary_cross_entropy_with_logits
trainer = tr.Trainer(LR(), None, loss=loss, metrics=[tr.metrics.AUC()])
trainer.fit(data)
trainer.save("ckpt")
"""
NUM_FILES = 10
LINES_OF_FILES = [120, 1, 40, 90, 7, 30, 64, 2, 64, 33]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files of unequal sizes, every third one compressed, and swap.py."""
    monkeypatch.setenv("PYTHONPATH", clean_environment()["PYTHONPATH"])
    random = Random(7)
    for i, num_lines in enumerate(LINES_OF_FILES):
        text = b"".join(random_line(random) + b"\n" for _ in range(num_lines))
        if i % 3 == 2:
            (tmp_path / f"part-{i}.gz").write_bytes(gzip.compress(text))
        else:
            (tmp_path / f"part-{i}").write_bytes(text)
    (tmp_path / "swap.py").write_text(SCRIPT)
    return tmp_path


def dataset(folder: Path, **options: Any) -> QueueDataset:
    command = f"{sys.executable} {folder}/swap.py {folder}/starts"
    options = {"pipe_command": command, "batch_size": 50, **options}
    return QueueDataset(f"{folder}/part-*", schema=criteo(), **options)


def flat(batches: Any) -> list[Example]:
    return [example for batch in batches for example in examples_of(batch)]


def num_starts(folder: Path) -> int:
    return len((folder / "starts").read_text())


@pytest.mark.parametrize("threads", [1, 3])
def test_files_become_what_the_command_makes_of_them(folder: Path, threads: int) -> None:
    stream = iter(dataset(folder, threads=threads))
    assert flat(stream) == flat(dataset(folder, pipe_command=None))
    assert stream.fraction_read() == 1.0
    assert num_starts(folder) == threads


def test_streams_hold_whole_files_and_go_on_from_any_position(folder: Path) -> None:
    for index, num_examples in enumerate([sum(LINES_OF_FILES[:4]), 101, 99]):
        whole = list(dataset(folder).stream(index, 3))
        assert sum(batch.num_examples for batch in whole) == num_examples
        for at, batch in enumerate(whole):
            start = batch.position
            rest = list(dataset(folder, threads=2).stream(index, 3, start=start))
            assert list(map(examples_of, rest)) == list(map(examples_of, whole[at + 1 :]))
            assert [b.position for b in rest] == [b.position for b in whole[at + 1 :]]
    shares = [list(dataset(folder).stream(i, 11)) for i in range(11)]
    assert [bool(share) for share in shares] == [True] * 10 + [False]


def test_a_broken_line_is_named_as_one_of_the_commands(folder: Path) -> None:
    command = "sed '$ s/.*/junk/'"
    where = f'part-0 line 120 of what "{command}" makes of it: '
    with pytest.raises(DataError, match=re.escape(where)):
        list(dataset(folder, pipe_command=command))
    counted = iter(dataset(folder, pipe_command=command, on_error="count"))
    assert len(flat(counted)) == sum(LINES_OF_FILES) - NUM_FILES
    assert counted.num_broken_lines == NUM_FILES


def test_dropping_a_stream_in_the_middle_ends_its_commands(folder: Path) -> None:
    endless = f"while cat {folder}/part-0; do :; done"
    for threads in (1, 3):
        with dataset(folder, threads=threads, pipe_command=endless).stream(0, 1) as some:
            assert next(some).num_examples == 50


def test_data_that_cannot_go_through_a_command_is_refused(folder: Path) -> None:
    with pytest.raises(BadRequest, match="pipe_command: expected a command, found ' '"):
        dataset(folder, pipe_command=" ")
    schema = arrow([*criteo().fields])
    with pytest.raises(BadRequest, match="expected a schema with a text format with pipe_command"):
        QueueDataset(f"{folder}/swap.py", schema=schema, batch_size=1, pipe_command="cat")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("no_such_command", "part-0: expected exit code 0, found 127; its last lines on stderr"),
        ("head -n 60; exit 3", "part-0: expected exit code 0, found 3; nothing on stderr"),
        (
            "echo \"No module named 'paddle'\" >&2; exit 1",
            "No module named 'paddle'\n(write `import trireme.fleet",
        ),
        ("head -n 60; kill -SEGV $$", "part-0: expected exit code 0, found signal 11"),
        ("head -c 3000 /dev/urandom", "part-0 line 1 of what 'head -c 3000 /dev/urandom' makes"),
    ],
)
def test_a_training_whose_command_fails_fails_and_saves_nothing(
    command: str, message: str, folder: Path, programs: Template
) -> None:
    (folder / "train.py").write_text(TRAIN)
    output = programs.run(folder, ["train.py", command], code=1)
    assert f"DataError: {'pipe_command' if 'exit' in message else ''}" in output
    assert message in output
    assert not (folder / "ckpt").exists()
