"""Rows as text: the core reads back what it writes, and names what is wrong."""

from __future__ import annotations

import numpy as np
import pytest

from trireme import _core
from trireme.errors import BadRequest

ALL = np.ones(4096, np.uint8)


def as_text(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8)


def test_rows_survive():
    form = _core.RowTextFormat(num_head=2, num_full=4, wide=[1])
    keys = np.array([3, 2**64 - 1], np.uint64)
    numbers = np.array([[0.1, 0, 0, 0], [-1e-30, 0, 1 / 3, 5]], np.float32)
    wide = np.array([[2**53 + 1.0], [0.1]])
    is_full = np.array([0, 1], np.uint8)
    text = _core.write_rows(keys, numbers, wide, is_full, form)
    assert (
        bytes(text).decode().startswith("3 0.1 9007199254740992\n18446744073709551615 -1e-30 0.1")
    )
    actual = _core.parse_rows(text, form, ALL)
    for expected, array in zip((keys, numbers, wide, is_full), actual, strict=False):
        np.testing.assert_array_equal(expected, array)
    assert actual[4:] == (2, None)


def test_a_broken_line_is_named_and_nothing_after_it_is_read():
    form = _core.RowTextFormat(num_head=1, num_full=1, wide=[])
    keys, *_, num_lines, broken = _core.parse_rows(as_text("1 2\n3 x\n4 5\n"), form, ALL)
    assert keys.tolist() == [1]
    assert num_lines == 2
    assert broken == (4, "a finite number", "'x'")


def test_formats_and_sizes_that_cannot_be_are_refused():
    with pytest.raises(BadRequest, match="num_head <= num_full"):
        _core.RowTextFormat(num_head=2, num_full=1, wide=[])
    with pytest.raises(BadRequest, match="ascending order below 2, found 2"):
        _core.RowTextFormat(num_head=2, num_full=3, wide=[0, 2])
    form = _core.RowTextFormat(num_head=1, num_full=1, wide=[])
    with pytest.raises(BadRequest, match="expected 4096 buckets, found 3"):
        _core.parse_rows(as_text("1 2"), form, ALL[:3].copy())
    keys, numbers = np.ones(2, np.uint64), np.ones((1, 1), np.float32)
    with pytest.raises(BadRequest, match="expected 2 rows of 1 numbers, found 1"):
        _core.write_rows(keys, numbers, np.empty((2, 0)), np.ones(2, np.uint8), form)
