"""A column store equals a plain list of examples under random operations."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest

from tests.example_lists import Example, batch_of, examples_of, random_examples, random_schema
from tests.long import pick
from tests.seeds import SEED, named_in_failure
from trireme import _core
from trireme.data.column_layout import ColumnLayout

MASK = (1 << 64) - 1
NUM_OPERATIONS = 25


def mix64(x: int) -> int:
    """splitmix64's finalizer."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def randoms(seed: int) -> Any:
    while True:
        seed = (seed + 0x9E3779B97F4A7C15) & MASK
        yield mix64(seed)


def permutation(size: int, seed: int) -> list[int]:
    """Fisher and Yates."""
    order, numbers = list(range(size)), randoms(seed)
    for i in range(size, 1, -1):
        j = next(numbers) % i
        order[i - 1], order[j] = order[j], order[i - 1]
    return order


class Pair:
    """The store and the list that it must equal."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.schema = random_schema(random)
        self.has_weights = random.random() < 0.5 and bool(self.schema.sparse)
        self.layout = ColumnLayout(self.schema)
        self.store = self.layout.new_store(has_weights=self.has_weights)
        self.model: list[Example] = []
        self.pool = _core.Pool(random.randint(1, 3))
        self.doing = "nothing yet"

    def step(self) -> None:
        operation = self.random.choice([self.append, self.append, self.shuffle, self.deal])
        self.doing = f"{operation.__name__} with {self.schema}"
        operation()
        self.compare()

    def append(self) -> None:
        examples = random_examples(
            self.random, self.schema, self.random.randint(0, 60), has_weights=self.has_weights
        )
        batch = batch_of(self.schema, examples)
        if self.has_weights and batch.bags is not None and batch.bags.weights is None:
            return  # not one value: nothing to see the weights by
        self.layout.append(self.store, batch, self.pool)
        self.model += examples

    def shuffle(self) -> None:
        """All columns, or some of them as slots_shuffle does."""
        names = list(self.schema.names)
        if self.random.random() < 0.5:
            names = self.random.sample(names, self.random.randint(1, len(names)))
        seed = self.random.getrandbits(64)
        self.store.shuffle(seed, self.layout.numbers_of(names), self.pool)
        order = permutation(len(self.model), seed)
        moved = [{name: self.model[row][name] for name in names} for row in order]
        self.model = [{**old, **new} for old, new in zip(self.model, moved, strict=True)]

    def deal(self) -> None:
        """Take the first chunks, split them, and append the pieces in another order."""
        taken = self.store.take_chunks(self.random.randint(0, 3))
        rows, self.model = self.model[: taken.num_rows], self.model[taken.num_rows :]
        assert self.examples(taken) == rows
        num_parts, seed = self.random.randint(1, 4), self.random.getrandbits(64)
        parts = taken.random_parts(seed, num_parts)
        numbers = randoms(seed)
        assert parts.tolist() == [next(numbers) % num_parts for _ in rows]
        pieces = taken.split(parts, num_parts, self.pool)
        for part in self.random.sample(range(num_parts), num_parts):
            self.store.append_piece(pieces[part])
            self.model += [
                row for row, owner in zip(rows, parts.tolist(), strict=True) if owner == part
            ]

    def compare(self) -> None:
        assert self.store.num_rows == len(self.model)
        assert self.examples(self.store) == self.model
        begin = self.random.randint(0, len(self.model))
        end = self.random.randint(begin, len(self.model))
        batch = self.layout.batch(self.store, begin, end, self.pool)
        assert examples_of(self.schema, batch) == self.model[begin:end]

    def examples(self, store: _core.ColumnStore) -> list[Example]:
        return examples_of(self.schema, self.layout.batch(store, 0, store.num_rows, self.pool))


@pytest.mark.parametrize("number", range(pick(short=4, long=12)))
def test_a_column_store_equals_a_list_of_examples(number: int) -> None:
    pair = Pair(Random(f"{SEED} {number}"))
    with named_in_failure(lambda: pair.doing):
        for _ in range(NUM_OPERATIONS):
            pair.step()


def test_keys_and_places_do_not_depend_on_threads() -> None:
    random = Random(SEED)
    schema = random_schema(random)
    batch = batch_of(schema, random_examples(random, schema, 500, has_weights=False))
    layout, pieces = ColumnLayout(schema), []
    for threads in (1, 2, 4):
        store, pool = layout.new_store(has_weights=False), _core.Pool(threads)
        layout.append(store, batch, pool)
        store.shuffle(7, layout.all_numbers, pool)
        pieces.append(store.split(store.random_parts(3, 5), 5, pool))
    for others in pieces[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(pieces[0], others, strict=True))
