"""How `trireme place` sums up what it measured."""

from __future__ import annotations

import pytest
from torch import nn

import trireme as tr
from trireme.place.measuring import PARTS, median_of_parts, num_first_of, rounded, stages_of


def test_a_slow_batch_does_not_change_what_a_batch_takes() -> None:
    values = [1.0] * 10 * PARTS
    values[7] = 100.0
    assert median_of_parts(values) == 1.0


def test_a_machine_that_stops_now_and_then_is_as_slow_as_that_makes_it() -> None:
    """As in a container with a part of a core: the median of all batches would be 1."""
    assert median_of_parts([1.0, 1.0, 1.0, 7.0] * 5 * PARTS) == pytest.approx(2.5)


def test_few_batches_have_a_median_too() -> None:
    assert median_of_parts([3.0]) == 3.0
    assert median_of_parts([1.0, 2.0, 6.0]) == 2.0


def test_measured_numbers_have_six_digits() -> None:
    assert rounded(1.23456789e-5) == 1.23457e-5


def test_workers_that_read_compute_the_stages_with_tables() -> None:
    table = tr.Table("rows", dim=4, optimizer=tr.optim.SGD(lr=0.1))
    bag = tr.nn.EmbeddingBag(table, features=["a"])
    assert num_first_of(stages_of(bag)) == 1  # one stage may be computed elsewhere, with its rows
    assert num_first_of(stages_of(tr.Stages(cpu=bag, gpu=nn.Linear(4, 1)))) == 2
    assert num_first_of(stages_of(tr.Stages(cpu=nn.Linear(4, 4), gpu=nn.Linear(4, 1)))) == 1
