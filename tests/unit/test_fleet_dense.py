"""Dense parameters in Fleet's text and in Paddle's files of one variable."""

from __future__ import annotations

import gzip
import struct

import numpy as np
import pytest

from trireme.errors import Corruption, DataError
from trireme.interchange.formats import fleet_dense


def test_text_survives(tmp_path):
    values = np.random.default_rng(1).standard_normal((50, 3)).astype(np.float32)
    values[0] = 1e-30, -0.0, 3.4028235e38
    text = fleet_dense.write_text(values)
    files = [tmp_path / "part-000", tmp_path / "part-001.gz"]
    lines = text.splitlines(keepends=True)
    files[0].write_bytes(b"".join(lines[:20]))
    files[1].write_bytes(gzip.compress(b"".join(lines[20:])))
    np.testing.assert_array_equal(fleet_dense.read_text([str(file) for file in files]), values)


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("1 2 3", "expected 2 finite numbers, found '1 2 3'"),
        ("1", "expected 2 finite numbers"),
        ("", "expected 2 finite numbers"),
        ("1 x", "expected numbers, found '1 x'"),
        ("1 nan", "expected 2 finite numbers"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, what):
    file = tmp_path / "part-000"
    file.write_text(f"1 2\n{line}\n3 4\n")
    with pytest.raises(DataError, match=f"part-000:2: {what}"):
        fleet_dense.read_text([str(file)])


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(DataError, match=r"nothing: cannot read it"):
        fleet_dense.read_text([str(tmp_path / "nothing")])
    damaged = tmp_path / "part-000.gz"
    damaged.write_bytes(gzip.compress(b"1 2\n" * 100)[:-12])
    with pytest.raises(DataError, match=r"part-000\.gz: expected text of numbers"):
        fleet_dense.read_text([str(damaged)])


def test_a_variable_survives(tmp_path):
    for shape in ((3,), (200, 2), (1, 1, 4)):
        values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        file = tmp_path / "w_0"
        file.write_bytes(variable_of(values))
        np.testing.assert_array_equal(fleet_dense.read_variable(str(file)), values)


def test_a_damaged_variable_is_refused(tmp_path):
    good = variable_of(np.ones((2, 3), np.float32))
    file = tmp_path / "w_0"
    for size in range(len(good)):
        file.write_bytes(good[:size])
        with pytest.raises(Corruption, match="w_0: expected"):
            fleet_dense.read_variable(str(file))
    for content in (good + b"\0", b"\1" + good[1:], good.replace(b"\x08\x05", b"\x08\x06")):
        file.write_bytes(content)
        with pytest.raises(Corruption, match="w_0: expected"):
            fleet_dense.read_variable(str(file))


def variable_of(values: np.ndarray) -> bytes:
    """A tensor as Paddle writes it."""
    description = b"\x08\x05" + b"".join(b"\x10" + varint(n) for n in values.shape)
    head = struct.pack("<IQIi", 0, 0, 0, len(description))
    return head + description + np.ascontiguousarray(values, "<f4").tobytes()


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)
