"""Rows under Fleet's update rules equal those that Paddle 2.6.2 pulled, batch by batch.

The files were written under Paddle by benchmarks/paddle/rows.py --batches 24 --batch 8 --features 4
--dim 3; `make bench BENCH=fleet RIVAL=paddle` compares 100 batches of Criteo's shape.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.macro.fleet_rows import distances_of
from benchmarks.paddle.rows import RULES, Shape

FOLDER = Path(__file__).with_name("fleet_rows")
SHAPE = Shape(batches=24, batch=8, features=4, dim=3)


@pytest.mark.parametrize("rule", RULES)
def test_rows_follow_paddles(rule):
    paddle_rows = np.load(FOLDER / f"{rule}.npz")["rows"]
    assert paddle_rows.shape == (24, 8, 4, 3)
    assert np.abs(paddle_rows[-1]).max() > 1e-3
    distances = distances_of(rule, FOLDER / "data.txt", SHAPE, paddle_rows)
    assert distances.max() < 1e-5, distances


def test_another_rule_does_not_follow():
    paddle_rows = np.load(FOLDER / "adagrad.npz")["rows"]
    assert distances_of("std_adagrad", FOLDER / "data.txt", SHAPE, paddle_rows).max() > 1e-4
