"""Blocks on servers compute what torch.optim computes on whole parameters."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trireme.errors import BadRequest, SchemaMismatch, UnknownTable
from trireme.ps.blocks import ELEMENTWISE, BlockStore, cut, group_values, optimizer_spec

NUM_ELEMENTS = 1000
BLOCK = 96
STEPS = 20

CONFIGURATIONS = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    ("Adam", {"lr": 0.01}),
    ("Adam", {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1, "betas": (0.8, 0.99)}),
    ("AdamW", {"lr": 0.01}),
    ("Adagrad", {"lr": 0.05, "initial_accumulator_value": 0.1, "lr_decay": 0.01}),
    ("Adadelta", {}),
    ("Adamax", {"lr": 0.01}),
    ("NAdam", {"lr": 0.01}),
    ("RAdam", {"lr": 0.01}),
    ("RMSprop", {"lr": 0.01, "momentum": 0.9, "centered": True}),
    ("Rprop", {"lr": 0.01}),
    ("ASGD", {"lr": 0.01}),
    ("AdamD2Sum", {"lr": 0.01}),
]


def gradients(step: int) -> np.ndarray:
    return np.random.default_rng(step).normal(size=NUM_ELEMENTS).astype(np.float32)


def initial() -> np.ndarray:
    return np.random.default_rng(99).normal(size=NUM_ELEMENTS).astype(np.float32)


def run_blocks(name: str, options: dict, block: int) -> np.ndarray:
    optimizer = ELEMENTWISE[name]([torch.zeros(1, requires_grad=True)], **options)
    groups = [group_values(group, optimizer.defaults) for group in optimizer.param_groups]
    store = BlockStore()
    specs = cut("p", NUM_ELEMENTS, 0, block)
    store.create(optimizer_spec(optimizer), groups, specs, initial(), {})
    ids = [spec.id for spec in specs]
    for step in range(1, STEPS + 1):
        assert store.apply(groups, ids, gradients(step), [(0, step)]) == len(specs)
    return store.read(ids)


@pytest.mark.parametrize(("name", "options"), CONFIGURATIONS)
def test_blocks_equal_the_whole_parameter_in_bits_and_torch_closely(
    name: str, options: dict
) -> None:
    whole, cut_up = run_blocks(name, options, NUM_ELEMENTS), run_blocks(name, options, BLOCK)
    np.testing.assert_array_equal(cut_up, whole)
    parameter = torch.nn.Parameter(torch.from_numpy(initial()))
    optimizer = ELEMENTWISE[name]([parameter], **options)
    for step in range(1, STEPS + 1):
        parameter.grad = torch.from_numpy(gradients(step))
        optimizer.step()
    # The servers take torch's fused kernel where there is one: same formula, other rounding.
    np.testing.assert_allclose(whole, parameter.detach().numpy(), atol=2e-6, rtol=0)


def test_every_elementwise_optimizer_is_tested() -> None:
    assert {name for name, _ in CONFIGURATIONS} == set(ELEMENTWISE)


def test_values_of_the_step_travel_with_it() -> None:
    store = BlockStore()
    specs = cut("p", 4, 0)
    store.create("SGD", [{"lr": 1.0}], specs, np.zeros(4, dtype=np.float32), {})
    store.apply([{"lr": 0.5}], [specs[0].id], np.ones(4, dtype=np.float32), [(0, 1)])
    np.testing.assert_array_equal(store.read([specs[0].id]), np.full(4, -0.5, dtype=np.float32))


def test_a_push_is_applied_once() -> None:
    store = BlockStore()
    specs = cut("p", 4, 0)
    store.create("SGD", [{"lr": 1.0}], specs, np.zeros(4, dtype=np.float32), {})
    for _ in range(3):
        store.apply([{"lr": 1.0}], [specs[0].id], np.ones(4, dtype=np.float32), [(0, 1)])
    np.testing.assert_array_equal(store.read([specs[0].id]), -np.ones(4, dtype=np.float32))


def test_a_block_without_gradient_is_passed_over_as_torch_does() -> None:
    store = BlockStore()
    specs = cut("p", 8, 0, 4)
    store.create("Adam", [{"lr": 0.1}], specs, np.zeros(8, dtype=np.float32), {})
    ids = [spec.id for spec in specs]
    store.apply([{"lr": 0.1}], ids, np.ones(8, dtype=np.float32), [(0, 1)])
    before = store.read([ids[1]])
    store.apply([{"lr": 0.1}], ids, np.zeros(8, dtype=np.float32), [(0, 2)], absent=[ids[1]])
    np.testing.assert_array_equal(store.read([ids[1]]), before)
    assert store.marks[ids[1]] == {0: 2}


def test_state_survives_save_and_restore() -> None:
    def make() -> tuple[BlockStore, list[str]]:
        store = BlockStore()
        specs = cut("p", 8, 0, 4)
        store.create("Adam", [{"lr": 0.1}], specs, np.zeros(8, dtype=np.float32), {})
        return store, [spec.id for spec in specs]

    store, ids = make()
    for step in range(1, 4):
        store.apply([{"lr": 0.1}], ids, np.full(8, step, dtype=np.float32), [(0, step)])
    other, _ = make()
    for block_id in ids:
        other.restore(block_id, store.state_of(block_id), store.marks[block_id])
    for each in (store, other):
        each.apply([{"lr": 0.1}], ids, np.ones(8, dtype=np.float32), [(0, 4)])
    np.testing.assert_array_equal(other.read(ids), store.read(ids))


def test_optimizers_that_need_more_than_blocks_are_refused_with_the_reason() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(BadRequest, match="LBFGS cannot run on blocks: it needs the loss"):
        optimizer_spec(torch.optim.LBFGS([parameter]))

    class Mine(torch.optim.SGD):
        pass

    with pytest.raises(BadRequest, match=r"expected one of ASGD, .* not a subclass, found .*Mine"):
        optimizer_spec(Mine([parameter]))


def test_wrong_blocks_give_typed_errors() -> None:
    store = BlockStore()
    specs = cut("p", 4, 0)
    with pytest.raises(BadRequest, match="expected an optimizer of"):
        store.create("eval", [{}], specs, np.zeros(4, dtype=np.float32), {})
    with pytest.raises(BadRequest, match="Adam does not take"):
        store.create("Adam", [{"lr": -1.0}], specs, np.zeros(4, dtype=np.float32), {})
    with pytest.raises(BadRequest, match="expected 4 values, found 3"):
        store.create("Adam", [{"lr": 1.0}], specs, np.zeros(3, dtype=np.float32), {})
    store.create("Adam", [{"lr": 1.0}], specs, np.zeros(4, dtype=np.float32), {})
    with pytest.raises(SchemaMismatch, match="they exist with Adam and 1 groups, found SGD"):
        store.create("SGD", [{"lr": 1.0}], specs, np.zeros(4, dtype=np.float32), {})
    with pytest.raises(UnknownTable, match="no block 'q@0'"):
        store.read(["q@0"])
