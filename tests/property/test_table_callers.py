"""Many concurrent callers of one table: each sees its own updates, and never a torn row."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from random import Random
from threading import Event

import numpy as np
import pytest

from tests.property.table_model import NUM_BUCKETS, Model, rows_of
from tests.property.table_operations import Operations
from tests.seeds import SEED, named_in_failure
from tests.tables import lookup, make_table, random_keys, restore, snapshot
from trireme import _core

NUM_CALLERS = 4
NUM_OPERATIONS = 3000
RATES = _core.RuleValues(lr=0.0)
ZEROS = {"initializer": "constant", "init_a": 0.0, "init_b": 0.0}


def together(writers: list[Callable[[], None]], readers: list[Callable[[Event], None]]) -> None:
    """Runs all at the same time; readers, until the event says that the writers are through."""
    done = Event()
    with ThreadPoolExecutor(len(writers) + len(readers)) as threads:
        reading = [threads.submit(reader, done) for reader in readers]
        try:
            for writing in [threads.submit(writer) for writer in writers]:
                writing.result()
        finally:
            done.set()
        for result in reading:
            result.result()


def run(each: Operations) -> None:
    with named_in_failure(lambda: each.doing):
        for _ in range(NUM_OPERATIONS):
            each.step()


def check_together(table: _core.Table, callers: list[Operations]) -> None:
    together([lambda each=each: run(each) for each in callers], [])
    for each in callers:
        with named_in_failure(lambda each=each: each.doing):
            each.compare_all()
    assert table.rows == sum(len(each.model.rows) for each in callers)


@pytest.mark.parametrize(("rule", "dim"), [("adagrad", 7), ("row adam", 16)])
def test_callers_with_keys_of_their_own_do_not_notice_one_another(rule: str, dim: int) -> None:
    """Keys that share buckets, and pools of threads that do or do not."""
    table, pool = make_table(dim, rule, initial_accumulator=0.0), _core.Pool(3)
    callers = [
        Operations(
            table,
            Model(dim, rule),
            f"{SEED} {rule} {i}",
            streams=(i,),
            buckets=range(0),
            is_mine=lambda key, i=i: key % NUM_CALLERS == i,
            is_alone=False,
            pool=pool if i % 2 else _core.Pool(1),
        )
        for i in range(NUM_CALLERS)
    ]
    check_together(table, callers)


def test_callers_with_buckets_of_their_own_do_not_notice_one_another() -> None:
    """Buckets that share locks, and are read, replaced and dropped beside one another."""
    table = make_table(5, "adam")
    callers = [
        Operations(
            table,
            Model(5, "adam"),
            f"{SEED} buckets {i}",
            streams=(i,),
            buckets=range(i, NUM_BUCKETS, NUM_CALLERS),
            is_alone=False,
        )
        for i in range(NUM_CALLERS)
    ]
    check_together(table, callers)


def test_counts_of_keys_that_all_callers_update_are_exact_and_rows_whole() -> None:
    """Every push comes once or twice, from one of four callers; readers see counts go up."""
    dim, num_pushes = 33, 400  # a row lies on three cache lines
    keys = random_keys(np.random.default_rng(SEED), 2000)
    table = make_table(dim, "count", **ZEROS)
    expected = np.zeros((NUM_CALLERS, len(keys)))

    def write(stream: int) -> None:
        rng, pool = np.random.default_rng([SEED, stream]), _core.Pool(2)
        for sequence in range(1, num_pushes + 1):
            rows = rng.integers(0, len(keys), rng.choice([0, 1, 50, 1000, 5000]))
            push = (keys[rows], np.empty((len(rows), dim), np.float32), [(stream, sequence)])
            assert table.update(*push, RATES, pool) == len(rows)
            np.add.at(expected[stream], rows, 1)
            if rng.random() < 0.3:
                assert table.update(*push, RATES, pool) == 0

    def read(done: Event) -> None:
        before, pool = np.zeros(len(keys), np.float32), _core.Pool(1)
        while not done.is_set():
            weights = lookup(table, keys, pool)
            assert (weights == weights[:, :1]).all()
            assert (weights[:, 0] >= before).all()
            before = weights[:, 0].copy()

    def read_buckets(done: Event) -> None:
        for bucket in count():
            if done.is_set():
                return
            rows, _ = rows_of(table.snapshot(bucket % NUM_BUCKETS))
            for row in rows.values():
                assert len(set(np.frombuffer(row, np.float32, dim))) == 1

    with named_in_failure():
        writers = [lambda stream=stream: write(stream) for stream in range(NUM_CALLERS)]
        together(writers, [read, read, read_buckets])
        np.testing.assert_array_equal(lookup(table, keys)[:, 5], expected.sum(axis=0))
        for stream in range(NUM_CALLERS):
            assert (table.marks(stream) == num_pushes).all()


def test_lookups_while_a_table_grows_find_every_row_that_was_there() -> None:
    """A row is as it started or as it is after its one update, and from then on stays."""
    dim, num_writers, num_pushes, size = 9, 2, 200, 1500
    keys = random_keys(np.random.default_rng(SEED), num_writers * num_pushes * size)
    pushes = keys.reshape(num_writers, num_pushes, size)
    table = make_table(dim, "count")
    start = lookup(table, keys)
    grown = start + np.float32(1)
    num_done = np.zeros(num_writers, int)  # pushes that each writer has had applied

    def write(stream: int) -> None:
        grads, pool = np.empty((size, dim), np.float32), _core.Pool(1)
        for sequence in range(1, num_pushes + 1):
            push = pushes[stream, sequence - 1]
            assert table.update(push, grads, [(stream, sequence)], RATES, pool) == size
            num_done[stream] = sequence

    def read(done: Event) -> None:
        rng, pool = np.random.default_rng(SEED), _core.Pool(1)
        while not done.is_set():
            was_there = (np.arange(num_pushes) < num_done[:, None]).repeat(size)
            rows = rng.integers(0, len(keys), 20_000)
            actual = lookup(table, keys[rows], pool)
            is_grown = (actual == grown[rows]).all(axis=1)
            assert (is_grown | (actual == start[rows]).all(axis=1)).all()
            assert is_grown[was_there[rows]].all()

    with named_in_failure():
        writers = [lambda stream=stream: write(stream) for stream in range(num_writers)]
        together(writers, [read, read])
        assert table.rows == len(keys)
        np.testing.assert_array_equal(lookup(table, keys), grown)


def test_a_row_that_is_erased_and_used_again_never_shows_under_another_key() -> None:
    """Rows keep the weights that they started with: so a lookup, row or no row, has one answer."""
    dim, num_rounds = 11, 400
    keys = random_keys(np.random.default_rng(SEED), 6000)
    table = make_table(dim, "sgd")
    expected = lookup(table, keys)

    def churn(stream: int) -> None:
        random, pool = Random(f"{SEED} {stream}"), _core.Pool(1)
        mine = keys[stream::2].copy()
        for sequence in range(1, num_rounds + 1):
            part = mine[: random.randrange(1, len(mine))]
            grads = np.ones((len(part), dim), np.float32)
            table.update(part, grads, [(stream, sequence)], RATES, pool)
            table.erase(part[random.randrange(2) :: 2].copy(), pool)

    def replace() -> None:
        random = Random(SEED)
        for _ in range(10 * num_rounds):
            bucket = random.randrange(NUM_BUCKETS)
            restore(table, bucket, table.snapshot(bucket))

    def read(done: Event) -> None:
        rng, pool = np.random.default_rng(SEED), _core.Pool(1)
        while not done.is_set():
            rows = rng.permutation(len(keys))
            np.testing.assert_array_equal(lookup(table, keys[rows], pool), expected[rows])

    with named_in_failure():
        together([lambda: churn(0), lambda: churn(1), replace], [read, read])
        assert table.rows == sum(len(content[0]) for content in snapshot(table).values()) // 8
