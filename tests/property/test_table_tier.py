"""A table whose rows are mostly on SSD equals a plain dict under random operations, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from tests.long import IS_LONG, pick
from tests.property.table_life import Policy
from tests.property.table_model import RULES as RULES_OF_MODEL
from tests.property.table_model import Model
from tests.property.table_operations import SIZES, NumKeys, Operations
from tests.seeds import SEED, named_in_failure
from tests.tables import RULES, make_table
from trireme import _core

NUM_OPERATIONS = pick(short=240, long=5000)
OPERATIONS_PER_FILL = 120
"""Each so often all keys are pushed, for other operations take rows away."""
NUM_KEYS = NumKeys(anywhere=9000, crowded=15, alike=2)
ROW_FLOATS = 900
"""Of weights and state: 3 % of the rows are about what calls of this test need room for."""
ROOM_BYTES_MIN = 1 << 20
SHARES = (1.0, 0.3, 0.1, 0.03)
POLICIES = [
    Policy(),
    Policy(ttl_s=400_000),
    Policy(max_rows=30),
    Policy(
        is_scored=True,
        nonclk_coeff=0.2,
        click_coeff=1.5,
        decay_rate=0.9,
        delete_threshold=0.6,
        delete_after_unseen_days=20,
    ),
]


@dataclass(frozen=True)
class Tiered:
    """share: of all rows, for which memory has room. num_folders: on SSD."""

    rule: str
    policy: Policy
    share: float
    io: str
    num_folders: int


def _drawn() -> list[Tiered]:
    """Every rule, and of all shares, policies and devices some with each."""
    random = Random(f"{SEED} tiers")
    rules = sorted(RULES) * (4 if IS_LONG else 1)
    shares, policies = SHARES * len(rules), POLICIES * len(rules)
    return [
        Tiered(
            rule,
            random.choice(policies) if number >= len(POLICIES) else policies[number],
            shares[number],
            random.choice(("io_uring", "threads")),
            random.choice((1, 2)),
        )
        for number, rule in enumerate(random.sample(rules, len(rules)))
    ]


def make_tiered(tiered: Tiered, folder: Path, dim: int, **options: Any) -> _core.Table:
    """With memory for this share of the rows, beside what it takes without any."""
    paths = [folder / f"ssd-{number}" for number in range(tiered.num_folders)]
    for path in paths:
        path.mkdir()
    options |= {"segment_bytes": 1 << 20, "buffer_bytes": 1 << 16, "read_bytes": 1 << 17}
    options["ssd"] = [_core.SsdDevice(str(path), tiered.io) for path in paths]
    empty = make_table(dim, tiered.rule, memory_bytes=1 << 30, **options)
    own, row_bytes = empty.tier["own_bytes"], empty.row_bytes
    del empty
    room = int(NUM_KEYS.anywhere * row_bytes * 1.1 * tiered.share)
    memory = own + max(room, ROOM_BYTES_MIN)
    return make_table(dim, tiered.rule, memory_bytes=memory, **options)


@pytest.mark.parametrize("tiered", _drawn(), ids=str)
def test_a_table_with_rows_on_ssd_equals_a_dict(tiered: Tiered, tmp_path: Path) -> None:
    _, per_weight, per_row = RULES_OF_MODEL[tiered.rule]
    dim = (ROW_FLOATS - per_row) // (1 + per_weight)
    table = make_tiered(tiered, tmp_path, dim, policy=tiered.policy.config())
    accumulator = RULES[tiered.rule].get("initial_accumulator", 0.0)
    model = Model(dim, tiered.rule, accumulator=accumulator, policy=tiered.policy)
    operations = Operations(table, model, f"{SEED} {tiered}", num_keys=NUM_KEYS)
    operations.sizes = SIZES[:4]  # a push needs room for its rows
    keys = np.array(sorted({key for kind in operations.kinds for key in kind}), np.uint64)
    on_ssd = 0.0
    with named_in_failure(lambda: operations.doing):
        for number in range(NUM_OPERATIONS):
            if number % OPERATIONS_PER_FILL == 0:
                operations.doing = f"push {number} of all keys"
                for some in np.array_split(operations.rng.permutation(keys), 60):
                    operations.update(some)
            operations.step()
            assert table.bytes <= table.tier["memory_bytes"]
            on_ssd = max(on_ssd, table.tier["rows"] / max(len(model.rows), 1))
        operations.compare_all()
    assert on_ssd > 0.4 or tiered.share == 1.0
