"""Blocks on servers compute what torch.optim computes on whole parameters."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from trireme.dense.optimizers import (
    ELEMENTWISE,
    FIXED,
    KNOWN,
    WHOLE,
    group_values,
    optimizer_spec,
)
from trireme.errors import BadRequest, SchemaMismatch, UnknownTable
from trireme.protocol.block_spec import BlockSpec, cut
from trireme.server.block_slice import BlockSlice
from trireme.server.block_store import BlockStore

NUM_ELEMENTS = 1000
BLOCK = 64
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
        pushed = gradients(step)
        assert store.apply(groups, ids, pushed, [(0, step)]) == len(specs)
        np.testing.assert_array_equal(pushed, gradients(step))  # their memory is a message's
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
    specs = cut("p", 4, 0, None)
    store.create("SGD", [{"lr": 1.0}], specs, np.zeros(4, dtype=np.float32), {})
    store.apply([{"lr": 0.5}], [specs[0].id], np.ones(4, dtype=np.float32), [(0, 1)])
    np.testing.assert_array_equal(store.read([specs[0].id]), np.full(4, -0.5, dtype=np.float32))


def test_a_push_is_applied_once() -> None:
    store = BlockStore()
    specs = cut("p", 4, 0, None)
    store.create("SGD", [{"lr": 1.0}], specs, np.zeros(4, dtype=np.float32), {})
    for _ in range(3):
        store.apply([{"lr": 1.0}], [specs[0].id], np.ones(4, dtype=np.float32), [(0, 1)])
    np.testing.assert_array_equal(store.read([specs[0].id]), -np.ones(4, dtype=np.float32))


def test_a_block_without_gradient_is_passed_over_as_torch_does() -> None:
    store = BlockStore()
    specs = [*cut("a", 4, 0, 4), *cut("b", 4, 0, 4)]
    store.create("Adam", [{"lr": 0.1}], specs, np.zeros(8, dtype=np.float32), {})
    ids = [spec.id for spec in specs]
    store.apply([{"lr": 0.1}], ids, np.ones(8, dtype=np.float32), [(0, 1)])
    before = store.read([ids[1]])
    store.apply([{"lr": 0.1}], ids, np.zeros(8, dtype=np.float32), [(0, 2)], absent=["b"])
    np.testing.assert_array_equal(store.read([ids[1]]), before)
    assert store.marks_of(ids[1]) == {0: 2}


@pytest.mark.parametrize(("name", "options"), CONFIGURATIONS)
def test_parameters_may_have_their_first_gradients_in_different_steps(
    name: str, options: dict
) -> None:
    """As of a branch of the model that some batches do not take."""
    weights = {p: torch.nn.Parameter(torch.full((4,), float(n))) for n, p in enumerate("abc")}
    optimizer = ELEMENTWISE[name](weights.values(), **options)
    groups = [group_values(group, optimizer.defaults) for group in optimizer.param_groups]
    specs = [spec for p in "abc" for spec in cut(p, 4, 0, 3)]
    ids, store = [spec.id for spec in specs], BlockStore()
    values = np.repeat(np.arange(3, dtype=np.float32), 4)
    store.create(optimizer_spec(optimizer), groups, specs, values, {})
    for step, absent in enumerate(("bc", "c", "ac", "b", "", "a", "abc", ""), 1):
        pushed = gradients(step)[:12]
        store.apply(groups, ids, pushed, [(0, step)], absent=list(absent))
        for n, (p, weight) in enumerate(weights.items()):
            weight.grad = None if p in absent else torch.from_numpy(pushed[4 * n : 4 * n + 4])
        optimizer.step()
    expected = np.concatenate([weight.detach().numpy() for weight in weights.values()])
    np.testing.assert_allclose(store.read(ids), expected, atol=2e-6, rtol=0)


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
        other.restore(block_id, store.slices_of(block_id))
    for each in (store, other):
        each.apply([{"lr": 0.1}], ids, np.ones(8, dtype=np.float32), [(0, 4)])
    np.testing.assert_array_equal(other.read(ids), store.read(ids))


def test_marks_that_were_read_stay_as_they_were_and_can_be_restored() -> None:
    store = BlockStore()
    specs = cut("p", 12, 0, 4)
    store.create("SGD", [{"lr": 1.0}], specs, np.zeros(12, dtype=np.float32), {3: 1})
    first, second, third = (spec.id for spec in specs)
    store.advance([(3, 2)])
    kept = store.slices_of(first)
    store.advance([(3, 3), (4, 1)])
    store.restore(first, kept)  # beside others that began with the very same marks
    store.apply([{"lr": 1.0}], [first, second], np.ones(8, dtype=np.float32), [(3, 3)])
    np.testing.assert_array_equal(store.read([first, second]), np.repeat([-1, 0], 4))
    store.apply([{"lr": 1.0}], [second], np.ones(4, dtype=np.float32), [(4, 2)])
    marks = [store.marks_of(block_id) for block_id in (first, second, third)]
    assert marks == [{3: 3}, {3: 3, 4: 2}, {3: 3, 4: 1}]
    assert kept[0].marks == {3: 2}


def part_of(store: BlockStore, ids: list[str], start: int, end: int) -> BlockSlice:
    """Elements of a parameter cut into blocks, as they would be read from a checkpoint."""
    parts = [part for block_id in ids for part in store.slices_of(block_id)]
    [actual] = [part for part in parts if part.start <= start and end <= part.start + part.size]
    return actual.sliced(start, end)


@pytest.mark.parametrize(("name", "options"), CONFIGURATIONS)
def test_a_block_of_parts_that_saw_unlike_pushes_sees_each_once(name: str, options: dict) -> None:
    """The parts are of two servers, of which one had applied three pushes more when it saved."""

    def make(block: int) -> tuple[BlockStore, list[str]]:
        optimizer = ELEMENTWISE[name]([torch.zeros(1, requires_grad=True)], **options)
        store, specs = BlockStore(), cut("p", NUM_ELEMENTS, 0, block)
        groups = [group_values(group, optimizer.defaults) for group in optimizer.param_groups]
        store.create(name, groups, specs, initial(), {})
        return store, [spec.id for spec in specs]

    def train(store: BlockStore, ids: list[str], steps: range) -> None:
        groups = [store.declaration()[1][0]]
        for step in steps:
            store.apply(groups, ids, gradients(step), [(step % 2, step)])

    (behind, ids), (ahead, _) = make(BLOCK), make(BLOCK)
    train(behind, ids, range(1, 5))
    train(ahead, ids, range(1, 8))
    actual, whole = make(NUM_ELEMENTS)
    bounds = [*range(0, NUM_ELEMENTS, BLOCK), NUM_ELEMENTS]
    parts = [
        part_of(ahead if start < 3 * BLOCK or start > 6 * BLOCK else behind, ids, start, end)
        for start, end in itertools.pairwise(bounds)
    ]
    actual.restore(whole[0], parts)
    assert actual.marks_of(whole[0]) == {0: 4, 1: 3}
    assert [part.size for part in actual.slices_of(whole[0])] == [192, 256, 552]
    train(actual, whole, range(5, STEPS + 1))
    expected, _ = make(BLOCK)
    train(expected, ids, range(1, STEPS + 1))
    np.testing.assert_array_equal(actual.read(whole), expected.read(ids))


def test_parts_that_saw_the_same_pushes_are_one_piece() -> None:
    store, ids = BlockStore(), ["p@0", "p@4"]
    store.create("Adam", [{"lr": 0.1}], cut("p", 8, 0, 4), np.zeros(8, dtype=np.float32), {})
    store.apply([{"lr": 0.1}], ids, np.ones(8, dtype=np.float32), [(0, 1)])
    other = BlockStore()
    other.create("Adam", [{"lr": 0.1}], cut("p", 8, 0, None), np.zeros(8, dtype=np.float32), {})
    other.restore("p@0", [part for block_id in ids for part in store.slices_of(block_id)])
    assert len(other.slices_of("p@0")) == 1
    with pytest.raises(SchemaMismatch, match=r"block p@0: expected 8 elements, found \[4\]"):
        other.restore("p@0", store.slices_of("p@0"))


WHOLE_OPTIONS = {
    "Adafactor": [{}, {"lr": 0.1, "eps": (1e-6, 1e-3), "weight_decay": 0.01}],
    "Muon": [{}, {"lr": 0.05, "adjust_lr_fn": "match_rms_adamw", "nesterov": False}],
}


@pytest.mark.parametrize(
    ("name", "options"), [(name, options) for name in WHOLE for options in WHOLE_OPTIONS[name]]
)
def test_optimizers_of_whole_parameters_give_the_bits_of_torch(name: str, options: dict) -> None:
    parameter = torch.nn.Parameter(torch.from_numpy(initial()).reshape(40, 25))
    optimizer = WHOLE[name]([parameter], **options)
    groups = [group_values(group, optimizer.defaults) for group in optimizer.param_groups]
    store = BlockStore()
    spec = BlockSpec.from_wire(BlockSpec("p", 0, NUM_ELEMENTS, 0, (40, 25)).to_wire())
    store.create(optimizer_spec(optimizer), groups, [spec], initial(), {})
    for step in range(1, STEPS + 1):
        if step == 10:
            store.restore("p@0", store.slices_of("p@0"))
        store.check_groups(groups)
        pushed = gradients(step)
        store.apply(groups, ["p@0"], pushed, [(0, step)])
        np.testing.assert_array_equal(pushed, gradients(step))
        parameter.grad = torch.from_numpy(gradients(step)).reshape(40, 25)
        optimizer.step()
    np.testing.assert_array_equal(store.read(["p@0"]), parameter.detach().numpy().reshape(-1))


def test_muons_other_options_stay_unchanged() -> None:
    store, spec = BlockStore(), BlockSpec("p", 0, 6, 0, (2, 3))
    values = np.zeros(6, dtype=np.float32)
    for steps in (0, 100, 2.5):
        with pytest.raises(BadRequest, match="1 <= ns_steps <= 99"):
            store.create("Muon", [{"ns_steps": steps}], [spec], values, {})
    with pytest.raises(BadRequest, match="Muon needs whole parameters, found"):
        store.create("Muon", [{}], [BlockSpec("p", 0, 6, 0)], values, {})
    with pytest.raises(BadRequest, match="Muon needs matrices, found"):
        store.create("Muon", [{}], [BlockSpec("p", 0, 6, 0, (1, 2, 3))], values, {})
    store.create("Muon", [{}], [spec], values, {})
    for change in ({"ns_steps": 6}, {"adjust_lr_fn": "original"}, {"ns_coefficients": [1, 2, 3]}):
        with pytest.raises(BadRequest, match="blocks: expected"):
            store.check_groups([change])


def test_a_shape_on_the_wire_is_of_a_whole_parameter() -> None:
    for wire in (["p", 0, 6, 0, [2, 2]], ["p", 6, 6, 0, [2, 3]], ["p", 0, 6, 0, [-2, -3]]):
        with pytest.raises(BadRequest, match="expected a shape of a whole parameter"):
            BlockSpec.from_wire(wire)
    with pytest.raises(BadRequest, match="and perhaps a shape"):
        BlockSpec.from_wire(["p", 0, 6, 0, [2, 3], 1])


@pytest.mark.parametrize(
    "values",
    [{"maximize": 2}, {"lr": True}, {"lr": None}, {"lr": [0.1]}, {"betas": 0.9}]
    + [{"betas": betas} for betas in ([0.9], [0.9, True], [0.9, None], [0.9, [0.9]], [])],
    ids=str,
)
def test_values_of_another_form_are_refused(values: dict[str, Any]) -> None:
    """torch's fused kernel would fail in the midst of a step."""
    store, specs = BlockStore(), cut("p", 8, 0, 4)
    with pytest.raises(BadRequest):
        store.create("Adam", [{"lr": 0.1, **values}], specs, np.zeros(8, dtype=np.float32), {})
    store.create("Adam", [{"lr": 0.1}], specs, np.zeros(8, dtype=np.float32), {})
    with pytest.raises(BadRequest):
        store.check_groups([{"lr": 0.1, **values}])
    store.check_groups([{"lr": 1, "betas": [0, 0.5], "maximize": True}])


def other_values(value: Any) -> list[Any]:
    """What a param group may be given in mid-run in place of this value."""
    if isinstance(value, bool):
        return [not value]
    numbers = [0.0, 0.5, 0.9, 3e38, 1e39, 1e300]
    return [[n] * len(value) for n in numbers] if isinstance(value, list) else numbers


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.filterwarnings("ignore")  # torch deprecates some numbers
def test_values_that_the_state_does_not_allow_are_refused_before_a_step(name: str) -> None:
    """A push is recorded when its values are checked, so a step must not fail afterwards."""
    defaults = KNOWN[name]([torch.zeros(1, 1)]).defaults
    values = group_values(defaults, defaults)
    spec = BlockSpec("p", 0, 64, 0, (8, 8) if name in WHOLE else ())
    ones, refused = np.ones(64, dtype=np.float32), set()
    for key, value in values.items():
        for other in [] if value is None or key in FIXED else other_values(value):
            store = BlockStore()
            store.create(name, [values], [spec], ones, {})
            store.apply([values], [spec.id], ones.copy(), [(0, 1)])
            changed = [values | {key: other}]
            try:
                store.check_groups(changed)
            except BadRequest:
                refused.add(key)
                continue
            store.apply(changed, [spec.id], ones.copy(), [(0, 2)])
    expected = {"Adam": {"amsgrad"}, "AdamW": {"amsgrad"}, "RMSprop": {"momentum", "centered"}}
    assert expected.get(name, set()) <= refused


def test_a_step_that_fails_leaves_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    stores = [BlockStore(), BlockStore()]
    specs = [*cut("a", 4, 0, 4), *cut("b", 4, 0, 4)]
    ones = np.ones(8, dtype=np.float32)
    for store in stores:
        store.create("SGD", [{"lr": 0.1}], specs, ones, {})
    ids = [spec.id for spec in specs]
    with monkeypatch.context() as patched:
        patched.setattr("trireme.server.block_store.step_fused", fail)
        with pytest.raises(RuntimeError):
            stores[0].apply([{"lr": 0.1}], ids, ones.copy(), [(0, 1)])
    for store in stores:  # the first block has no gradient in this push
        store.apply([{"lr": 0.1}], ids, ones.copy(), [(0, 1)], absent=["a"])
    assert np.array_equal(stores[0].read(ids), stores[1].read(ids))


def fail(_: torch.optim.Optimizer) -> None:
    raise RuntimeError("no step")


@pytest.mark.parametrize(
    "spoilt",
    [
        {"weights": torch.zeros(5)},
        {"step": torch.zeros(2)},
        {"exp_avg": torch.zeros(3)},
        {"exp_avg": torch.zeros(1)},
        {"other": torch.zeros(4)},
    ],
)
def test_unusable_optimizer_state_is_refused(
    spoilt: dict[str, torch.Tensor],
) -> None:
    """Before the first step, when there is no state, and after it."""
    store = BlockStore()
    store.create("Adam", [{"lr": 0.1}], cut("p", 4, 0, 4), np.zeros(4, dtype=np.float32), {})
    good = {"step": torch.ones(1), "exp_avg": torch.ones(4), "exp_avg_sq": torch.ones(4)}
    for sequence in (1, 2):
        state = store.state_with("p@0", good)
        assert {name: tensor.shape for name, tensor in state.items()} == {
            "weights": (4,),
            "step": (),
            "exp_avg": (4,),
            "exp_avg_sq": (4,),
        }
        with pytest.raises(SchemaMismatch, match=r"block p@0: expected numbers of {'weights': 4"):
            store.state_with("p@0", good | spoilt)
        if sequence == 1:
            with pytest.raises(SchemaMismatch):  # torch makes all of a state or nothing
                store.state_with("p@0", {"exp_avg": torch.ones(4)})
        store.apply([{"lr": 0.1}], ["p@0"], np.ones(4, dtype=np.float32), [(0, sequence)])


@pytest.mark.parametrize(
    ("name", "options"),
    [*CONFIGURATIONS, *((name, options) for name in WHOLE for options in WHOLE_OPTIONS[name])],
)
def test_the_state_of_every_optimizer_goes_into_another_store(name: str, options: dict) -> None:
    """Flat, as it travels; before the first step and after it."""
    optimizer = KNOWN[name]([torch.zeros(2, 2)], **options)
    values = group_values(optimizer.param_groups[0], optimizer.defaults)
    store, other = BlockStore(), BlockStore()
    spec = BlockSpec("p", 0, 4, 0, (2, 2) if name in WHOLE else ())
    for each in (store, other):
        each.create(name, [values], [spec], np.ones(4, dtype=np.float32), {})
    for sequence in (1, 2, 3):
        flat = {n: tensor.reshape(-1) for n, tensor in store.state_of(spec.id).items()}
        state = other.state_with(spec.id, flat)
        other.restore(spec.id, [BlockSlice(0, state, store.marks_of(spec.id))])
        for each in (store, other):
            each.apply([values], [spec.id], np.ones(4, dtype=np.float32), [(0, sequence)])
        np.testing.assert_array_equal(other.read([spec.id]), store.read([spec.id]))


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
    specs = cut("p", 4, 0, None)
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
