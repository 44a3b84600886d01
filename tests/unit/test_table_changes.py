"""Pushes that bypass a table's update rule: add to the weights, or assign them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trireme import _core
from trireme.errors import BadRequest
from trireme.optim import Adagrad, values_of_group
from trireme.protocol.routing import buckets_of
from trireme.rows.core_table import make_core_table
from trireme.table import Table

DIM = 5
KEYS = np.array([3, 1, 2**64 - 1], np.uint64)
POOL = _core.Pool(2)


def make(**options: Any) -> _core.Table:
    return make_core_table(Table("t", dim=DIM, optimizer=Adagrad(lr=0.5), **options).schema)


def values(**numbers: float) -> _core.RuleValues:
    own: dict[str, Any] = {**values_of_group(Adagrad(lr=0.5).group(), 1), **numbers}
    return _core.RuleValues(**own)


def weights(table: _core.Table, keys: np.ndarray = KEYS) -> np.ndarray:
    actual = np.empty((len(keys), DIM), np.float32)
    table.lookup(keys, actual, POOL)
    return actual


def numbers(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(len(KEYS), DIM)).astype(np.float32)


def test_differences_are_added_to_old_and_new_rows_and_clipped() -> None:
    table = make()
    table.update(KEYS[:1], numbers(0)[:1], [(0, 1)], values(), POOL)
    before, delta = weights(table), numbers(1)
    bounds = {"lower": -0.5, "upper": 0.75}
    assert table.update(KEYS, delta, [(0, 2)], values(**bounds), POOL, change="add") == 3
    np.testing.assert_array_equal(weights(table), np.clip(before + delta, -0.5, 0.75))
    assert table.rows == 3


def test_assigned_weights_are_stored_bit_for_bit() -> None:
    table, assigned = make(), numbers(2)
    table.update(KEYS, assigned, [(0, 1)], values(lower=0.0), POOL, change="assign")
    np.testing.assert_array_equal(weights(table), assigned)


@pytest.mark.parametrize("change", ["add", "assign"])
def test_state_stays_and_new_rows_begin_with_that_of_the_rule(change: str) -> None:
    table, other = make(), make()
    gradient = numbers(3)
    for each in (table, other):
        each.update(KEYS[:2], gradient[:2], [(0, 1)], values(), POOL)
    table.update(KEYS, numbers(4), [(0, 2)], values(), POOL, change=change)
    other.update(KEYS, np.zeros_like(gradient), [(0, 2)], values(), POOL)
    before = weights(table), weights(other)
    for each in (table, other):
        each.update(KEYS, gradient, [(0, 3)], values(), POOL)
    steps = weights(table) - before[0], weights(other) - before[1]
    np.testing.assert_allclose(steps[0], steps[1], atol=1e-6)


def test_a_change_that_comes_twice_counts_once() -> None:
    table, delta = make(), numbers(5)
    for _ in range(2):
        table.update(KEYS, delta, [(0, 1)], values(), POOL, change="add")
    np.testing.assert_array_equal(weights(table), weights(make()) + delta)


def test_half_precision_rounds_up_or_down_with_the_right_mean() -> None:
    keys = np.arange(4000, dtype=np.uint64)
    table = make(dtype="bfloat16")
    for sequence in range(1, 9):
        delta = np.full((len(keys), DIM), 1 / 3, np.float32)
        table.update(keys, delta, [(0, sequence)], values(), POOL, change="add")
    assert weights(table, keys).mean() == pytest.approx(8 / 3, abs=0.005)


def test_an_unknown_change_is_refused() -> None:
    with pytest.raises(BadRequest, match="expected change rule, add or assign, found set"):
        make().update(KEYS, numbers(0), [(0, 1)], values(), POOL, change="set")


def test_the_count_of_changes_rises_with_each_change_and_with_nothing_else() -> None:
    table = make()
    table.update(KEYS, numbers(0), [(0, 1)], values(), POOL)
    bucket = int(buckets_of(KEYS[:1])[0])
    content = table.snapshot(bucket)
    columns = (content.keys, content.classes, content.rows)
    before = table.num_changes
    weights(table)
    table.advance([(0, 2)])
    table.raise_version(3)
    wide = np.empty((len(KEYS), table.row_bytes), np.uint8)
    table.read_wide(KEYS, np.empty(len(KEYS), np.uint8), wide, POOL)
    assert table.num_changes == before
    for change in (
        lambda: table.update(KEYS, numbers(1), [(0, 3)], values(), POOL),
        lambda: table.apply(bucket, *columns, KEYS[:0]),
        lambda: table.restore(bucket, *columns, {}),
        lambda: table.shrink(bucket, 0, False, 3),
        lambda: table.erase(KEYS, POOL),
    ):
        change()
        assert table.num_changes > before
        before = table.num_changes


def test_wide_rows_are_read_as_buckets_are_and_absent_ones_are_zeros() -> None:
    table = make()
    table.update(KEYS, numbers(0), [(0, 1)], values(), POOL)
    keys = np.array([*KEYS, 77], np.uint64)
    classes = np.full(len(keys), 9, np.uint8)
    wide = np.ones((len(keys), table.row_bytes), np.uint8)
    table.read_wide(keys, classes, wide, POOL)
    assert classes.tolist() == [0, 0, 0, 255]
    assert not wide[-1].any()
    for key, row in zip(KEYS, wide, strict=False):
        content = table.snapshot(int(buckets_of(np.array([key]))[0]))
        np.testing.assert_array_equal(content.rows[content.keys.tolist().index(key)], row)
