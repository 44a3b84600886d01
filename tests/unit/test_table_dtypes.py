"""16-bit weights: stochastic rounding, the same everywhere and unbiased."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.long import sampled
from tests.tables import (
    INITIALIZERS,
    POOL,
    instruction_sets,
    lookup,
    make_table,
    random_keys,
    restore,
    snapshot,
)
from trireme import _core
from trireme.errors import BadRequest

DTYPES = ("bfloat16", "float16")
STEP_AT_1 = {"bfloat16": 2.0**-7, "float16": 2.0**-10}  # between 1 and the next larger number
LARGEST = {"bfloat16": 2.0**127 * (2 - 2.0**-7), "float16": 65504.0}
ONES = {"initializer": "constant", "init_a": 1.0, "init_b": 0.0}
KEYS = random_keys(np.random.default_rng(5), 4000)


def push(
    table: _core.Table, keys: np.ndarray, grads: Any, push_id: tuple[int, int], **values: Any
) -> None:
    grads = np.broadcast_to(np.asarray(grads, np.float32), (len(keys), table.dim)).copy()
    table.update(keys, grads, [push_id], _core.RuleValues(**{"lr": 1.0, **values}), POOL)


def is_kept(weights: np.ndarray, dtype: str) -> np.ndarray:
    """Whether the type holds each number."""
    if dtype == "bfloat16":
        return weights.view(np.uint32) % 2**16 == 0
    return weights.astype(np.float16).astype(np.float32) == weights


@pytest.mark.parametrize("initializer", INITIALIZERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_lookup_of_an_absent_key_returns_its_initial_weights(
    dtype: str, initializer: str
) -> None:
    table = make_table(5, dtype=dtype, **INITIALIZERS[initializer])
    exact = lookup(make_table(5, **INITIALIZERS[initializer]), KEYS)
    start = lookup(table, KEYS)
    assert is_kept(start, dtype).all()
    np.testing.assert_allclose(start, exact, rtol=STEP_AT_1[dtype] / 2, atol=2**-25)
    push(table, KEYS, 1.0, (0, 1), lr=0.0)
    assert table.rows == len(KEYS)
    np.testing.assert_array_equal(lookup(table, KEYS), start)


@pytest.mark.parametrize("dtype", DTYPES)
def test_updates_below_half_a_step_count_in_the_mean(dtype: str) -> None:
    """Rounded to the nearest, none of them would ever move a weight."""
    table, step = make_table(8, dtype=dtype, **ONES), STEP_AT_1[dtype]
    change, num_steps = step / 64, 32
    for sequence in range(1, num_steps + 1):
        push(table, KEYS, -change, (0, sequence))
    weights = lookup(table, KEYS)
    assert set(np.unique((weights - 1) / step)) <= set(range(10)), "expected whole steps"
    # Of each update, the rounding adds a variance of at most share * (1 - share) steps^2.
    deviation = step * np.sqrt(num_steps / 64 * (1 - 1 / 64) / weights.size)
    assert abs(weights.mean() - (1 + num_steps * change)) < 5 * deviation
    assert deviation * 50 < num_steps * change


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_goes_by_seed_key_stream_sequence_and_element(dtype: str) -> None:
    def weights_after(ids: tuple[int, int], keys: np.ndarray = KEYS, **options: Any) -> np.ndarray:
        table = make_table(4, dtype=dtype, **ONES, **options)
        push(table, keys, -STEP_AT_1[dtype] / 2, ids)
        return lookup(table, KEYS)

    actual = weights_after((0, 1))
    assert (actual > 1).mean() == pytest.approx(0.5, abs=5 * 0.5 / np.sqrt(actual.size))
    np.testing.assert_array_equal(weights_after((0, 1), KEYS[::-1].copy()), actual)
    for simd, reason in instruction_sets().items():
        if not reason:
            np.testing.assert_array_equal(weights_after((0, 1), simd=simd), actual)
    for other in (weights_after((1, 1)), weights_after((0, 2)), weights_after((0, 1), seed=2)):
        assert (other != actual).mean() == pytest.approx(0.5, abs=0.05)
    assert (actual[:, :-1] != actual[:, 1:]).mean() == pytest.approx(0.5, abs=0.05)
    assert (actual[:-1] != actual[1:]).mean() == pytest.approx(0.5, abs=0.05)


def test_pushes_that_are_merged_round_by_the_lowest_stream() -> None:
    weights = []
    for ids in ([(3, 7), (2, 9)], [(2, 9), (3, 7)], [(2, 9)]):
        table = make_table(4, dtype="bfloat16", **ONES)
        grads = np.full((len(KEYS), 4), -STEP_AT_1["bfloat16"] / 2, np.float32)
        table.update(KEYS, grads, ids, _core.RuleValues(lr=1.0), POOL)
        weights.append(lookup(table, KEYS))
    np.testing.assert_array_equal(weights[0], weights[1])
    np.testing.assert_array_equal(weights[0], weights[2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_overflowing_weights_become_the_largest_value_and_nan_stays_nan(dtype: str) -> None:
    table, largest = make_table(4, dtype=dtype), np.float32(LARGEST[dtype])
    huge = np.float32(3.4e38)
    push(table, KEYS[:3], [[huge, -huge, np.inf, np.nan]], (0, 1))
    actual = lookup(table, KEYS[:3])
    np.testing.assert_array_equal(actual, [[-largest, largest, -np.inf, np.nan]] * 3)


@sampled(keep=5)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 2, 5, 16, 33])
def test_state_is_float32_and_rows_are_smaller(dtype: str, dim: int) -> None:
    half, whole = make_table(dim, "adagrad", dtype=dtype), make_table(dim, "adagrad")
    rng = np.random.default_rng(dim)
    for sequence in range(1, 4):
        grads = rng.standard_normal((len(KEYS), dim), np.float32)
        for table in (half, whole):
            push(table, KEYS, grads, (0, sequence), lr=0.01)
    actual, expected = snapshot(half), snapshot(whole)
    assert half.row_bytes == whole.row_bytes, "wide rows have float32 weights"
    for bucket, (keys, _, rows, _, _) in actual.items():
        shape = (len(keys) // 8, half.row_bytes // 4)
        a, b = (np.frombuffer(x, np.float32).reshape(shape) for x in (rows, expected[bucket][2]))
        assert keys == expected[bucket][0]
        np.testing.assert_array_equal(a[:, dim : 2 * dim], b[:, dim : 2 * dim])
        np.testing.assert_allclose(a[:, :dim], b[:, :dim], atol=4 * STEP_AT_1[dtype])
    # Rows begin at multiples of 8 bytes.
    assert whole.bytes - half.bytes >= len(KEYS) * (2 * dim // 8 * 8) - 2**13


@pytest.mark.parametrize("dtype", DTYPES)
def test_snapshots_go_both_ways_exactly_and_other_weights_to_the_nearest(dtype: str) -> None:
    table, other = make_table(3, "adam", dtype=dtype), make_table(3, "adam", dtype=dtype)
    push(table, KEYS, 0.3, (0, 1), lr=0.01)
    for bucket in range(_core.NUM_BUCKETS):
        restore(other, bucket, table.snapshot(bucket))
    assert snapshot(other) == snapshot(table)
    for each in (table, other):
        push(each, KEYS, 0.3, (0, 2), lr=0.01)
    assert snapshot(other) == snapshot(table)

    content = table.snapshot(7)
    rows = content.rows.copy()
    rows[:, :12].view(np.float32)[:] = 1 + 0.7 * STEP_AT_1[dtype]
    table.restore(7, content.keys, content.classes, rows, {})
    assert (lookup(table, content.keys) == 1 + STEP_AT_1[dtype]).all()


def test_another_dtype_is_refused() -> None:
    with pytest.raises(BadRequest, match="expected float32, bfloat16 or float16, found int8"):
        make_table(dtype="int8")
