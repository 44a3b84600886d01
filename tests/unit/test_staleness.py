"""How a histogram of staleness is printed."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from trireme.train.loop.staleness import described


def test_quantiles_are_the_least_values_that_so_many_do_not_exceed() -> None:
    histogram = Counter({0: 50, 1: 48, 3: 1, 7: 1})
    assert described(histogram) == (
        "staleness of 100 pushes at servers: 0 at 50 %, 3 at 99 %, 7 at 100 %"
    )
    assert "no pushes" in described(Counter())


@pytest.mark.parametrize("seed", range(5))
def test_quantiles_equal_those_of_numpy(seed: int) -> None:
    values = np.random.default_rng(seed).integers(0, 40, size=1 + 100 * seed)
    expected = [np.quantile(values, part, method="inverted_cdf") for part in (0.5, 0.99, 1)]
    actual = described(Counter(values.tolist())).split(": ")[1].split(", ")
    assert [int(text.split()[0]) for text in actual] == expected
