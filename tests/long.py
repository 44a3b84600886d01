"""How much a test tries: a little in every run, everything with TRIREME_TEST_LONG=1 (`make long`).

`sampled` and `sample` keep a part of a large product of cases. It is drawn anew in every run;
pytest's header shows the seed, and TRIREME_TEST_SEED repeats it. tests/conftest.py reads the marks.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from collections.abc import Set as AbstractSet
from random import Random, SystemRandom
from typing import TypeVar

import pytest

T = TypeVar("T")

IS_LONG = os.environ.get("TRIREME_TEST_LONG") == "1"

# Processes of pytest-xdist inherit the seed, so all of them draw the same sample.
SAMPLE_SEED = os.environ.setdefault(
    "TRIREME_TEST_SAMPLE", os.environ.get("TRIREME_TEST_SEED", str(SystemRandom().randrange(10**6)))
)


def pick(*, short: T, long: T) -> T:
    """One of two sizes of a test."""
    return long if IS_LONG else short


def sampled(*, keep: int) -> pytest.MarkDecorator:
    """Mark a parametrized test: `make test` runs about `keep` of its cases, `make long` all.

    Each value of each `parametrize` runs at least once, so `keep` may be exceeded.
    """
    return pytest.mark.sampled(keep=keep)


def sample(cases: Sequence[tuple[Hashable, ...]], *, keep: int) -> list[tuple[Hashable, ...]]:
    """About `keep` of the cases of a test; every value of every position is among them."""
    if IS_LONG:
        return [*cases]
    chosen = draw([set(enumerate(case)) for case in cases], keep, Random(SAMPLE_SEED))
    return [case for index, case in enumerate(cases) if index in chosen]


def draw(cases: Sequence[AbstractSet[Hashable]], keep: int, random: Random) -> set[int]:
    """Indices of a sample in which every value of every case occurs.

    cases: the values of each case.
    """
    order = random.sample(range(len(cases)), len(cases))
    missing = set().union(*cases)
    chosen: list[int] = []
    while missing:
        best = max(order, key=lambda index: len(missing & cases[index]))
        missing -= cases[best]
        chosen.append(best)
    rest = [index for index in order if index not in set(chosen)]
    return {*chosen, *rest[: max(0, keep - len(chosen))]}
