"""Criteo text: the C++ parser agrees with a plain reader on real, random and damaged lines."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from tests.criteo_text import Broken, Example, damage, examples_of, random_line, read_text
from tests.real_data import real_data
from trireme import _core
from trireme.data import QueueDataset, criteo
from trireme.errors import BadRequest, DataError


def read(path: Path, **options) -> list[Example]:
    options = {"batch_size": 100, "schema": criteo()} | options
    return [example for batch in QueueDataset(path, **options) for example in examples_of(batch)]


@pytest.mark.parametrize("batch_size", [1, 128, 4096])
def test_real_lines_are_parsed_exactly_as_a_plain_reader_parses_them(batch_size):
    path = real_data("criteo_tiny.tsv")
    expected = read_text(path.read_bytes())
    assert len(expected) == 1999
    assert sum(e.label for e in expected) == 418
    assert any(None in e.keys for e in expected), "the sample has missing categories"
    assert read(path, batch_size=batch_size, threads=2) == expected


@pytest.mark.parametrize("seed", range(5))
def test_random_and_damaged_lines_agree_with_a_plain_reader(seed, tmp_path):
    random = Random(seed)
    print(f"seed {seed}")
    path = tmp_path / "part"
    lines = [random_line(random) for _ in range(800)]
    lines = [damage(line, random) if random.random() < 0.3 else line for line in lines]
    endings = [b"\r\n" if random.random() < 0.1 else b"\n" for _ in lines[:-1]] + [b""]
    path.write_bytes(b"".join(a + b for a, b in zip(lines, endings, strict=True)))
    expected = read_text(path.read_bytes())
    good = [e for e in expected if isinstance(e, Example)]
    broken = [e for e in expected if isinstance(e, Broken)]
    assert good
    assert broken
    assert read(path, on_error="count", batch_size=64, threads=3) == good
    with QueueDataset(path, schema=criteo(), batch_size=64, on_error="count").stream(
        0, 1
    ) as stream:
        assert sum(batch.num_examples for batch in stream) == len(good)
        assert stream.num_broken_lines == len(broken)
    for start in (0, len(expected) // 2):  # the first broken line after the start is named
        rest = tmp_path / "rest"
        rest.write_bytes(b"\n".join(lines[start:]))
        first = next(e for e in expected[start:] if isinstance(e, Broken))
        with pytest.raises(DataError) as caught:
            read(rest, batch_size=1000)
        where = f"{rest} line {first.line - start}"
        where += f", field {first.field} (" if first.field else ": expected"
        assert where in str(caught.value).replace(": field", ", field")


def test_dense_values_follow_the_schema(tmp_path):
    path = tmp_path / "part"
    integers = [-5, 0, 1, 65535, 65536, 10**7, 10**15, -(10**15), 2**63 - 1, 7, 8, 9, 10]
    path.write_text("1\t" + "\t".join(map(str, integers)) + "\t" * 26 + "\n")
    log1p = [np.float32(np.log1p(max(x, 0)) / 8) for x in integers]
    assert read(path)[0].dense == tuple(map(float, log1p))
    tripled = [np.float32(3 * float(x)) for x in integers]
    schema = criteo(transform="none", scale=3)
    assert read(path, schema=schema)[0].dense == tuple(map(float, tripled))


def test_batches_have_the_right_types(tmp_path):
    path = tmp_path / "part"
    path.write_bytes(random_line(Random(1)) + b"\n")
    (batch,) = QueueDataset(path, schema=criteo(), batch_size=4)
    assert batch.keys() == ("label", "dense", *(f"C{i}" for i in range(1, 27)))
    assert (batch["label"].dtype, batch["label"].shape) == (torch.float32, (1,))
    assert (batch["dense"].dtype, batch["dense"].shape) == (torch.float32, (1, 13))
    assert batch.bags.values.dtype == batch.bags.offsets.dtype == torch.int64


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"", "expected 40 fields separated by tabs, found 1 in ''"),
        (b"1\t2", r"expected 40 fields separated by tabs, found 2 in '1\x092'"),
        (b"x" + b"\t" * 39, "field 1 (label): expected the label 0 or 1, found 'x'"),
        (b"\t" * 39, "field 1 (label): expected the label 0 or 1, found ''"),
        (b"1\t1e5" + b"\t" * 38, "field 2 (I1): expected an integer of 64 bits or nothing, found"),
        (b"1\t1\x00" + b"\t" * 38, r"found '1\x00'"),
        (b"1\t" + b"9" * 19 + b"\t" * 38, "found '9999999999999999999'"),
        (b"1" + b"\t" * 39 + b"g", "field 40 (C26): expected 1 to 8 hexadecimal digits or nothing"),
        (b"1" + b"\t" * 39 + b"\xff" * 99, r"\xff'... (99 bytes)"),
        (b"1" + b"\t" * 39 + b"0" * 5000, "expected a line of at most 4096 bytes, found '1"),
        (b"\x00" * (3 << 20), r"expected a line of at most 4096 bytes, found '\x00\x00"),
    ],
)
def test_broken_line_is_an_error_that_names_file_line_and_value(tmp_path, line, message):
    good = random_line(Random(1))
    path = tmp_path / "part"
    path.write_bytes(good + b"\n" + good + b"\n" + line + b"\n" + good)
    with pytest.raises(DataError) as caught:
        read(path)
    assert f"{path} line 3: " in str(caught.value)
    assert message in str(caught.value)
    assert str(caught.value).isascii()
    assert len(read(path, on_error="count")) == 3


def test_whole_batches_before_a_broken_line_are_delivered(tmp_path):
    path = tmp_path / "part"
    path.write_bytes(b"\n".join([random_line(Random(1))] * 5 + [b"broken"]))
    stream = iter(QueueDataset(path, schema=criteo(), batch_size=2))
    assert [next(stream).num_examples, next(stream).num_examples] == [2, 2]
    with pytest.raises(DataError, match="line 6: expected 40 fields"):
        next(stream)


@pytest.mark.parametrize("ending", [b"", b"\n", b"\r\n", b"\r"])
def test_the_last_line_may_end_in_any_way(tmp_path, ending):
    path = tmp_path / "part"
    line = random_line(Random(1))
    path.write_bytes(line + b"\r\n" + line + ending)
    assert read(path) == read_text(line + b"\n" + line)


def test_truncated_last_line_is_an_error(tmp_path):
    path = tmp_path / "part"
    path.write_bytes((random_line(Random(1)) + b"\n") * 2 + random_line(Random(2))[:40])
    with pytest.raises(DataError, match=r"part line 3: expected 40 fields .*, found \d+ in '"):
        read(path)


def test_schema_refuses_an_unknown_transform():
    with pytest.raises(BadRequest, match="expected transform as one of log1p, none, found 'log'"):
        criteo(transform="log")


def test_core_refuses_wrong_arguments():
    pool = _core.Pool(1)
    for batch_size in (0, -1, 2**24 + 1):
        with pytest.raises(BadRequest, match=f"batch_size 1..2\\^24, found {batch_size}"):
            _core.CriteoParser(batch_size)
    with pytest.raises(BadRequest, match="expected a finite scale, found nan"):
        _core.CriteoParser(1, scale=float("nan"))
    parser = _core.CriteoParser(4)
    for text in (np.zeros(3, np.int8), np.zeros((3, 3), np.uint8), np.zeros(6, np.uint8)[::2]):
        with pytest.raises(TypeError):
            parser.parse(text, 3, True, pool)
    empty = np.zeros(0, np.uint8)
    empty.flags.writeable = False
    assert parser.parse(empty, 0, True, pool) == 0
    numbers, strings, keys, offsets, weights = parser.take(pool)
    assert [array.shape for array in (*numbers, keys, offsets)] == [(0, 1), (0, 13), (0,), (1,)]
    assert (strings, weights) == ([], None)
