"""Wide rows into a table, and rows of a block: what the core's calls refuse, and what they leave
alone. What they do is compared with models in core/tests/block_test.cc.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.tables import POOL, make_table, random_keys
from trireme import _core
from trireme.errors import BadRequest

KEYS = random_keys(np.random.default_rng(3), 6)


def wide_rows(table: _core.Table) -> tuple[np.ndarray, np.ndarray]:
    """Row classes, and rows whose weights are 1, 2, ..."""
    rows = np.zeros((len(KEYS), table.row_bytes), np.uint8)
    rows[:, :4].view(np.float32)[:, 0] = np.arange(1, len(KEYS) + 1)
    return np.zeros(len(KEYS), np.uint8), rows


def test_written_rows_leave_marks_and_removed_keys_alone() -> None:
    table, others = make_table(), np.arange(100, 106, dtype=np.uint64)
    table.update(others, np.ones((len(KEYS), 4), np.float32), [(0, 5)], VALUES, POOL, version=3)
    table.raise_version(4)
    table.erase(others[:1], POOL)
    classes, rows = wide_rows(table)
    table.write_wide(KEYS, classes, rows, POOL, is_stamped=True)
    weights = np.empty((len(KEYS), 4), np.float32)
    table.lookup(KEYS, weights, POOL)
    assert weights[:, 0].tolist() == [1, 2, 3, 4, 5, 6]
    assert set(table.marks(0).tolist()) == {5}
    assert table.rows == 2 * len(KEYS) - 1
    changed = [table.snapshot(bucket, 3) for bucket in range(_core.NUM_BUCKETS)]
    assert {k for one in changed for k in one.keys.tolist()} == set(KEYS.tolist())
    assert [k for one in changed for k in one.removed.tolist()] == others[:1].tolist()


VALUES = _core.RuleValues(lr=0.1)
BLOCK = (
    np.zeros((3, 4), np.float32),
    np.zeros((3, 4), np.float32),
    np.zeros((3, 2), np.int32),
    np.zeros((0, 2)),
    np.zeros(0, np.float32),
    np.zeros(0, np.int32),
)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"slots": np.array([0, 3], np.int32)}, r"slots in \[0, 3\), found 3"),
        ({"slots": np.array([-1, 0], np.int32)}, r"slots in \[0, 3\), found -1"),
        ({"slots": np.zeros(1, np.int32)}, "as many gradients as slots: 1, found 2"),
        ({"grads": np.zeros((2, 3), np.float32)}, "gradients of dim 4, found 3"),
        ({"show_click": np.zeros((2, 2), np.float32)}, "as the table is scored: 0, found 1"),
        ({"row_class": 1}, "a row class of float32 weights, found 1"),
        *(
            ({"block": (*BLOCK[:i], wrong, *BLOCK[i + 1 :])}, reason)
            for i, wrong, reason in [
                (0, np.zeros((3, 5), np.float32), "weights of dim 4, found 5"),
                (1, np.zeros((2, 4), np.float32), "rows of state: 3, found 2"),
                (2, np.zeros((2, 2), np.int32), "stamps: 3, found 2"),
                (3, np.zeros((3, 2)), "shows: 0, found 3"),
            ]
        ),
    ],
)
def test_an_update_of_a_block_that_does_not_fit_is_refused(
    changed: dict[str, Any], reason: str
) -> None:
    arguments: dict[str, Any] = {
        "block": BLOCK,
        "slots": np.array([0, 1], np.int32),
        "grads": np.ones((2, 4), np.float32),
        "values": VALUES,
        "pool": POOL,
        "row_class": 0,
        "time": 0,
        "version": 1,
        "show_click": None,
        "features": None,
        **changed,
    }
    with pytest.raises(BadRequest, match=reason):
        make_table(rule="adagrad").update_block(**arguments)
    assert not any(part.any() for part in BLOCK)


@pytest.mark.parametrize("part", range(6))
def test_parts_of_a_block_are_never_converted(part: int) -> None:
    block = list(BLOCK)
    block[part] = block[part].astype(np.int64)
    slots, out = np.array([0], np.int32), np.empty((1, 4), np.float32)
    with pytest.raises(TypeError):
        make_table(rule="adagrad").block_weights(tuple(block), slots, out, POOL, 0)


@pytest.mark.parametrize("call", ["write_wide", "check_wide"])
def test_wide_rows_that_do_not_fit_are_refused(call: str) -> None:
    table = make_table()
    classes, rows = wide_rows(table)
    for keys, other_classes, other_rows, reason in (
        (KEYS[:5], classes, rows, "one class per key"),
        (KEYS, classes, rows[:5], "as many rows as keys"),
        (KEYS, classes, np.zeros((6, 3), np.uint8), "rows of bytes"),
        (KEYS, np.ones(6, np.uint8), rows, "rows of a class"),
    ):
        with pytest.raises(BadRequest, match=reason):
            getattr(table, call)(keys, other_classes, other_rows, POOL)
    assert table.rows == 0
