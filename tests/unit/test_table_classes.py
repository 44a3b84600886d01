"""Row classes: rows of different widths in one table, and heads that grow to whole rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.tables import POOL, RULES, buckets_of, lookup, make_table, random_keys, restore
from trireme import _core
from trireme.errors import BadRequest

KEYS = random_keys(np.random.default_rng(5), 3000)
WIDE, NARROW = KEYS[:2000], KEYS[2000:]
SCORED = {"is_scored": True, "nonclk_coeff": 0.5, "click_coeff": 1.0}


def grads_of(n: int, dim: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, dim), np.float32)


def push(
    table: _core.Table, keys: np.ndarray, dim: int, sequence: int, row_class: int = 0, **more: Any
) -> None:
    grads = grads_of(len(keys), dim, sequence)
    rates = _core.RuleValues(lr=0.1, eps=0.5, step=sequence)
    by_class = [np.empty((0, width), np.float32) for width in table.dims[:row_class]]
    keys = np.ascontiguousarray(keys)
    table.update(keys, [*by_class, grads], [(0, sequence)], rates, POOL, **more)


def shown(table: _core.Table, keys: np.ndarray, dim: int, sequence: int, show: Any) -> None:
    """A push in which each key was shown so often, and not clicked."""
    show_click = np.zeros((len(keys), 2), np.float32)
    show_click[:, 0] = show
    push(table, keys, dim, sequence, show_click=show_click)


def look(table: _core.Table, keys: np.ndarray, dim: int, row_class: int = 0) -> np.ndarray:
    out = np.full((len(keys), dim), np.nan, np.float32)
    table.lookup(keys, out, POOL, row_class)
    return out


def content_of(table: _core.Table) -> dict[int, tuple[int, bytes]]:
    """Key -> class and wide row."""
    actual = {}
    for bucket in range(_core.NUM_BUCKETS):
        content = table.snapshot(bucket)
        for key, row_class, row in zip(content.keys, content.classes, content.rows, strict=True):
            actual[int(key)] = int(row_class), row.tobytes()
    return actual


# ---- dims of their own ----


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rule", RULES)
def test_each_class_learns_as_a_table_of_its_dim(rule: str, dtype: str) -> None:
    both = make_table(rule=rule, dims=[12, 5], dtype=dtype)
    alone = {12: make_table(12, rule, dtype=dtype), 5: make_table(5, rule, dtype=dtype)}
    assert (both.dims, both.head_class) == ([12, 5], None)
    for sequence in (1, 2, 3):
        for row_class, (dim, keys) in enumerate(((12, WIDE), (5, NARROW))):
            some = keys[sequence::2]
            push(both, some, dim, 2 * sequence + row_class, row_class)
            push(alone[dim], some, dim, 2 * sequence + row_class)
    for row_class, (dim, keys) in enumerate(((12, WIDE), (5, NARROW))):
        np.testing.assert_array_equal(look(both, keys, dim, row_class), lookup(alone[dim], keys))
    assert both.rows == sum(table.rows for table in alone.values())


def test_a_lookup_of_another_class_answers_the_common_columns() -> None:
    table = make_table(dims=[8, 3])
    push(table, WIDE, 8, 1)
    push(table, NARROW, 3, 2, 1)
    np.testing.assert_array_equal(look(table, WIDE, 3, 1), look(table, WIDE, 8)[:, :3])
    actual = look(table, NARROW, 8)
    np.testing.assert_array_equal(actual[:, :3], look(table, NARROW, 3, 1))
    assert not actual[:, 3:].any()
    absent = random_keys(np.random.default_rng(9), 50)[6:]
    np.testing.assert_array_equal(look(table, absent, 3, 1), look(table, absent, 8)[:, :3])
    before = look(table, WIDE, 8), look(table, NARROW, 3, 1)
    push(table, NARROW, 8, 3)  # what fits of the gradient
    push(table, WIDE, 3, 4, 1)
    np.testing.assert_allclose(
        look(table, NARROW, 3, 1), before[1] - 0.1 * grads_of(1000, 8, 3)[:, :3], atol=1e-6
    )
    expected = before[0].copy()
    expected[:, :3] -= 0.1 * grads_of(2000, 3, 4)
    np.testing.assert_allclose(look(table, WIDE, 8), expected, atol=1e-6)


@pytest.mark.parametrize("rule", RULES)
def test_wide_rows_have_zeros_where_a_class_has_nothing(rule: str) -> None:
    table, other = (make_table(rule=rule, dims=[3, 7]) for _ in range(2))
    push(table, NARROW, 3, 1)
    push(table, WIDE, 7, 2, 1)
    plain = make_table(3, rule)
    push(plain, NARROW, 3, 1)
    actual, narrow = content_of(table), content_of(plain)
    per_weight = (table.state_floats - plain.state_floats) // 4
    per_row = plain.state_floats - 3 * per_weight
    for key in NARROW.tolist():
        row_class, row = actual[key]
        floats = np.frombuffer(row[:-8], np.float32)
        planes, rest = floats[: 7 * (1 + per_weight)].reshape(-1, 7), floats[7 * (1 + per_weight) :]
        assert row_class == 0
        assert not planes[:, 3:].view(np.uint32).any()
        compact = np.concatenate([planes[:, :3].ravel(), rest])
        assert compact.tobytes() + row[-8:] == narrow[key][1]
        assert len(rest) == per_row
    for bucket in range(_core.NUM_BUCKETS):
        restore(other, bucket, table.snapshot(bucket))
    assert content_of(other) == actual
    push(table, KEYS, 7, 3, 1)
    push(other, KEYS, 7, 3, 1)
    assert content_of(other) == content_of(table)


def test_a_row_put_in_the_place_of_another_takes_its_class() -> None:
    table, other = make_table(dims=[8, 3]), make_table(dims=[8, 3])
    push(table, WIDE, 8, 1)
    push(other, WIDE, 3, 1, 1)
    for bucket in range(_core.NUM_BUCKETS):
        content = other.snapshot(bucket)
        table.apply(bucket, content.keys, content.classes, content.rows, content.keys[:0])
    assert table.rows == len(WIDE)
    assert content_of(table) == content_of(other)
    push(table, WIDE, 8, 2)
    push(other, WIDE, 8, 2)
    assert content_of(table) == content_of(other)


@pytest.mark.parametrize(("num_rows", "unused"), [(25_000, 0), (100_000, 2 << 20)])
def test_narrow_rows_take_less_memory(num_rows: int, unused: int) -> None:
    """unused: of a huge page, which a table of more than 16 MiB begins with."""
    many = random_keys(np.random.default_rng(1), num_rows)
    sizes = {}
    for dim, row_class in ((64, 0), (8, 1)):
        table = make_table(rule="adagrad", dims=[64, 8])
        push(table, many, dim, 1, row_class)
        sizes[dim] = table.bytes
    # 8 bytes for the key, weights and sums, 8 of statistics.
    saved = len(many) * 2 * 4 * 56
    assert 0.99 * saved <= sizes[64] - sizes[8] <= 1.01 * saved + unused


@pytest.mark.parametrize(
    ("row_class", "width", "message"),
    [
        (2, 8, r"update: expected a row class in \[0, 2\), found 2"),
        (1, 8, "update: expected rows of dim 3, found 8"),
        (0, 3, "update: expected rows of dim 8, found 3"),
    ],
)
def test_a_class_that_does_not_fit_is_refused(row_class: int, width: int, message: str) -> None:
    table = make_table(dims=[8, 3])
    with pytest.raises(BadRequest, match=message):
        push(table, WIDE, width, 1, row_class)
    with pytest.raises(BadRequest, match=message.replace("update", "lookup")):
        look(table, WIDE, width, row_class)
    with pytest.raises(BadRequest, match=r"lookup: expected a row class in \[0, 2\), found -1"):
        look(table, WIDE, 8, -1)
    rates, grads = _core.RuleValues(lr=0.1), [grads_of(1, 8, 1), grads_of(2, 3, 1)]
    with pytest.raises(BadRequest, match="update: expected as many rows as keys: 2000, found 3"):
        table.update(WIDE, grads, [(0, 1)], rates, POOL)
    assert table.rows == 0


def test_one_update_has_keys_of_all_classes() -> None:
    """All of them, or none in a bucket that has the push already."""
    both, table = make_table(dims=[8, 3]), make_table(dims=[8, 3])
    push(table, WIDE, 8, 1)
    push(table, NARROW, 3, 2, 1)
    grads = [grads_of(len(WIDE), 8, 1), grads_of(len(NARROW), 3, 2)]
    for applied in (len(KEYS), 0):
        rates = _core.RuleValues(lr=0.1, eps=0.5)
        assert both.update(KEYS, grads, [(0, 2)], rates, POOL) == applied
    assert content_of(both) == content_of(table)


def test_content_that_does_not_fit_its_class_is_refused() -> None:
    table = make_table(dims=[8, 3])
    push(table, WIDE, 8, 1)
    bucket = int(buckets_of(WIDE[:1])[0])
    content = table.snapshot(bucket)
    ones, none = np.ones_like(content.classes), content.keys[:0]
    for classes, message in (
        (ones, "expected zeros behind the 3 weights of key .* of row class 1"),
        (ones + 1, r"expected a row class in \[0, 2\), found 2"),
    ):
        with pytest.raises(BadRequest, match=message):
            table.restore(bucket, content.keys, classes, content.rows, {})
        with pytest.raises(BadRequest, match=message):
            table.apply(bucket, content.keys, classes, content.rows, none)
    assert table.snapshot(bucket).rows.tobytes() == content.rows.tobytes()


# ---- heads ----


def heads(dim: int, rule: str, threshold: float, **options: Any) -> _core.Table:
    """A table whose rows begin as heads."""
    policy = _core.PolicyConfig(**SCORED, embedx_threshold=threshold)
    return make_table(dim, rule, policy=policy, **options)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_row_is_a_head_until_its_score_reaches_the_threshold(dtype: str) -> None:
    table = heads(5, "adagrad", 2.0, dtype=dtype)
    assert (table.dims, table.head_class) == ([5, 1], 1)
    start = lookup(make_table(5, dtype=dtype), KEYS)
    absent = lookup(table, KEYS)
    np.testing.assert_array_equal(absent[:, 0], start[:, 0])
    assert not absent[:, 1:].any(), "its row would begin as a head"

    shown(table, KEYS, 5, 1, np.where(np.arange(3000) % 3 == 0, 4, 2))  # scores 2 and 1
    actual, is_whole = lookup(table, KEYS), np.arange(3000) % 3 == 0
    assert (actual[:, 0] != start[:, 0]).mean() > 0.99
    np.testing.assert_array_equal(actual[is_whole, 1:], start[is_whole, 1:])
    assert not actual[~is_whole, 1:].any()
    classes = {key: row_class for key, (row_class, _) in content_of(table).items()}
    assert [classes[key] for key in KEYS.tolist()] == np.where(is_whole, 0, 1).tolist()

    shown(table, KEYS, 5, 2, 2)  # scores 3 and 2: all are whole
    again = lookup(table, KEYS)
    assert (again[is_whole] != actual[is_whole]).mean() > 0.99
    np.testing.assert_array_equal(again[~is_whole, 1:], start[~is_whole, 1:])
    assert table.rows == len(KEYS)
    assert {row_class for row_class, _ in content_of(table).values()} == {0}


@pytest.mark.parametrize("rule", [name for name in RULES if "fleet" in name])
def test_with_threshold_0_fleets_rules_do_what_they_do_without_heads(rule: str) -> None:
    """Their tail learns from the second update on, whether rows begin as heads or not."""
    plain = make_table(6, rule, policy=_core.PolicyConfig(**SCORED))
    table = heads(6, rule, 0.0)
    for sequence in range(1, 6):
        some = KEYS[sequence::2]
        for each in (plain, table):
            shown(each, some, 6, sequence, 1)
    assert content_of(table) == content_of(plain)


@pytest.mark.parametrize("rule", [name for name in RULES if "fleet" in name])
def test_a_tail_begins_with_the_update_after_its_row_is_whole(rule: str) -> None:
    """Its rates count from there on, as those of a table whose rows begin then."""
    late, head = heads(6, rule, 2.0), heads(6, rule, 1e9)
    for sequence in range(1, 4):  # scores 0.75, 1.5, 2.25
        shown(late, KEYS, 6, sequence, 1.5)
        shown(head, KEYS, 6, sequence, 1.5)
    start = lookup(make_table(6), KEYS)[:, 1:]
    np.testing.assert_array_equal(lookup(late, KEYS)[:, 1:], start)
    other = make_table(6, rule)
    push(other, KEYS, 6, 3)  # its tail begins now, too
    for sequence in (4, 5, 6):
        push(other, KEYS, 6, sequence)
        for each in (late, head):
            shown(each, KEYS, 6, sequence, 1)
    np.testing.assert_array_equal(lookup(late, KEYS)[:, 1:], lookup(other, KEYS)[:, 1:])
    np.testing.assert_array_equal(lookup(late, KEYS)[:, 0], lookup(head, KEYS)[:, 0])
    assert {row_class for row_class, _ in content_of(head).values()} == {1}


@pytest.mark.parametrize("rule", RULES)
def test_restored_heads_and_whole_rows_train_on_with_the_same_bits(rule: str) -> None:
    table, other = heads(6, rule, 2.0), heads(6, rule, 2.0)
    rng = np.random.default_rng(3)
    for sequence in range(1, 4):
        some = rng.permutation(KEYS)[:1500]
        shown(table, some, 6, sequence, 1.5)
    classes = [row_class for row_class, _ in content_of(table).values()]
    assert 100 < sum(classes) < len(classes) - 100
    for bucket in range(_core.NUM_BUCKETS):
        restore(other, bucket, table.snapshot(bucket))
    assert content_of(other) == content_of(table)
    for each in (table, other):
        shown(each, KEYS, 6, 4, 1.5)
    assert content_of(other) == content_of(table)


def test_heads_of_several_dims_grow_to_the_dim_that_is_pushed() -> None:
    policy = _core.PolicyConfig(**SCORED, embedx_threshold=1.0)
    table = make_table(dims=[8, 3], policy=policy)
    assert (table.dims, table.head_class) == ([8, 3, 1], 2)
    show_click = np.full((len(NARROW), 2), [1, 0], np.float32)
    for sequence in (1, 2):
        push(table, NARROW, 3, sequence, 1, show_click=show_click)
    assert {row_class for row_class, _ in content_of(table).values()} == {1}
    start = lookup(make_table(3), NARROW)
    np.testing.assert_array_equal(look(table, NARROW, 3, 1)[:, 1:], start[:, 1:])


def test_rows_of_dim_1_have_no_tail_to_wait_for() -> None:
    table = heads(1, "sgd", 100.0)
    assert (table.dims, table.head_class) == ([1], None)


def test_a_key_that_occurs_twice_grows_once() -> None:
    table, twice = heads(4, "sgd", 2.0), np.repeat(KEYS[:100], 2)
    for sequence in (1, 2):
        shown(table, twice, 4, sequence, 2)
        assert table.rows == 100
        assert {row_class for row_class, _ in content_of(table).values()} == {0}


def test_a_table_of_heads_takes_the_memory_of_heads() -> None:
    many = random_keys(np.random.default_rng(1), 200_000)
    table, whole = heads(32, "adagrad", 5.0), heads(32, "adagrad", 0.0)
    narrow = heads(1, "sgd", 0.0)
    for each, dim in ((table, 32), (whole, 32), (narrow, 1)):
        shown(each, many, dim, 1, 2)
    # Of a head: key, one weight, one sum, statistics; and what the index takes.
    assert table.bytes - make_table(32, "adagrad").bytes < len(many) * (8 + 4 + 4 + 32 + 9)
    assert whole.bytes > len(many) * (8 + 4 * 32 + 4 * 32 + 32)
    before = table.bytes
    shown(table, many[:20_000], 32, 2, 20)
    grown = table.bytes - before
    assert grown == pytest.approx(20_000 * (8 + 8 * 32 + 32), rel=0.05)
    others, before_others = random_keys(np.random.default_rng(2), 20_000), narrow.bytes
    shown(table, others, 32, 3, 2)
    shown(narrow, others, 1, 2, 2)
    of_index = narrow.bytes - before_others - 20_000 * narrow.row_bytes
    assert table.bytes - before - grown < of_index + 20_000, "rows that heads left are used again"


def test_heads_belong_to_scored_tables() -> None:
    policy = _core.PolicyConfig(embedx_threshold=1.0)
    with pytest.raises(BadRequest, match="expected a scored table where rows begin as heads"):
        make_table(4, policy=policy)
