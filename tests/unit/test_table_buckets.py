"""Whole buckets of a table: snapshot, restore, clear."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.tables import (
    POOL,
    RULES,
    buckets_of,
    clear,
    contains,
    keys_in,
    keys_of,
    lookup,
    make_table,
    random_keys,
    restore,
    snapshot,
)
from trireme import _core
from trireme.errors import BadRequest

RATES = _core.RuleValues(lr=0.1)
BUCKET = 1234
MANY = keys_in([BUCKET], 200)
OTHERS = random_keys(np.random.default_rng(1), 4000)


def step(table: _core.Table, keys: np.ndarray, *ids: tuple[int, int], seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    grads = rng.standard_normal((len(keys), table.dim), np.float32)
    assert table.update(keys, grads, list(ids), RATES, POOL) == len(keys)


def filled(rule: str = "adagrad", dim: int = 3) -> _core.Table:
    table = make_table(dim, rule)
    for sequence in (1, 2):
        step(table, np.concatenate([MANY, OTHERS]), (0, sequence), seed=sequence)
    step(table, MANY, (6, 1))
    return table


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dim", [1, 8, 17])
def test_a_snapshot_holds_keys_weights_state_and_marks(rule: str, dim: int) -> None:
    table = filled(rule, dim)
    content = table.snapshot(BUCKET)
    keys, classes, rows = content.keys, content.classes, content.rows
    assert table.row_bytes == 4 * (dim + table.state_floats) + 8
    assert (keys.dtype, classes.dtype, rows.dtype) == (np.uint64, np.uint8, np.uint8)
    assert rows.shape == (len(keys), table.row_bytes)
    assert set(MANY) <= set(keys)
    assert (buckets_of(keys) == BUCKET).all()
    assert not classes.any()
    weights = rows[:, : 4 * dim].view(np.float32)
    np.testing.assert_array_equal(weights, lookup(table, keys))
    assert content.marks == {0: 2, 6: 1}


def test_snapshots_of_all_buckets_hold_each_row_once() -> None:
    table = filled()
    keys = np.concatenate([table.snapshot(bucket).keys for bucket in range(4096)])
    assert len(keys) == table.rows == len(np.unique(keys))
    assert set(keys) == set(MANY) | set(OTHERS)


@pytest.mark.parametrize("rule", RULES)
def test_buckets_restored_into_another_table_train_on_with_the_same_bits(rule: str) -> None:
    table, other = filled(rule), make_table(3, rule)
    step(other, MANY[:50], (0, 9), (2, 4), seed=5)  # all of it is replaced
    for bucket in range(4096):
        restore(other, bucket, table.snapshot(bucket))
    assert other.rows == table.rows
    for each in (table, other):
        step(each, MANY, (0, 3), (6, 2), seed=3)
    np.testing.assert_array_equal(lookup(other, MANY), lookup(table, MANY))
    np.testing.assert_array_equal(lookup(other, OTHERS), lookup(table, OTHERS))
    for stream in range(8):
        np.testing.assert_array_equal(other.marks(stream), table.marks(stream))


def test_restore_replaces_one_bucket_and_leaves_the_others() -> None:
    table = filled()
    others = [bucket for bucket in range(4096) if bucket != BUCKET]
    before = snapshot(table)
    content = table.snapshot(BUCKET)
    keys = content.keys
    table.restore(BUCKET, keys[:7], content.classes[:7], content.rows[:7], {3: 5})
    actual = table.snapshot(BUCKET)
    assert set(actual.keys) == set(keys[:7])
    assert actual.marks == {3: 5}, "marks that are not given become 0"
    assert contains(table, keys).sum() == 7
    after = snapshot(table)
    assert all(after[bucket] == before[bucket] for bucket in others)


def test_restore_grows_a_bucket_as_far_as_need_be() -> None:
    table = make_table(2, "count")
    for n in (1, 3000, 5, 2000):
        keys = keys_in([BUCKET], n, seed=n)
        rows = np.random.default_rng(n).integers(0, 256, (n, 16), np.uint8)
        table.restore(BUCKET, keys, np.zeros(n, np.uint8), rows, {})
        assert table.rows == n
        actual = table.snapshot(BUCKET)
        order, expected = np.argsort(actual.keys), np.argsort(keys)
        np.testing.assert_array_equal(actual.keys[order], keys[expected])
        np.testing.assert_array_equal(actual.rows[order], rows[expected])


def test_a_cleared_bucket_is_empty_and_its_memory_is_used_again() -> None:
    table = filled()
    rows, size = table.rows, table.bytes
    keys = table.snapshot(BUCKET).keys
    clear(table, BUCKET)
    assert table.rows == rows - len(keys)
    assert not contains(table, keys).any()
    content = table.snapshot(BUCKET)
    assert [len(part) for part in (content.keys, content.classes, content.rows)] == [0, 0, 0]
    assert content.marks == {}
    np.testing.assert_array_equal(lookup(table, keys), lookup(make_table(3), keys))
    clear(table, BUCKET)
    step(table, keys, (0, 3))
    assert table.rows == rows
    marks_of_a_stripe = 8 * 64  # its buckets have different ones of stream 6, after the clear
    assert table.bytes <= size + marks_of_a_stripe


def content_of(n: int = 3) -> dict[str, Any]:
    return {
        "keys": keys_in([BUCKET], n),
        "classes": np.zeros(n, np.uint8),
        "rows": np.zeros((n, 32), np.uint8),
        "marks": {0: 1},
    }


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"bucket": 4096}, BadRequest, r"expected a bucket in \[0, 4096\), found 4096"),
        (
            {"bucket": BUCKET + 1},
            BadRequest,
            "expected its own keys, found key .* of bucket 1234",
        ),
        ({"rows": np.zeros((3, 20), np.uint8)}, BadRequest, "rows of width 32, found 20"),
        ({"rows": np.zeros((2, 32), np.uint8)}, BadRequest, "as many rows as keys: 3, found 2"),
        (
            {"classes": np.zeros(2, np.uint8)},
            BadRequest,
            "3 classes, one per key, found 2",
        ),
        (
            {"classes": np.ones(3, np.uint8)},
            BadRequest,
            r"expected a row class in \[0, 1\), found 1",
        ),
        (
            {"keys": keys_in([BUCKET], 2).repeat([2, 1])},
            BadRequest,
            "found .* twice",
        ),
        ({"marks": {-1: 1}}, BadRequest, r"expected a stream in \[0, 1024\), found -1"),
        ({"marks": {4000: 1}}, BadRequest, r"expected a stream in \[0, 1024\), found 4000"),
        ({"marks": {0: -1}}, TypeError, "incompatible function arguments"),
        ({"marks": {"0": 1}}, TypeError, "incompatible function arguments"),
        ({"marks": {0: 2**64}}, TypeError, "incompatible function arguments"),
        ({"keys": np.zeros(3, np.int64)}, TypeError, "incompatible function arguments"),
        ({"rows": np.zeros((3, 8), np.float32)}, TypeError, "incompatible function arguments"),
        ({"rows": np.zeros((3, 64), np.uint8)[:, ::2]}, TypeError, "incompatible function"),
        ({"classes": np.zeros(3, np.int64)}, TypeError, "incompatible function arguments"),
    ],
)
def test_wrong_content_is_refused_and_nothing_changes(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    table = filled()
    before = snapshot(table)
    with pytest.raises(error, match=message):
        table.restore(**{"bucket": BUCKET, **content_of(), **change})
    assert snapshot(table) == before
    table.restore(BUCKET, **content_of())


def test_a_bucket_that_is_none_is_refused() -> None:
    table = make_table()
    for call in (table.snapshot, partial(clear, table)):
        with pytest.raises(BadRequest, match=r"expected a bucket in \[0, 4096\), found 4096"):
            call(4096)
        with pytest.raises(TypeError, match="incompatible function arguments"):
            call(-1)


def test_read_only_and_empty_content_is_taken() -> None:
    table = filled()
    content = content_of()
    for part in ("keys", "classes", "rows"):
        content[part].flags.writeable = False
    table.restore(BUCKET, **content)
    assert len(table.snapshot(BUCKET).keys) == 3
    table.restore(BUCKET, keys_of(), np.empty(0, np.uint8), np.empty((0, 32), np.uint8), {1: 1})
    assert table.snapshot(BUCKET).marks == {1: 1}
    assert len(table.snapshot(BUCKET).keys) == 0
