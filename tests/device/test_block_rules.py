"""Rows of a block and of a table of the core have the same bits after the same updates."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

import trireme as tr
from tests.device.blocks import DIMS, PLACES, RULES, Place, Twin
from tests.long import sampled
from trireme.device import RowBlock, SlotBags
from trireme.device.block_statistics import UpdateFacts
from trireme.device.step_values import StepValues, power, powers
from trireme.device.torch_kernels import sum_gradients
from trireme.errors import BadRequest
from trireme.policy import ScorePolicy

DAY_S = 86_400


def train(
    twin: Twin, block: RowBlock, num_steps: int = 5, *, num_ids: int = 30, **changed: object
) -> None:
    """Update a block and a table alike."""
    for _ in range(num_steps):
        slots, grads = twin.draw(num_ids)
        values, bags = twin.values(**changed), SlotBags(slots)
        distinct, sums = bags.occurrences.slots, sum_gradients(grads[:, None], bags)
        block.update(slots.to(block.device), grads.to(block.device), values)
        twin.update_core(distinct, sums, values)


@sampled(keep=70)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("place", PLACES)
def test_a_rule_changes_rows_as_in_the_core(place: Place, name: str, dim: int) -> None:
    twin = Twin(RULES[name], dim=dim, num_rows=6 if place.is_interpreted else 40)
    block = twin.block(place)
    before = block.raw_rows()
    train(twin, block, 3, num_ids=8 if place.is_interpreted else 30)
    np.testing.assert_array_equal(block.raw_rows(), twin.raw_rows())
    assert (block.raw_rows() != before).any()


@pytest.mark.parametrize("name", [name for name in RULES if name != "count"])
def test_every_value_of_a_rule_has_an_effect(name: str) -> None:
    rule = RULES[name]
    for changed in changes(rule):
        twin = Twin(rule)
        block, unchanged = twin.block(), twin.block()
        train(twin, block, 3, **changed)
        same = Twin(rule)
        train(same, unchanged, 3)
        np.testing.assert_array_equal(block.raw_rows(), twin.raw_rows())
        assert (block.raw_rows() != unchanged.raw_rows()).any(), changed


def changes(rule: tr.optim.Rule) -> list[dict[str, object]]:
    """Another value for each value that a push carries."""
    own = {f.name for f in dataclasses.fields(rule)} & rule.group().keys()
    other = {
        "lr": rule.lr / 3,
        "bounds": (-0.1, 0.05),
        "betas": (0.5, 0.7),
        "eps": 0.1,
        "beta": 3.0,
        "l1": 0.7,
        "l2": 0.9,
        "initial_g2sum": 0.5,
        "momentum": 0.5,
        "dampening": 0.6,
    }
    if type(rule) in (tr.optim.SGD, tr.optim.Adagrad, tr.optim.Adam):
        other["weight_decay"] = 0.5
    return [{name: other[name]} for name in sorted(own & other.keys())]


def test_ftrl_without_a_rate_changes_nothing() -> None:
    twin = Twin(RULES["ftrl"])
    block = twin.block()
    before = block.tensors.weights.clone()
    train(twin, block, 1, lr=0.0)
    assert torch.equal(block.tensors.weights, before)
    np.testing.assert_array_equal(block.raw_rows(), twin.raw_rows())


def test_counts_saturate_as_in_the_core() -> None:
    twin = Twin(RULES["row adam"], num_rows=3)
    block = twin.block()
    full = np.array([-2, -1, 0x7FFFFFFE], np.int32)
    rows = block.raw_rows()
    block.layout.wide.state(rows)[:, -1] = full.view(np.float32)
    block = RowBlock(block.layout, rows)
    for _ in range(2):
        block.update(torch.arange(3, dtype=torch.int32), torch.ones(3, 5), twin.values())
    counts = block.tensors.state[:, -1].contiguous().view(torch.int32)
    assert counts.tolist() == [-1, -1, -(2**31)]


def test_a_row_that_is_not_finite_stays_so() -> None:
    twin = Twin(RULES["adagrad"], num_rows=2)
    block = twin.block()
    slots = torch.arange(2, dtype=torch.int32)
    grads = torch.tensor([[torch.nan] * 5, [torch.inf] * 5])
    values = twin.values(bounds=(-1.0, 1.0))
    block.update(slots, grads, values)
    twin.update_core(slots, grads, values)
    assert block.tensors.weights.isnan().all()
    assert np.isnan(block.layout.wide.weights(twin.raw_rows())).all()


@pytest.mark.parametrize("decay_rate", [1.0, 0.98])
def test_statistics_change_as_in_the_core(decay_rate: float) -> None:
    policy = ScorePolicy(decay_rate=decay_rate, nonclk_coeff=0.3, click_coeff=1.7)
    twin = Twin(RULES["sgd"], policy=policy)
    block = twin.block()
    times = [0, 5 * DAY_S, 5 * DAY_S + 7, 3 * DAY_S, 90 * DAY_S, 2**31 + 9, 1, 2**32 - 1]
    for number, time in enumerate(times):
        slots, grads = twin.draw()
        bags = SlotBags(slots)
        distinct, sums = bags.occurrences.slots, sum_gradients(grads[:, None], bags)
        shows = torch.from_numpy(twin.rng.random((len(distinct), 2), np.float32))
        features = torch.full((len(distinct),), number - 3, dtype=torch.int32)
        facts = UpdateFacts(time, 2**32 - 9 + number, shows, None if number % 2 else features)
        values = twin.values()
        block.update(slots, grads, values, facts)
        twin.update_core(distinct, sums, values, facts)
        np.testing.assert_array_equal(block.raw_rows(), twin.raw_rows())
    assert block.is_changed.sum() > 0


def test_shows_are_wanted_for_scored_tables_alone() -> None:
    slots, grads = torch.zeros(1, dtype=torch.int32), torch.ones(1, 5)
    scored, plain = Twin(RULES["sgd"], policy=ScorePolicy()), Twin(RULES["sgd"])
    for twin, facts in ((scored, None), (plain, UpdateFacts(show_click=torch.ones(1, 2)))):
        block = twin.block()
        before = block.raw_rows()
        with pytest.raises(BadRequest, match="show_click"):
            block.update(slots, grads, twin.values(), facts)
        np.testing.assert_array_equal(block.raw_rows(), before)


def test_powers_are_those_of_the_core() -> None:
    exponents = [0, 1, 2, 3, 1000, 2**20 + 7, 2**32 - 1]
    expected = [power(0.999, exponent) for exponent in exponents]
    assert powers(0.999, torch.tensor(exponents)).tolist() == expected
    steps = StepValues.of(Twin(RULES["adam"]).values()).step_sizes(torch.tensor([1, 2, 10**6]))
    assert steps.shape == (3, 1)
