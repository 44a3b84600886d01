"""Marks: a push that was applied is not applied again, bucket by bucket."""

from __future__ import annotations

import numpy as np
import pytest

from tests.tables import (
    POOL,
    buckets_of,
    keys_in,
    lookup,
    make_table,
    random_keys,
    snapshot,
)
from trireme import _core
from trireme.errors import BadRequest

RATES = _core.RuleValues(lr=0.0)
RNG = np.random.default_rng(0)
KEYS = random_keys(RNG, 3000)
GRADS = np.zeros((len(KEYS), 2), np.float32)


def counting() -> _core.Table:
    """A table whose weights are how often their key was updated."""
    return make_table(2, "count", initializer="constant", init_a=0.0, init_b=0.0)


def push(table: _core.Table, keys: np.ndarray, *ids: tuple[int, int]) -> int:
    return table.update(keys, np.zeros((len(keys), 2), np.float32), list(ids), RATES, POOL)


def counts(table: _core.Table, keys: np.ndarray = KEYS) -> np.ndarray:
    weights = lookup(table, keys)
    assert (weights[:, 0] == weights[:, 1]).all()
    return weights[:, 0]


def test_a_repeated_push_counts_once() -> None:
    table = counting()
    assert push(table, KEYS, (3, 1)) == len(KEYS)
    before = snapshot(table)
    for _ in range(3):
        assert push(table, KEYS, (3, 1)) == 0
    assert snapshot(table) == before
    assert push(table, KEYS, (3, 2)) == len(KEYS)
    assert push(table, KEYS, (4, 1)) == len(KEYS), "another stream"
    assert (counts(table) == 3).all()


def test_a_late_push_is_left_out_when_a_later_one_of_its_stream_was_applied() -> None:
    table = counting()
    push(table, KEYS, (0, 5))
    assert push(table, KEYS, (0, 4)) == 0
    assert (table.marks(0) == 5).all()


def test_repeated_and_reordered_pushes_leave_every_count_right() -> None:
    """Each stream's pushes come in order of first arrival, and any number of times after that."""
    table, expected = counting(), np.zeros(len(KEYS))
    sent: list[tuple[int, int, np.ndarray]] = []
    last = [0, 0, 0]
    for _ in range(400):
        if sent and RNG.random() < 0.6:
            stream, sequence, rows = sent[int(RNG.integers(len(sent)))]
            assert push(table, KEYS[rows], (stream, sequence)) == 0
        else:
            stream = int(RNG.integers(3))
            last[stream] += 1
            rows = RNG.permutation(len(KEYS))[: int(RNG.integers(0, 300))]
            sent.append((stream, last[stream], rows))
            assert push(table, KEYS[rows], (stream, last[stream])) == len(rows)
            expected[rows] += 1
    np.testing.assert_array_equal(counts(table), expected)
    for stream in range(3):
        assert (table.marks(stream) == last[stream]).all()


def test_a_push_raises_the_marks_of_buckets_without_keys_too() -> None:
    table = counting()
    push(table, KEYS[:1], (7, 3))
    assert (table.marks(7) == 3).all()
    assert (table.marks(8) == 0).all()
    table.advance([(8, 2), (7, 5), (9, 1)])
    assert [int(table.marks(stream)[0]) for stream in (7, 8, 9)] == [5, 2, 1]
    table.advance([(7, 4)])
    assert (table.marks(7) == 5).all(), "marks never go back so"
    assert table.rows == 1


def test_only_the_buckets_that_lack_a_push_apply_it() -> None:
    """As after buckets have moved: some have the push, some have not."""
    table = counting()
    marks = np.zeros(_core.NUM_BUCKETS, np.uint64)
    marks[::2] = 1
    marks[100:300] = 2
    table.set_marks(0, marks)
    np.testing.assert_array_equal(table.marks(0), marks)
    lacking = marks[buckets_of(KEYS)] < 1
    assert push(table, KEYS, (0, 1)) == lacking.sum()
    np.testing.assert_array_equal(counts(table), lacking)
    np.testing.assert_array_equal(table.marks(0), np.maximum(marks, 1))
    assert push(table, KEYS, (0, 2)) == (marks[buckets_of(KEYS)] < 2).sum()


def test_the_pushes_of_one_merged_gradient_advance_together() -> None:
    """A bucket that has one of them leaves the gradient out, and can get the other alone."""
    table = counting()
    first, second = np.zeros((2, _core.NUM_BUCKETS), np.uint64)
    first[:2000], second[1000:3000] = 4, 6
    table.set_marks(1, first)
    table.set_marks(2, second)
    has_none = (first < 4) & (second < 6)
    assert push(table, KEYS, (1, 4), (2, 6)) == has_none[buckets_of(KEYS)].sum()
    np.testing.assert_array_equal(counts(table), has_none[buckets_of(KEYS)])
    np.testing.assert_array_equal(table.marks(1), np.where(has_none, 4, first))
    np.testing.assert_array_equal(table.marks(2), np.where(has_none, 6, second))
    push(table, KEYS, (1, 4))
    push(table, KEYS, (2, 6))
    lacked = has_none + (~has_none) * ((first < 4) * 1 + (second < 6) * 1)
    np.testing.assert_array_equal(counts(table), lacked[buckets_of(KEYS)])
    assert (table.marks(1) == 4).all()
    assert (table.marks(2) == 6).all()
    assert push(table, KEYS, (1, 4), (2, 6)) == 0


def test_marks_stand_per_bucket_in_snapshots() -> None:
    table = counting()
    table.advance([(5, 2)])
    push(table, keys_in([9], 3), (0, 2**62))
    assert table.snapshot(9).marks == {0: 2**62, 5: 2}
    assert table.snapshot(10).marks == {0: 2**62, 5: 2}
    marks = table.marks(5)
    marks[10] = 0
    table.set_marks(5, marks)
    assert table.snapshot(10).marks == {0: 2**62}


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "expected one push id or more, found none"),
        ([(0, 0)], r"expected a sequence >= 1, found \(stream 0, sequence 0\)"),
        ([(0, 1), (1, -3)], r"expected a sequence >= 1, found \(stream 1, sequence -3\)"),
        ([(-1, 1)], r"expected a stream in \[0, 1024\), found -1"),
        ([(0, 1), (1024, 1)], r"expected a stream in \[0, 1024\), found 1024"),
    ],
)
def test_a_wrong_push_id_is_refused_and_nothing_changes(
    ids: list[tuple[int, int]], message: str
) -> None:
    table = counting()
    push(table, KEYS, (0, 1))
    before = snapshot(table)
    with pytest.raises(BadRequest, match=message):
        push(table, KEYS, *ids)
    with pytest.raises(BadRequest, match=message):
        table.advance(ids)
    assert snapshot(table) == before


def test_wrong_marks_are_refused() -> None:
    table = counting()
    with pytest.raises(BadRequest, match="expected one mark per bucket: 4096, found 4095"):
        table.set_marks(0, np.zeros(4095, np.uint64))
    with pytest.raises(BadRequest, match=r"expected a stream in \[0, 1024\), found 5000"):
        table.set_marks(5000, np.zeros(4096, np.uint64))
    with pytest.raises(BadRequest, match=r"expected a stream in \[0, 1024\), found 5000"):
        table.marks(5000)
    with pytest.raises(TypeError, match="incompatible function arguments"):
        table.set_marks(0, np.zeros(4096, np.int64))
    assert not table.marks(0).any()
