"""The sample of a product of cases that `make test` runs (tests/long.py)."""

from __future__ import annotations

from collections.abc import Set
from itertools import product
from random import Random

from tests.long import draw

CASES: list[Set[str]] = [set(case) for case in product("abcdefgh", "123", "xy")]


def test_a_sample_has_every_value_and_the_size_that_was_asked_for() -> None:
    for seed in range(20):
        sample = draw(CASES, 12, Random(seed))
        assert len(sample) == 12
        assert set().union(*(CASES[index] for index in sample)) == set("abcdefgh123xy")


def test_a_sample_is_larger_where_its_values_would_not_fit() -> None:
    assert len(draw(CASES, 3, Random(1))) == 8


def test_a_sample_depends_on_the_seed_alone() -> None:
    assert draw(CASES, 12, Random(1)) == draw(CASES, 12, Random(1))
    assert draw(CASES, 12, Random(1)) != draw(CASES, 12, Random(2))


def test_no_sample_is_larger_than_the_product() -> None:
    assert draw(CASES, 1000, Random(1)) == set(range(len(CASES)))
