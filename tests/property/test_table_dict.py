"""A table equals a plain dict under random operations, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest

from tests.long import pick
from tests.property.table_life import Policy
from tests.property.table_model import Model
from tests.property.table_operations import Operations
from tests.seeds import SEED, named_in_failure
from tests.tables import RULES, make_table

NUM_OPERATIONS = pick(short=20_000, long=500_000)
FADING = Policy(
    is_scored=True,
    nonclk_coeff=0.2,
    click_coeff=1.5,
    decay_rate=0.9,
    delete_threshold=0.6,
    delete_after_unseen_days=20,
)
# (rule, dim, options)
TABLES: list[tuple[str, int, dict[str, Any]]] = [
    ("sgd", 4, {}),
    ("sgd", 1, {"absent": "zeros"}),
    ("adagrad", 16, {}),
    ("adagrad", 9, {"initial_accumulator": 0.0, "simd": "scalar"}),
    ("shared adagrad", 21, {"initial_accumulator": 0.5}),
    ("adam", 8, {"absent": "zeros"}),
    ("row adam", 5, {}),
    ("momentum", 6, {}),
    ("nesterov", 17, {}),
    ("shared adam", 10, {}),
    ("ftrl", 7, {}),
    ("fleet sgd", 4, {}),
    ("shared fleet adagrad", 9, {}),
    ("fleet adagrad v2", 9, {}),
    ("fleet adam", 9, {}),
    ("shared fleet adam", 9, {}),
    ("count", 3, {"simd": "scalar"}),
    ("adagrad", 3, {"policy": FADING}),
    ("sgd", 4, {"policy": FADING, "simd": "scalar"}),
    ("fleet adam", 2, {"policy": Policy(ttl_s=400_000)}),
    ("adagrad", 5, {"policy": Policy(max_rows=30)}),
    ("adam", 2, {"policy": Policy(is_scored=True, decay_rate=0.5, max_rows=9, ttl_s=900_000)}),
]


@pytest.mark.parametrize(("rule", "dim", "options"), TABLES, ids=str)
def test_a_table_equals_a_dict(rule: str, dim: int, options: dict[str, Any]) -> None:
    options = dict(options)
    policy = options.pop("policy", Policy())
    table = make_table(dim, rule, policy=policy.config(), **options)
    model = Model(
        dim,
        rule,
        accumulator={**RULES[rule], **options}.get("initial_accumulator", 0.0),
        absent=options.get("absent", "initial"),
        policy=policy,
    )
    operations = Operations(table, model, f"{SEED} {rule} {dim}")
    with named_in_failure(lambda: operations.doing):
        for _ in range(NUM_OPERATIONS // len(TABLES)):
            operations.step()
        operations.compare_all()
    if policy.max_rows is not None:
        assert model.life.counters["evicted"] > 0
    if policy.ttl_s is not None or policy.is_scored:
        assert model.life.counters["expired"] > 0
