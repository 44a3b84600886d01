"""The parsers read the fuzzer's corpus as plain Python does.

The first byte of a file chooses the options, as core/tests/fuzz/parsing.h says; the rest is text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import criteo_text, plain_csv, plain_libsvm, plain_multislot
from tests.plain_text import Broken, examples_of
from tests.plain_text import read as read_plainly
from trireme.data import (
    Batch,
    Dense,
    InsId,
    Label,
    Schema,
    Sparse,
    Weight,
    criteo,
    csv,
    libsvm,
    multislot,
)
from trireme.data.text_parser import TextFormat, TextParser

CORPUS = Path(__file__).resolve().parents[2] / "core" / "tests" / "fuzz" / "corpus"
FIELDS = [InsId(), Label(), Sparse("a"), Sparse("b", hashed=True), Weight(), Dense("dense", 2)]
MARKS: list[dict[str, Any]] = [
    {"delimiter": ",", "quote": '"', "list_separator": "|"},
    {"delimiter": ",", "quote": '"', "list_separator": None},
    {"delimiter": "\t", "quote": None, "list_separator": ";"},
    {"delimiter": ";", "quote": "'", "list_separator": None},
]


def schema_of(format: str, choice: int) -> Schema:
    if format == "criteo":
        return criteo()
    if format == "libsvm":
        return libsvm(hashed=choice % 2 == 1)
    if format == "csv":
        return csv(FIELDS, header=False, **MARKS[choice % 4])
    return multislot(FIELDS, drop_zeros=choice % 2 == 1, pad_empty=choice // 2 % 2 == 1)


def parse(schema: Schema, text: bytes) -> tuple[list[Batch], int]:
    """Batches, and how many lines were broken."""
    assert isinstance(schema.format, TextFormat)
    parser = TextParser(schema, schema.format, batch_size=2, threads=1, skip_broken=True)
    batches, data, begin = [], np.frombuffer(text, np.uint8), 0
    while begin < len(text):
        begin += parser.parse(data[begin:], len(text) - begin, True)
        batches.append(parser.take())
    return batches, parser.core.num_broken_lines


@pytest.mark.parametrize("format", ["criteo", "csv", "libsvm", "multislot"])
def test_inputs_of_the_fuzzer_are_judged_as_a_plain_reader_does(format):
    files = sorted((CORPUS / format).iterdir())
    assert files
    for file in files:
        print(file)
        choice, text = file.read_bytes()[:1], file.read_bytes()[1:]
        schema = schema_of(format, choice[0])
        batches, num_broken = parse(schema, text)
        if format == "criteo":
            expected: list[Any] = criteo_text.read_text(text)
            actual = [e for batch in batches for e in criteo_text.examples_of(batch)]
            broken_type: type = criteo_text.Broken
        else:
            module = {"csv": plain_csv, "libsvm": plain_libsvm, "multislot": plain_multislot}
            expected = read_plainly(schema, text, module[format].read_line)
            actual = [e for batch in batches for e in examples_of(schema, batch)]
            broken_type = Broken
        assert actual == [e for e in expected if not isinstance(e, broken_type)]
        assert num_broken == sum(isinstance(e, broken_type) for e in expected)
