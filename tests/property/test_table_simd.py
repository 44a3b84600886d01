"""Every instruction set computes the same bits: lookups, initial rows, all update rules."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.long import sample
from tests.seeds import SEED, named_in_failure
from tests.tables import (
    INITIALIZERS,
    POOL,
    RULES,
    buckets_of,
    instruction_sets,
    lookup,
    make_table,
    random_keys,
)
from trireme import _core

DIMS = (*range(1, 71), 100, 128)  # whole vectors of all widths, and what is left of them
WITHOUT = instruction_sets()  # instruction set -> why it cannot run here, or ""


def random_values(rng: np.random.Generator, step: int) -> _core.RuleValues:
    bounds = (-0.6, 0.7) if rng.random() < 0.5 else (-np.inf, np.inf)
    return _core.RuleValues(
        lr=rng.choice([0.1, 0.037]),
        weight_decay=rng.choice([0.0, 0.013]),
        eps=rng.choice([1e-10, 1e-5]),
        momentum=rng.choice([0.5, 0.9]),
        dampening=rng.choice([0.0, 0.4]),
        beta=rng.choice([1e-5, 1.0]),
        initial_g2sum=rng.choice([1e-5, 3.0]),
        l1=rng.choice([0.0, 0.3]),
        l2=rng.choice([0.0, 0.1]),
        step=step,
        lower=bounds[0],
        upper=bounds[1],
    )


def run_with(
    simd: str,
    dim: int,
    rule: str,
    initializer: str,
    dtype: str = "float32",
    is_scored: bool = False,
) -> list[bytes]:
    """Lookups after each of some random batches, of rows that are there or not; at last, state."""
    rng = np.random.default_rng([SEED, dim])
    keys = random_keys(rng, 200)
    policy = _core.PolicyConfig(is_scored=is_scored, decay_rate=0.97)
    options = {"dtype": dtype, "policy": policy, **INITIALIZERS[initializer]}
    table = make_table(dim, rule, simd=simd, **options)
    assert table.simd == simd
    actual = [lookup(table, keys).tobytes()]
    for sequence in range(1, 5):
        part = rng.choice(keys, rng.choice([1, 7, 100]))  # some keys twice
        scale = rng.choice([1e-6, 1.0, 1e3], (len(part), 1)).astype(np.float32)
        grads = rng.standard_normal((len(part), dim), np.float32) * scale
        values, shows = random_values(rng, sequence), rng.random((len(part), 2), np.float32)
        columns = {"time": sequence * 300_000, "show_click": shows if is_scored else None}
        table.update(part, grads, [(0, sequence)], values, POOL, **columns)
        actual.append(lookup(table, rng.choice(keys, 300)).tobytes())
    for bucket in np.unique(buckets_of(keys)).tolist():
        content = table.snapshot(bucket)
        actual += [content.keys.tobytes(), content.rows.tobytes()]
    return actual


@pytest.mark.parametrize("simd", [simd for simd in WITHOUT if simd != "scalar"])
def test_an_instruction_set_computes_the_bits_of_scalar_code(simd: str) -> None:
    if WITHOUT[simd]:
        pytest.skip(f"this machine lacks {simd}: {WITHOUT[simd]}")
    combinations: list[tuple[Any, ...]] = [(dim, rule, "uniform") for dim in DIMS for rule in RULES]
    combinations += [(dim, "sgd", name) for dim in DIMS for name in INITIALIZERS]
    combinations += [
        (dim, rule, "normal", dtype)
        for dim in DIMS[::3]
        for rule in ("adagrad", "shared fleet adam")
        for dtype in ("bfloat16", "float16")
    ]
    combinations += [(dim, "adagrad", "uniform", "float32", True) for dim in DIMS[::3]]
    with named_in_failure():
        for combination in sample(combinations, keep=400):
            assert run_with(simd, *combination) == run_with("scalar", *combination), combination


def test_a_table_takes_the_widest_instruction_set_of_the_machine() -> None:
    available = [simd for simd, reason in WITHOUT.items() if not reason]
    assert available[0] == "scalar"
    assert make_table().simd == make_table(simd="auto").simd == available[-1]
