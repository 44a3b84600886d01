"""Lifetimes of rows: limits, expiry, and what is remembered of removed rows.

That every number is right is tests/property/test_table_dict.py's.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tests.tables import POOL, buckets_of, contains, keys_in, keys_of, make_table, random_keys
from trireme import _core
from trireme.checkpoint.server_side.rows_to_save import exported
from trireme.errors import BadRequest
from trireme.optim import Adagrad
from trireme.policy import Policy, ScorePolicy
from trireme.rows.core_table import make_core_table
from trireme.rows.wide_rows import RowLayout
from trireme.table import Table

RATES = _core.RuleValues(lr=0.1)
DAY = 86_400
SCORED = {"is_scored": True, "nonclk_coeff": 0.1, "click_coeff": 1.0}


def limited(**policy: Any) -> _core.Table:
    return make_table(2, policy=_core.PolicyConfig(**policy))


def push(
    table: _core.Table,
    keys: np.ndarray,
    sequence: int,
    *,
    pool: _core.Pool = POOL,
    **columns: Any,
) -> None:
    if table.is_scored:
        columns.setdefault("show_click", np.ones((len(keys), 2), np.float32))
    grads = np.ones((len(keys), table.dim), np.float32)
    table.update(keys, grads, [(0, sequence)], RATES, pool, **columns)


def test_a_limit_bounds_memory_without_shrink() -> None:
    rng = np.random.default_rng(0)
    table = limited(max_rows=3 * 4096)
    sizes = []
    for sequence in range(1, 61):
        push(table, random_keys(rng, 10_000), sequence, time=sequence)
        assert table.rows <= 3 * 4096
        sizes.append(table.bytes)
    assert table.counters["admitted"] - table.counters["evicted"] == table.rows
    assert max(sizes[30:]) < 1.1 * max(sizes[:30]), "25 times as many keys as rows have come since"


def test_a_limit_in_bytes_covers_rows_and_index() -> None:
    rng = np.random.default_rng(0)
    limit = 4 << 20
    table = limited(max_bytes=limit)
    empty = table.bytes
    for sequence in range(1, 40):
        push(table, random_keys(rng, 20_000), sequence, time=sequence)
    rows = table.rows * (8 + table.row_bytes + 8)
    assert 0.85 * limit < rows <= limit
    # Besides: rows of one push before the limit holds, and what removed keys are remembered in.
    assert table.bytes - empty < limit + 20_000 * 40 + 4096 * 64 * 12 * 1.5


def test_rows_pushed_last_stay() -> None:
    keys = keys_in([7], 200)
    table = limited(max_rows=100 * 4096)
    for time in (1, 2, 3):
        push(table, keys[40 * time : 40 * time + 40].copy(), time, time=time)
    push(table, keys[40:60].copy(), 4, time=4)  # half of the first come again
    there = contains(table, keys)
    assert there[40:60].all(), "pushed last"
    assert there[120:160].all(), "pushed before"
    assert table.rows == 100 - 100 // 16
    assert not there[60:80].any(), "of all rows longest ago"


def test_of_rows_alike_not_always_the_same_go() -> None:
    """Data without times must not cost the same keys their rows for ever."""
    keys = keys_in([7], 33)
    table = limited(max_rows=32 * 4096)
    gone = set()
    for sequence in range(1, 30):
        push(table, keys, sequence)
        gone |= set(keys[~contains(table, keys)].tolist())
    assert len(gone) > 20


def test_threads_and_servers_make_no_difference() -> None:
    """One table, or three that have every third bucket each: the same rows."""
    policy = {**SCORED, "decay_rate": 0.9, "delete_threshold": 0.5, "max_rows": 2 * 4096}
    whole, parts = limited(**policy), [limited(**policy) for _ in range(3)]
    rng = np.random.default_rng(0)
    few, many = _core.Pool(1), _core.Pool(3)
    universe = random_keys(rng, 30_000)
    for sequence in range(1, 12):
        keys = rng.choice(universe, 12_000, replace=False)
        time, version = sequence * DAY // 2, sequence // 3
        shows = rng.random((len(keys), 2), np.float32)
        push(whole, keys, sequence, pool=few, time=time, version=version, show_click=shows)
        for part, table in enumerate(parts):
            mine = buckets_of(keys) % 3 == part
            columns = {"time": time, "version": version, "show_click": shows[mine]}
            push(table, keys[mine], sequence, pool=many, **columns)
        for bucket in range(sequence, 4096, 5):
            args = (bucket, time, True, version)
            assert whole.shrink(*args) == parts[bucket % 3].shrink(*args)
    for bucket in range(4096):
        one, other = whole.snapshot(bucket), parts[bucket % 3].snapshot(bucket)
        order, same = np.argsort(one.keys), np.argsort(other.keys)
        np.testing.assert_array_equal(one.keys[order], other.keys[same])
        np.testing.assert_array_equal(one.rows[order], other.rows[same])
    assert whole.counters["evicted"] > 0
    assert whole.counters["expired"] > 0


def test_rows_that_no_push_with_a_time_has_reached_have_no_age() -> None:
    policy = {**SCORED, "decay_rate": 0.5, "delete_after_unseen_days": 3, "ttl_s": 10}
    table = limited(**policy)
    push(table, keys_of(5), 1)
    bucket = int(buckets_of(keys_of(5))[0])
    assert table.shrink(bucket, 20_000 * DAY, False, 0) == (0, 0)
    push(table, keys_of(5), 2, time=20_000 * DAY)
    shows = np.empty((1, 2))
    table.statistics(keys_of(5), shows, 20_000 * DAY, False, POOL)
    assert shows.tolist() == [[2.0, 2.0]]
    assert table.shrink(bucket, 20_000 * DAY + 10, False, 0) == (0, 0)
    assert table.shrink(bucket, 20_000 * DAY + 11, False, 0) == (1, 0)


@pytest.mark.parametrize("decay_rate", [0.98, 0.9])
def test_export_and_expiry_judge_a_row_by_the_same_score(decay_rate: float) -> None:
    """To the last bit: computed by pow(), 0.98**5 is larger than the core's, 0.9**4 smaller."""
    for days in range(1, 31):
        (score,) = _core.decay(decay_rate, np.array([days], np.uint32)).tolist()
        for threshold, is_kept in ((score, True), (math.nextafter(score, 1), False)):
            policy = ScorePolicy(
                decay_rate=decay_rate, delete_threshold=threshold, base_threshold=threshold
            )
            schema = Table("t", dim=2, optimizer=Adagrad(lr=0.1), policy=policy).schema
            table = make_core_table(schema)
            push(table, keys_of(5), 1, time=DAY)  # a show and a click: score 1
            bucket, time = int(buckets_of(keys_of(5))[0]), (1 + days) * DAY
            statistics = RowLayout.of(schema, table).statistics(table.snapshot(bucket).rows)
            # A base is of the end of its day, when one day more has passed.
            assert exported(policy, statistics, "base", time - DAY).tolist() == [is_kept]
            assert table.shrink(bucket, time, False, 0) == (0 if is_kept else 1, 0)


def test_an_expired_row_answers_until_it_is_removed() -> None:
    table = limited(ttl_s=10)
    push(table, keys_of(5), 1, time=100)
    assert contains(table, keys_of(5)).all()
    push(table, keys_of(5), 2, time=1000)  # and a push finds it as it was
    assert table.shrink(int(buckets_of(keys_of(5))[0]), 1005, False, 0) == (0, 0)


def test_as_many_removed_keys_are_remembered_as_there_are_rows() -> None:
    keys = keys_in([9], 3000)
    table = limited()
    push(table, keys, 1)
    for version in range(1, 17):
        table.raise_version(version)
        table.erase(keys[(version - 1) * 100 : version * 100].copy(), POOL)
    # With 1500 keys gone, and as many rows left, the older half was forgotten.
    assert table.removed_known_since == 8
    assert table.snapshot(9, 8).removed.tolist() == sorted(keys[800:1600].tolist())
    with pytest.raises(BadRequest, match="expected since >= 8, found 7: the keys removed before"):
        table.snapshot(9, 7)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({"max_rows": 4095}, "expected max_rows >= 4096, one row in every bucket, found 4095"),
        ({"max_bytes": 100_000}, r"expected max_bytes >= 131072, one row .* found 100000"),
    ],
)
def test_a_limit_without_a_row_for_every_bucket_is_refused(
    policy: dict[str, int], message: str
) -> None:
    with pytest.raises(BadRequest, match=message):
        limited(**policy)


def test_a_push_carries_only_the_columns_that_the_table_counts() -> None:
    scored, plain = limited(**SCORED), limited()
    keys, ones = keys_of(1, 2), np.ones((2, 2), np.float32)
    none = {"show_click": None}
    features = np.zeros(2, np.uint32)
    with pytest.raises(BadRequest, match="expected show_click of a scored table, found none"):
        push(scored, keys, 1, **none)
    with pytest.raises(BadRequest, match="expected no show_click of a table that is not scored"):
        push(plain, keys, 1, show_click=ones)
    with pytest.raises(BadRequest, match="expected no features of a table that is not scored"):
        push(plain, keys, 1, features=features)
    with pytest.raises(BadRequest, match="expected finite shows and clicks, found nan for key 1"):
        push(scored, keys, 1, show_click=np.array([[1, 0], [np.nan, 0]], np.float32))
    with pytest.raises(BadRequest, match=r"one feature per key: 2, found 3"):
        push(scored, keys, 1, features=np.zeros(3, np.uint32))
    with pytest.raises(BadRequest, match=r"a show and a click per key: rows 2, found 3"):
        push(scored, keys, 1, show_click=np.ones((3, 2), np.float32))
    assert scored.rows == plain.rows == 0
    push(scored, keys, 1, features=features)
    for call in (
        lambda: plain.statistics(keys, np.empty((2, 2)), 0, False, POOL),
        lambda: plain.settle(keys, np.zeros(2, np.float32)),
    ):
        with pytest.raises(BadRequest, match="expected a scored table, found one without scores"):
            call()


def test_servers_make_tables_with_the_policy_of_the_schema() -> None:
    policy = ScorePolicy(nonclk_coeff=0.5, decay_rate=0.5, delete_threshold=0.3, ttl_s=DAY)
    rows = make_core_table(Table("t", dim=2, optimizer=Adagrad(), policy=policy).schema)
    assert rows.is_scored
    push(rows, keys_of(5), 1, time=DAY, show_click=np.array([[1, 0]], np.float32))
    bucket = int(buckets_of(keys_of(5))[0])
    assert rows.shrink(bucket, DAY, False, 0) == (0, 0)
    assert rows.shrink(bucket, DAY, True, 0) == (1, 0)
    small = make_core_table(Table("u", dim=2, policy=Policy(max_rows=4096)).schema)
    push(small, keys_in([3], 10), 1)
    assert small.rows == 1
