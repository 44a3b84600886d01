"""Initial weights of a row: a pure function of (seed, key, position in the row)."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import pytest

from tests.tables import (
    INITIALIZERS,
    MASK,
    POOL,
    RULES,
    keys_of,
    lookup,
    make_table,
    mix64,
    random_keys,
)
from trireme import _core

RNG = np.random.default_rng(0)
KEYS = random_keys(RNG, 20_000)

# Bits of the first five weights with seed 7. They may never change: rows that no checkpoint holds,
# because they were not pushed yet, must start the same for ever.
GOLDEN = {
    "uniform": {
        0x0: "3e59b950 3e239980 3e340d1c bee8313c 3d3cc1f0",
        0x1: "be78b694 be978a60 bee64b42 bee9a0a8 be91aca1",
        0x8000000000000000: "3e684964 3e7d3890 bec80530 3e5d2e44 3d6c4660",
        0xFFFFFFFFFFFFFFFF: "bdf30848 beb53ee8 3d09a290 bc0193e0 bef11570",
    },
    "normal": {
        0x0: "3f544bf6 3f3c144c 3f41f0ab 3e44f9b8 3f1f1585",
        0x1: "3ed68d10 3ec1e01c 3e4d03a2 3e3e8f25 3ec6869f",
        0x8000000000000000: "3f5fa513 3f84c141 3e93ff98 3f569f60 3f21819a",
        0xFFFFFFFFFFFFFFFF: "3f011566 3ea7da81 3f1c8dac 3f1493cd 3e16ae30",
    },
}


def bits_of(seed: int, key: int, position: int) -> int:
    golden = 0x9E3779B97F4A7C15
    row = mix64(key ^ mix64((seed + golden) & MASK))
    return mix64((row + (position + 1) * golden) & MASK)


@pytest.mark.parametrize("initializer", GOLDEN)
def test_golden_bits(initializer: str) -> None:
    for key, expected in GOLDEN[initializer].items():
        table = make_table(5, seed=7, **INITIALIZERS[initializer])
        actual = lookup(table, keys_of(key)).view(np.uint32)[0]
        assert [f"{bits:08x}" for bits in actual] == expected.split()


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
def test_uniform_weights_are_those_of_the_definition(seed: int) -> None:
    low, width = np.float32(-0.5), np.float32(0.75)
    keys = KEYS[:50]
    expected = [
        [low + width * np.float32((bits_of(seed, int(key), j) >> 40) / 2**24) for j in range(7)]
        for key in keys
    ]
    np.testing.assert_array_equal(lookup(make_table(7, seed=seed), keys), np.float32(expected))


def test_normal_weights_are_quantiles_of_uniform_numbers() -> None:
    normal = NormalDist(0.5, 0.2)
    keys = KEYS[:300]
    expected = [
        [normal.inv_cdf(((bits_of(3, int(key), j) >> 32) + 0.5) / 2**32) for j in range(7)]
        for key in keys
    ]
    actual = lookup(make_table(7, seed=3, **INITIALIZERS["normal"]), keys)
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-7)


def test_uniform_weights_fill_their_range_evenly() -> None:
    weights = lookup(make_table(64, init_a=-0.5, init_b=0.25), KEYS).astype(np.float64).ravel()
    assert weights.min() >= -0.5
    assert weights.max() < 0.25
    counts, _ = np.histogram(weights, 100, (-0.5, 0.25))
    expected = len(weights) / 100
    # Chi square with 99 degrees of freedom: above 160 once in 10,000 times; seeds are fixed.
    assert ((counts - expected) ** 2 / expected).sum() < 160


def test_normal_weights_have_mean_deviation_and_tails_of_the_normal_distribution() -> None:
    weights = lookup(make_table(64, initializer="normal", init_a=2.0, init_b=3.0), KEYS)
    z = np.sort((weights.astype(np.float64).ravel() - 2.0) / 3.0)
    n = len(z)
    assert abs(z.mean()) < 4 / n**0.5
    assert abs(z.std() - 1) < 4 / (2 * n) ** 0.5
    assert abs((z**3).mean()) < 4 * (15 / n) ** 0.5
    assert abs((z**4).mean() - 3) < 4 * (96 / n) ** 0.5
    normal = NormalDist()
    steps = np.linspace(-4.5, 4.5, 91)
    actual = np.searchsorted(z, steps) / n
    expected = np.array([normal.cdf(step) for step in steps])
    assert np.abs(actual - expected).max() < 2 / n**0.5  # Kolmogorov and Smirnov: 1.95 at 0.1 %
    assert 4.5 < np.abs(z).max() < 6.5


def test_neighbouring_keys_positions_and_seeds_are_independent() -> None:
    keys = np.arange(20_000, dtype=np.uint64)
    rows = lookup(make_table(2, init_a=-1.0, init_b=1.0), keys)
    there = lookup(make_table(2, init_a=-1.0, init_b=1.0, seed=2), keys)
    pairs = [(rows[:-1], rows[1:]), (rows[:, 0], rows[:, 1]), (rows, there)]
    for a, b in pairs:
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 4 / 20_000**0.5


def test_constant_weights_are_the_constant() -> None:
    assert (lookup(make_table(9, **INITIALIZERS["constant"]), KEYS) == 0.75).all()


def test_absent_keys_answer_zeros_if_so_declared() -> None:
    table = make_table(absent="zeros")
    assert (lookup(table, KEYS[:100]) == 0).all()
    table.update(KEYS[:1], np.zeros((1, 4), np.float32), [(0, 1)], _core.RuleValues(lr=1.0), POOL)
    actual = lookup(table, KEYS[:2])
    np.testing.assert_array_equal(actual[0], lookup(make_table(), KEYS[:1])[0])
    assert (actual[1] == 0).all()


@pytest.mark.parametrize(
    "change",
    [{"seed": 2}, {"init_a": -0.4}, {"init_b": 0.3}, INITIALIZERS["normal"], {"absent": "zeros"}],
    ids=str,
)
def test_every_option_changes_the_initial_weights(change: dict[str, object]) -> None:
    assert (lookup(make_table(), KEYS) != lookup(make_table(**change), KEYS)).any()


@pytest.mark.parametrize(
    ("initializer", "field"), [("normal", "init_a"), ("normal", "init_b"), ("constant", "init_a")]
)
def test_every_parameter_changes_the_initial_weights(initializer: str, field: str) -> None:
    options = INITIALIZERS[initializer]
    changed = {**options, field: options[field] + 0.1}
    assert (lookup(make_table(**options), KEYS) != lookup(make_table(**changed), KEYS)).any()


@pytest.mark.parametrize("initializer", INITIALIZERS)
def test_initial_weights_depend_on_nothing_but_seed_and_key(initializer: str) -> None:
    """Not on the order or number of keys in a call, threads, other tables, or rows there are."""
    options = INITIALIZERS[initializer]
    table = make_table(6, **options)
    expected = lookup(table, KEYS)
    order = RNG.permutation(len(KEYS))
    for pool in (_core.Pool(1), _core.Pool(4)):
        np.testing.assert_array_equal(lookup(table, KEYS[order], pool), expected[order])
    one_by_one = [lookup(table, KEYS[i : i + 1])[0] for i in range(50)]
    np.testing.assert_array_equal(one_by_one, expected[:50])
    wider = lookup(make_table(9, **options), KEYS)
    np.testing.assert_array_equal(wider[:, :6], expected, err_msg="not on the dim")
    others = [make_table(6, **options) for _ in range(3)]  # as three servers would share the keys
    for i, other in enumerate(others):
        np.testing.assert_array_equal(lookup(other, KEYS[i::3].copy()), expected[i::3])


@pytest.mark.parametrize("rule", RULES)
def test_a_new_row_has_the_weights_that_were_looked_up_before(rule: str) -> None:
    table = make_table(6, rule)
    before = lookup(table, KEYS)
    values = _core.RuleValues(lr=0.0)
    table.update(KEYS[::-1].copy(), np.ones((len(KEYS), 6), np.float32), [(0, 1)], values, POOL)
    assert table.rows == len(KEYS)
    expected = before + 1 if rule == "count" else before
    np.testing.assert_array_equal(lookup(table, KEYS), expected)
