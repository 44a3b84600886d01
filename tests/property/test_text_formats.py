"""Text formats: printed examples are read back; damaged lines are judged as plain Python does."""

from __future__ import annotations

from pathlib import Path
from random import Random
from types import ModuleType

import pytest

from tests import plain_csv, plain_libsvm, plain_multislot
from tests.plain_text import Broken, Example, damaged, examples_of
from tests.plain_text import read as read_plainly
from tests.seeds import SEED, named_in_failure
from trireme.data import QueueDataset, Schema
from trireme.errors import DataError

FORMATS = [plain_csv, plain_libsvm, plain_multislot]
NUM_LINES = 300


def read(schema: Schema, path: Path, **options: object) -> list[Example]:
    dataset = QueueDataset(path, schema=schema, **{"batch_size": 100, **options})
    return [example for batch in dataset for example in examples_of(schema, batch)]


@pytest.fixture(params=FORMATS, ids=lambda module: module.__name__.removeprefix("tests.plain_"))
def plain(request: pytest.FixtureRequest) -> ModuleType:
    return request.param


@pytest.mark.parametrize("number", range(6))
def test_printed_examples_are_read_back(plain, number, tmp_path):
    random = Random(f"{SEED} {number}")
    path = tmp_path / "part"
    with named_in_failure():
        schema = plain.random_schema(random)
        print(repr(schema))
        lines, examples = zip(
            *(plain.random_line(schema, random) for _ in range(NUM_LINES)), strict=True
        )
        ending = random.choice([b"\n", b"\r\n"])
        path.write_bytes(ending.join(lines) + random.choice([b"", ending]))
        assert read(schema, path, batch_size=random.randint(1, NUM_LINES + 1)) == list(examples)
        assert read_plainly(schema, path.read_bytes(), plain.read_line) == list(examples)


@pytest.mark.parametrize("number", range(6))
def test_damaged_lines_are_judged_as_a_plain_reader_does(plain, number, tmp_path):
    random = Random(f"{SEED} {number} damaged")
    path = tmp_path / "part"
    with named_in_failure():
        schema = plain.random_schema(random)
        print(repr(schema))
        lines = [damaged(plain.random_line(schema, random)[0], random) for _ in range(NUM_LINES)]
        lines.append(b"0")
        path.write_bytes(b"\n".join(lines))
        expected = read_plainly(schema, path.read_bytes(), plain.read_line)
        good = [e for e in expected if not isinstance(e, Broken)]
        assert read(schema, path, on_error="count", threads=2) == good
        broken = [e for e in expected if isinstance(e, Broken)]
        for place in random.sample(range(len(broken)), min(len(broken), 30)):
            path.write_bytes(b"\n".join(lines[broken[place].line - 1 :]))
            with pytest.raises(DataError) as caught:
                read(schema, path)
            field = broken[place].field
            where = f"{path} line 1: " if field is None else f"{path} line 1: field {field} ("
            assert where in str(caught.value), str(caught.value)
            assert ("field" in str(caught.value).partition("expected")[0]) == (field is not None)
