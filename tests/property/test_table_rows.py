"""Tables of several row classes and types equal a dict under random operations, bit for bit."""

from __future__ import annotations

from collections import defaultdict
from random import Random
from typing import Any

import numpy as np
import pytest

from tests.property.table_rows import CLICK, NONCLK, Rows, values_of
from tests.seeds import SEED, named_in_failure
from tests.tables import POOL, buckets_of, make_table, restore
from trireme import _core

NUM_OPERATIONS = 12_000
# (dims, rule, dtype, threshold of heads)
TABLES: list[tuple[list[int], str, str, float | None]] = [
    ([5], "adagrad", "bfloat16", None),
    ([16], "momentum", "float16", None),
    ([3, 9, 1], "row adam", "float32", None),
    ([8, 2], "ftrl", "bfloat16", None),
    ([7], "shared fleet adagrad", "float32", 3.0),
    ([6], "fleet adam", "float16", 3.0),
    ([4, 11], "fleet adagrad", "float32", 2.0),
    ([5, 3], "shared fleet adam", "bfloat16", 4.0),
]


class Operations:
    """Does random operations to table and model, and compares."""

    def __init__(self, table: _core.Table, model: Rows, seed: str) -> None:
        self.table, self.model = table, model
        self.random, self.rng = Random(seed), np.random.default_rng(list(seed.encode()))
        self.keys = [self.random.randrange(2**64) for _ in range(150)] + [0, 1, 2**64 - 1]
        self.last = [0, 0]
        self.saved: dict[int, Any] = {}
        self.doing = ""

    def step(self) -> None:
        operations = [self.update] * 5 + [self.lookup] * 3 + [self.erase, self.move]
        operation = self.random.choice(operations)
        self.doing = operation.__name__
        operation()
        assert self.table.rows == len(self.model.rows)

    def some(self) -> list[int]:
        return self.random.sample(self.keys, self.random.randint(0, 12))

    def row_class(self) -> int:
        return self.random.randrange(self.model.num_dims)

    def update(self) -> None:
        """Keys of all classes at once; each key once."""
        keys = self.random.sample(self.keys, self.random.randint(0, 20))
        of_class = defaultdict[int, list[int]](list)
        for key in keys:
            of_class[self.row_class()].append(key)
        stream = self.random.randrange(2)
        self.last[stream] += 1
        ids = [(stream, self.last[stream])]
        values, grads, shows = values_of(self.random), [], []
        for row_class in range(self.model.num_dims):
            shape = (len(of_class[row_class]), self.model.dims[row_class])
            grads.append(self.rng.standard_normal(shape, np.float32))
            show_click = self.rng.integers(0, 2, (len(of_class[row_class]), 2)).astype(np.float32)
            show_click[:, 0] += 1
            shows.append(show_click)
            self.model.update(
                of_class[row_class],
                row_class,
                grads[-1],
                ids,
                values,
                None if self.model.head is None else shows[-1],
            )
        flat = [key for row_class in range(self.model.num_dims) for key in of_class[row_class]]
        more = {}
        if self.model.head is not None:
            more["show_click"] = np.concatenate(shows)
        rates = _core.RuleValues(**vars(values))
        applied = self.table.update(np.array(flat, np.uint64), grads, ids, rates, POOL, **more)
        assert applied == len(flat)

    def lookup(self) -> None:
        keys, row_class = self.some(), self.row_class()
        out = np.full((len(keys), self.model.dims[row_class]), np.nan, np.float32)
        self.table.lookup(np.array(keys, np.uint64), out, POOL, row_class)
        np.testing.assert_array_equal(out, self.model.lookup(keys, row_class))

    def erase(self) -> None:
        keys = self.some()
        there = sum(self.model.rows.pop(key, None) is not None for key in keys)
        assert self.table.erase(np.array(keys, np.uint64), POOL) == there

    def move(self) -> None:
        """A bucket to itself, its rows in another order; or anew into the rows that are there."""
        key = np.array([self.random.choice(self.keys)], np.uint64)
        bucket = int(buckets_of(key)[0])
        content = self.table.snapshot(bucket)
        if self.random.random() < 0.5:
            restore(self.table, bucket, content)
        else:
            rows = content.keys, content.classes, content.rows
            self.table.apply(bucket, *rows, content.keys[: self.random.randint(0, 2)])

    def compare_all(self) -> None:
        self.doing = "comparing everything at the end"
        actual = {}
        for bucket in np.unique(buckets_of(np.array(self.keys, np.uint64))).tolist():
            content = self.table.snapshot(bucket)
            rows = zip(content.keys.tolist(), content.classes, content.rows, strict=True)
            actual.update({key: (int(row_class), row.tobytes()) for key, row_class, row in rows})
        expected = {
            key: (row.row_class, self.model.wide(key)) for key, row in self.model.rows.items()
        }
        assert actual == expected


@pytest.mark.parametrize(("dims", "rule", "dtype", "threshold"), TABLES, ids=str)
def test_a_table_of_row_classes_equals_a_dict(
    dims: list[int], rule: str, dtype: str, threshold: float | None
) -> None:
    policy = _core.PolicyConfig()
    if threshold is not None:
        policy = _core.PolicyConfig(
            is_scored=True, nonclk_coeff=NONCLK, click_coeff=CLICK, embedx_threshold=threshold
        )
    table = make_table(rule=rule, dims=dims, dtype=dtype, policy=policy, initial_accumulator=0.0)
    operations = Operations(table, Rows(dims, rule, dtype, threshold), f"{SEED} {rule} {dims}")
    with named_in_failure(lambda: operations.doing):
        for number in range(NUM_OPERATIONS // len(TABLES)):
            operations.step()
            if number % 500 == 0:
                operations.compare_all()
        operations.compare_all()
    if threshold is not None:
        assert {row.row_class for row in operations.model.rows.values()} >= {0, len(dims)}
