"""Update rules against torch where torch has the rule, else against NumPy in float64, to 1e-6.

The oracles keep float64, so that their own rounding does not hide in the tolerance.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import trireme as tr
from tests.tables import INITIALIZERS, POOL, RULES, lookup, make_table, random_keys
from trireme import _core
from trireme.errors import BadRequest
from trireme.optim import rule_values, values_of_group
from trireme.rows.core_table import make_core_table
from trireme.rows.wide_rows import RowLayout

TOLERANCE = 1e-6
NUM_KEYS, DIM, STEPS = 40, 5, 25
Step = tuple[np.ndarray, np.ndarray]  # rows touched (K,), their gradients (K, DIM)


def make_steps(seed: int = 0, *, touch_all: bool = False) -> list[Step]:
    rng = np.random.default_rng(seed)
    steps = []
    for _ in range(STEPS):
        size = NUM_KEYS if touch_all else int(rng.integers(1, NUM_KEYS))
        rows = rng.permutation(NUM_KEYS)[:size]
        steps.append((rows, rng.standard_normal((size, DIM)).astype(np.float32)))
    return steps


KEYS = random_keys(np.random.default_rng(5), NUM_KEYS)


def run_table(table: _core.Table, steps: list[Step], **values: Any) -> np.ndarray:
    """Apply the steps, numbered from 1; returns the weights of KEYS."""
    for number, (rows, grads) in enumerate(steps, 1):
        rates = _core.RuleValues(**{"step": number, **values})
        assert table.update(KEYS[rows], grads, [(0, number)], rates, POOL) == len(rows)
    return lookup(table, KEYS)


@pytest.mark.parametrize("name", RULES)
def test_counts_are_in_the_documented_columns(name: str) -> None:
    table = make_table(DIM, name)
    grads = np.ones((NUM_KEYS, DIM), np.float32)
    run_table(table, [(np.arange(NUM_KEYS), grads)] * 3, lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8)
    layout = RowLayout(DIM, table.state_floats, is_scored=False)
    snapshots = [table.snapshot(bucket) for bucket in range(_core.NUM_BUCKETS)]
    state = np.concatenate(
        [layout.state(content.rows) for content in snapshots if len(content.keys)]
    )
    at = table.state_floats - table.state_counts
    assert (np.ascontiguousarray(state[:, at:]).view(np.uint32)[:, :1] == 3).all()
    others = np.abs(state[:, :at])
    assert not ((others > 0) & (others < np.finfo(np.float32).tiny)).any()


def run_torch(
    start: np.ndarray,
    steps: list[Step],
    make: Callable[[list[torch.Tensor]], torch.optim.Optimizer],
    *,
    sparse: bool = False,
) -> np.ndarray:
    weight = torch.from_numpy(start).double().requires_grad_()
    optimizer = make([weight])
    for rows, grads in steps:
        values = torch.from_numpy(grads).double()
        index = torch.from_numpy(rows)
        if sparse:
            weight.grad = torch.sparse_coo_tensor(
                index[None], values, weight.shape, check_invariants=True
            )
        else:
            weight.grad = torch.zeros_like(weight).index_put((index,), values)
        optimizer.step()
    return weight.detach().numpy()


def assert_equals(actual: np.ndarray, expected: np.ndarray, start: np.ndarray) -> None:
    moved = np.abs(expected - start).max()
    assert moved > 1000 * TOLERANCE, "expected weights that move"
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_sgd_is_torchs(weight_decay: float) -> None:
    steps = make_steps(touch_all=weight_decay > 0)
    table = make_table(DIM, "sgd")
    start = lookup(table, KEYS)
    expected = run_torch(
        start, steps, lambda p: torch.optim.SGD(p, lr=0.05, weight_decay=weight_decay)
    )
    assert_equals(run_table(table, steps, lr=0.05, weight_decay=weight_decay), expected, start)


class LazySGD(torch.optim.SGD):
    """torch's SGD on each row as a parameter of its own: rows without a gradient stay."""

    def __init__(self, weight: torch.Tensor, **options: Any) -> None:
        self.weight = weight
        self.rows = [row.clone().requires_grad_() for row in weight.detach()]
        super().__init__(self.rows, **options)

    def step(self) -> None:  # type: ignore[override]
        touched = self.weight.grad.abs().sum(1) > 0
        for row, grad, is_touched in zip(self.rows, self.weight.grad, touched, strict=True):
            row.grad = grad if is_touched else None
        super().step()
        self.weight.data.copy_(torch.stack([row.detach() for row in self.rows]))


@pytest.mark.parametrize(
    ("rule", "dampening", "weight_decay"),
    [("momentum", 0.0, 0.0), ("momentum", 0.4, 0.0), ("momentum", 0.4, 0.3), ("nesterov", 0, 0.3)],
)
def test_momentum_is_torchs_sgd_on_the_rows_with_a_gradient(
    rule: str, dampening: float, weight_decay: float
) -> None:
    steps = make_steps()
    table = make_table(DIM, rule)
    assert table.state_floats == DIM + 1
    start = lookup(table, KEYS)
    options = {"lr": 0.05, "momentum": 0.8, "dampening": dampening, "weight_decay": weight_decay}
    expected = run_torch(
        start, steps, lambda p: LazySGD(p[0], **options, nesterov=rule == "nesterov")
    )
    rates = {"lr": 0.05, "momentum": 0.8, "dampening": dampening, "weight_decay": weight_decay}
    assert_equals(run_table(table, steps, **rates), expected, start)


@pytest.mark.parametrize(
    ("accumulator", "eps", "weight_decay"),
    [(0.0, 1e-10, 0.0), (0.1, 1e-10, 0.0), (0.1, 0.5, 0.0), (2.0, 1e-3, 0.3)],
)
def test_adagrad_is_torchs(accumulator: float, eps: float, weight_decay: float) -> None:
    steps = make_steps(touch_all=weight_decay > 0)
    table = make_table(DIM, "adagrad", initial_accumulator=accumulator)
    start = lookup(table, KEYS)
    expected = run_torch(
        start,
        steps,
        lambda p: torch.optim.Adagrad(
            p,
            lr=0.05,
            eps=eps,
            weight_decay=weight_decay,
            initial_accumulator_value=accumulator,
        ),
    )
    actual = run_table(table, steps, lr=0.05, eps=eps, weight_decay=weight_decay)
    assert_equals(actual, expected, start)


@pytest.mark.parametrize(("betas", "eps"), [((0.9, 0.999), 1e-8), ((0.5, 0.8), 0.1), ((0, 0), 1)])
def test_adam_is_torchs_sparse_adam(betas: tuple[float, float], eps: float) -> None:
    steps = make_steps()
    table = make_table(DIM, "adam")
    start = lookup(table, KEYS)
    expected = run_torch(
        start,
        steps,
        lambda p: torch.optim.SparseAdam(p, lr=0.01, betas=betas, eps=eps),
        sparse=True,
    )
    actual = run_table(table, steps, lr=0.01, beta1=betas[0], beta2=betas[1], eps=eps)
    assert_equals(actual, expected, start)


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
@pytest.mark.parametrize("rule", ["adam", "row adam"])
def test_adam_is_torchs_adam_on_keys_touched_every_step(rule: str, weight_decay: float) -> None:
    """Its eps stands outside of the bias correction: so small an eps does not show."""
    steps = make_steps(touch_all=True)
    table = make_table(DIM, rule)
    start = lookup(table, KEYS)
    expected = run_torch(
        start,
        steps,
        lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-12, weight_decay=weight_decay),
    )
    actual = run_table(table, steps, lr=0.01, eps=1e-12, weight_decay=weight_decay)
    assert_equals(actual, expected, start)


def run_numpy(start: np.ndarray, steps: list[Step], apply: Callable[..., None]) -> np.ndarray:
    """Calls apply(weights (DIM,), state {}, gradient (DIM,)) for each row of each step."""
    weights = start.astype(np.float64)
    states: list[dict[str, Any]] = [{} for _ in weights]
    for rows, grads in steps:
        for row, grad in zip(rows, grads.astype(np.float64), strict=True):
            apply(weights[row], states[row], grad)
    return weights


@pytest.mark.parametrize("accumulator", [0.0, 0.4])
def test_shared_adagrad_keeps_the_mean_square_of_the_row(accumulator: float) -> None:
    def apply(w: np.ndarray, state: dict[str, Any], grad: np.ndarray) -> None:
        g = grad + 0.2 * w
        state["sum"] = state.get("sum", accumulator) + (g * g).mean()
        w -= 0.05 * g / (np.sqrt(state["sum"]) + 1e-3)

    steps = make_steps()
    table = make_table(DIM, "shared adagrad", initial_accumulator=accumulator)
    assert table.state_floats == 1
    start = lookup(table, KEYS)
    expected = run_numpy(start, steps, apply)
    assert_equals(run_table(table, steps, lr=0.05, eps=1e-3, weight_decay=0.2), expected, start)


def test_row_adam_counts_the_updates_of_each_row() -> None:
    beta1, beta2 = 0.8, 0.95

    def apply(w: np.ndarray, state: dict[str, Any], grad: np.ndarray) -> None:
        g = grad + 0.2 * w
        t = state["t"] = state.get("t", 0) + 1
        m = state["m"] = beta1 * state.get("m", 0.0) + (1 - beta1) * g
        v = state["v"] = beta2 * state.get("v", 0.0) + (1 - beta2) * g * g
        size = 0.01 * np.sqrt(1 - beta2**t) / (1 - beta1**t)
        w -= size * m / (np.sqrt(v) + 1e-4)

    steps = make_steps()
    table = make_table(DIM, "row adam")
    assert table.state_floats == 2 * DIM + 1
    start = lookup(table, KEYS)
    rates = {"lr": 0.01, "beta1": beta1, "beta2": beta2, "eps": 1e-4, "weight_decay": 0.2}
    expected = run_numpy(start, steps, apply)
    assert_equals(run_table(table, steps, **rates), expected, start)
    again = run_table(make_table(DIM, "row adam"), steps, **rates, step=77)
    np.testing.assert_array_equal(again, lookup(table, KEYS), err_msg="the push's step is not used")


@pytest.mark.parametrize("rule", ["shared adam", "shared row adam"])
def test_shared_adam_keeps_the_mean_moments_of_the_row(rule: str) -> None:
    beta1, beta2 = 0.8, 0.95

    def apply(w: np.ndarray, state: dict[str, Any], grad: np.ndarray) -> None:
        g = grad + 0.2 * w
        t = state["t"] = state.get("t", 0) + 1
        m = beta1 * state.get("m", 0.0) + (1 - beta1) * g
        v = beta2 * state.get("v", 0.0) + (1 - beta2) * g * g
        state["m"], state["v"] = m.mean(), v.mean()
        w -= 0.01 * np.sqrt(1 - beta2**t) / (1 - beta1**t) * m / (np.sqrt(v) + 1e-4)

    by_row = rule == "shared row adam"
    steps = make_steps(touch_all=not by_row)  # so that the step is the row's count, too
    table = make_table(DIM, rule)
    assert table.state_floats == 2 + by_row
    start = lookup(table, KEYS)
    rates = {"lr": 0.01, "beta1": beta1, "beta2": beta2, "eps": 1e-4, "weight_decay": 0.2}
    assert_equals(run_table(table, steps, **rates), run_numpy(start, steps, apply), start)


@pytest.mark.parametrize(("beta", "l1", "l2"), [(1.0, 0.0, 0.0), (0.3, 0.7, 0.2), (0.0, 0.1, 0.0)])
def test_ftrl_is_the_papers_algorithm(beta: float, l1: float, l2: float) -> None:
    alpha = 0.05

    def apply(w: np.ndarray, state: dict[str, Any], grad: np.ndarray) -> None:
        """Algorithm 1 of McMahan et al. 2013, a coordinate at a time."""
        z, n = state.setdefault("z", np.zeros(DIM)), state.setdefault("n", np.zeros(DIM))
        for i, g in enumerate(grad):
            sigma = (np.sqrt(n[i] + g * g) - np.sqrt(n[i])) / alpha
            z[i] += g - sigma * w[i]
            n[i] += g * g
            if abs(z[i]) <= l1:
                w[i] = 0
            else:
                w[i] = -(z[i] - np.sign(z[i]) * l1) / ((beta + np.sqrt(n[i])) / alpha + l2)

    steps = make_steps()
    table = make_table(DIM, "ftrl", initializer="constant", init_a=0.0, init_b=0.0)
    start = lookup(table, KEYS)
    expected = run_numpy(start, steps, apply)
    actual = run_table(table, steps, lr=alpha, beta=beta, l1=l1, l2=l2)
    assert_equals(actual, expected, start)
    if l1 > 0:
        assert ((actual == 0) & (expected == 0)).any(), "expected weights that are exactly 0"
    unmoved = make_table(DIM, "ftrl")
    before = lookup(unmoved, KEYS)
    np.testing.assert_array_equal(run_table(unmoved, steps[:2], lr=0.0), before)


@pytest.mark.parametrize("rule", ["sgd", "momentum", "adagrad", "shared adagrad", "adam", "ftrl"])
def test_bounds_clip_the_weights_after_each_update(rule: str) -> None:
    free, bounded = make_table(DIM, rule), make_table(DIM, rule)
    (rows, grads), *_ = make_steps(touch_all=True)
    unclipped = run_table(free, [(rows, grads)], lr=0.3)
    actual = run_table(bounded, [(rows, grads)], lr=0.3, lower=-0.2, upper=0.1)
    np.testing.assert_array_equal(actual, unclipped.clip(np.float32(-0.2), np.float32(0.1)))
    assert (unclipped < -0.2).any()
    assert (unclipped > 0.1).any()


def test_count_adds_one_for_every_update_whatever_the_gradient() -> None:
    steps = make_steps()
    table = make_table(DIM, "count", initializer="constant", init_a=0.0, init_b=0.0)
    counts = np.bincount(np.concatenate([rows for rows, _ in steps]), minlength=NUM_KEYS)
    np.testing.assert_array_equal(
        run_table(table, steps, lr=9.0, weight_decay=9.0), np.repeat(counts[:, None], DIM, axis=1)
    )
    bounded = make_table(DIM, "count", initializer="constant", init_a=0.0, init_b=0.0)
    assert run_table(bounded, steps, lr=0.0, upper=3.0).max() == 3.0


def fleet_part(kind: str, w: np.ndarray, state: dict[str, Any], g: np.ndarray) -> None:
    """One update of a head or a tail in float64: rates lr 0.05, g0 = eps 0.7, betas 0.8, 0.95."""
    if kind == "sgd":
        w -= 0.05 * g
        return
    if kind == "shared adam":
        t = state["t"] = state.get("t", 0) + 1
        m, v = 0.8 * state.get("m", 0.0) + 0.2 * g, 0.95 * state.get("v", 0.0) + 0.05 * g * g
        state["m"], state["v"] = m.mean(), v.mean()
        w -= 0.05 * np.sqrt(1 - 0.95**t) / (1 - 0.8**t) * m / (np.sqrt(v) + 0.7)
        return
    if kind == "adagrad v2":
        state["sum"] = state.get("sum", 0.0) + (g * g).mean()
        w -= 0.05 * g / (np.sqrt(state["sum"]) + 0.7)
        return
    if kind == "adam":
        t = state["t"] = state.get("t", 0) + 1
        m = state["m"] = 0.8 * state.get("m", 0.0) + 0.2 * g
        v = state["v"] = 0.95 * state.get("v", 0.0) + 0.05 * g * g
        w -= 0.05 * np.sqrt(1 - 0.95**t) / (1 - 0.8**t) * m / (np.sqrt(v) + 0.7)
        return
    sums = state.get("sum", 0.0)
    w -= 0.05 * g * np.sqrt(0.7 / (0.7 + sums))
    state["sum"] = sums + ((g * g).mean() if kind == "shared adagrad" else g * g)


@pytest.mark.parametrize(
    "kind", ["sgd", "adagrad", "shared adagrad", "adagrad v2", "adam", "shared adam"]
)
def test_fleets_rules_move_the_tail_from_the_second_update_on(kind: str) -> None:
    def apply(w: np.ndarray, state: dict[str, Any], g: np.ndarray) -> None:
        fleet_part(kind, w[:1], state.setdefault("head", {}), g[:1])
        if state.setdefault("is_old", False):
            fleet_part(kind, w[1:], state.setdefault("tail", {}), g[1:])
        state["is_old"] = True

    steps = make_steps()
    rule = f"shared fleet {kind[7:]}" if kind.startswith("shared") else f"fleet {kind}"
    table = make_table(DIM, rule, initializer="tail_uniform", absent="zeros")
    np.testing.assert_array_equal(lookup(table, KEYS), 0)  # absent, and none made
    rates = {"lr": 0.05, "eps": 0.7, "initial_g2sum": 0.7, "beta1": 0.8, "beta2": 0.95}
    start = lookup(make_table(DIM, rule, initializer="tail_uniform"), KEYS)  # what rows start with
    assert (start[:, 0] == 0).all()
    assert (start[:, 1:] != 0).all()
    expected = run_numpy(start, steps, apply)
    touched = np.unique(np.concatenate([rows for rows, _ in steps]))
    actual = run_table(table, steps, **rates)
    assert_equals(actual[touched], expected[touched], start[touched])


# What each rule of the core reads of the values that travel with a push.
USED = {
    "sgd": {"lr", "weight_decay", "lower", "upper"},
    "adagrad": {"lr", "weight_decay", "eps", "lower", "upper"},
    "shared adagrad": {"lr", "weight_decay", "eps", "lower", "upper"},
    "momentum": {"lr", "weight_decay", "momentum", "dampening", "lower", "upper"},
    "nesterov": {"lr", "weight_decay", "momentum", "lower", "upper"},
    "ftrl": {"lr", "beta", "l1", "l2", "lower", "upper"},
    "adam": {"lr", "weight_decay", "eps", "beta1", "beta2", "lower", "upper", "step"},
    "row adam": {"lr", "weight_decay", "eps", "beta1", "beta2", "lower", "upper"},
    "shared adam": {"lr", "weight_decay", "eps", "beta1", "beta2", "lower", "upper", "step"},
    "shared row adam": {"lr", "weight_decay", "eps", "beta1", "beta2", "lower", "upper"},
    "count": {"lower", "upper"},
    "fleet sgd": {"lr", "lower", "upper"},
    "fleet adagrad": {"lr", "initial_g2sum", "lower", "upper"},
    "shared fleet adagrad": {"lr", "initial_g2sum", "lower", "upper"},
    "fleet adagrad v2": {"lr", "eps", "lower", "upper"},
    "fleet adam": {"lr", "eps", "beta1", "beta2", "lower", "upper"},
    "shared fleet adam": {"lr", "eps", "beta1", "beta2", "lower", "upper"},
}
BASE = {
    "lr": 0.1,
    "weight_decay": 0.1,
    "eps": 1e-3,
    "beta1": 0.9,
    "beta2": 0.99,
    "momentum": 0.9,
    "dampening": 0.5,
    "beta": 1e-3,
    "initial_g2sum": 1e-3,
    "step": 3,
}
CHANGED = {
    "lr": 0.2,
    "weight_decay": 0.2,
    "eps": 1e-2,
    "beta1": 0.8,
    "beta2": 0.9,
    "momentum": 0.8,
    "dampening": 0.4,
    "beta": 1e-2,
    "l1": 0.2,
    "l2": 0.2,
    "initial_g2sum": 1e-2,
    "step": 4,
    "lower": 5.0,
    "upper": 0.0,
}


@pytest.mark.parametrize("rule", RULES)
def test_a_value_changes_the_result_exactly_where_the_rule_uses_it(rule: str) -> None:
    steps = make_steps()[:3]
    plain = run_table(make_table(DIM, rule), steps, **BASE)

    def changes_result(name: str, value: float) -> bool:
        changed = run_table(make_table(DIM, rule), steps, **{**BASE, name: value})
        return bool((changed != plain).any())

    assert {name for name, value in CHANGED.items() if changes_result(name, value)} == USED[rule]


# The declarations: class -> another value of each of its fields, beside the fields of all rules.
DECLARED: dict[type[tr.optim.Rule], dict[str, Any]] = {
    tr.optim.SGD: {"momentum": 0.5, "dampening": 0.5, "nesterov": True},
    tr.optim.FTRL: {"beta": 0.2, "l1": 0.3, "l2": 0.3},
    tr.optim.Adagrad: {"initial_accumulator_value": 0.3, "eps": 0.2, "shared": True},
    tr.optim.Adam: {"betas": (0.5, 0.999), "eps": 0.2, "bias_correction": "row", "shared": True},
    tr.optim.Count: {},
    tr.optim.FleetSGD: {},
    tr.optim.FleetAdagrad: {"initial_g2sum": 0.3, "shared": False, "show_scale": False},
    tr.optim.FleetAdagradV2: {"eps": 0.2, "show_scale": False},
    tr.optim.FleetAdam: {"betas": (0.5, 0.999), "eps": 0.2},
    tr.optim.FleetSharedAdam: {"betas": (0.5, 0.999), "eps": 0.2},
}
OF_ALL = {"lr": 0.2, "weight_decay": 0.3, "bounds": (-0.01, 0.01)}


def run_declared(rule: tr.optim.Rule) -> bytes:
    """The weights after some steps through a declared table, its schema, and its param group."""
    table = make_core_table(tr.Table("t", dim=DIM, optimizer=rule, seed=3).schema)
    for number, (rows, grads) in enumerate(make_steps()[:4], 1):
        values = rule_values(values_of_group(rule.group(), number))
        table.update(KEYS[rows], grads, [(0, number)], values, POOL)
    return lookup(table, KEYS).tobytes()


@pytest.mark.parametrize("rule", DECLARED, ids=lambda rule: rule.__name__)
def test_every_knob_of_a_declared_rule_changes_the_result_or_is_refused(
    rule: type[tr.optim.Rule],
) -> None:
    changes = {**OF_ALL, **DECLARED[rule]}
    if issubclass(rule, tr.optim.FleetRule):
        changes["scale"] = "loss"  # not for the core: tests/unit/test_fleet_scale.py
    assert {field.name for field in dataclasses.fields(rule)} == set(changes)
    plain = run_declared(rule())
    for field, value in changes.items():
        if rule is tr.optim.Count and field in ("lr", "weight_decay"):
            with pytest.raises(BadRequest, match="expected lr and weight_decay 0"):
                rule(**{field: value})
        elif issubclass(rule, tr.optim.FleetRule | tr.optim.FTRL) and field == "weight_decay":
            with pytest.raises(BadRequest, match="expected weight_decay 0: "):
                rule(**{field: value})
        elif rule is tr.optim.SGD and field in ("dampening", "nesterov"):
            with pytest.raises(BadRequest, match=f"expected {field} .* without momentum"):
                rule(**{field: value})
            assert run_declared(rule(momentum=0.5)) != run_declared(
                rule(momentum=0.5, **{field: value})
            )
        elif field in ("scale", "show_scale"):
            assert rule(**{field: value}).fixed() != rule().fixed()
        else:
            assert run_declared(rule(**{field: value})) != plain, field
    if rule is tr.optim.Adagrad:
        both = run_declared(rule(shared=True, initial_accumulator_value=0.3))
        assert both != run_declared(rule(shared=True))


def test_an_option_that_no_rule_has_is_refused_in_a_schema() -> None:
    schema = tr.Table("t", dim=DIM, optimizer=tr.optim.SGD()).schema
    with pytest.raises(BadRequest, match=r"no rule has the options \{'momentum': 0.9\}"):
        make_core_table(dataclasses.replace(schema, rule={"name": "sgd", "momentum": 0.9}))
    with pytest.raises(BadRequest, match=r"expected a rule's name and options, found \{\}"):
        make_core_table(dataclasses.replace(schema, rule={}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rule": "lion"}, "expected one of sgd, momentum, .*, found lion"),
        ({"rule": "sgd", "nesterov": True}, "rule sgd: expected nesterov = false, found true"),
        ({"rule": "sgd", "shared": True}, "rule sgd: expected shared = false, found true"),
        ({"rule": "sgd", "bias_correction": "row"}, "expected no bias_correction, found row"),
        ({"rule": "adam", "bias_correction": "no"}, "expected bias_correction global or row"),
        (
            {"rule": "adam", "initial_accumulator": 0.5},
            "expected no initial_accumulator, found 0.5",
        ),
        ({"rule": "adagrad", "initial_accumulator": -1.0}, "initial_accumulator >= 0, found -1.0"),
        ({"rule": "adagrad", "initial_accumulator": float("inf")}, "finite initial_accumulator"),
        ({"initializer": "zipf"}, "expected uniform, normal, constant or tail_uniform, found zipf"),
        ({"initializer": "constant", "init_b": 1.0}, "expected b = 0"),
        ({"initializer": "uniform", "init_a": 1.0, "init_b": 0.0}, "expected a <= b"),
        ({"initializer": "normal", "init_b": -1.0}, "standard deviation b >= 0"),
        ({"init_a": float("nan")}, "expected finite a and b"),
        ({"absent": "ones"}, "expected absent initial or zeros, found ones"),
        ({"num_streams_max": 0}, "expected num_streams_max >= 1, found 0"),
        ({"simd": "neon"}, "expected auto, scalar, avx2 or avx512, found neon"),
        ({"dims": []}, "expected at least one row class in dims, found none"),
        ({"dims": [4] * 17}, "expected at most 16 row classes, the heads' included, found 17"),
        ({"dims": [0]}, r"expected a dim in \[1, 65536\], found 0"),
    ],
)
def test_a_wrong_option_of_a_table_is_refused_with_what_was_found(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadRequest, match=message):
        _core.Table(
            **{"dims": [DIM], **INITIALIZERS["uniform"], "seed": 1, "rule": "sgd", **options}
        )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lr": float("nan")}, "RuleValues.lr: expected a finite number, found nan"),
        ({"lr": 1e300}, "RuleValues.lr: expected a finite number"),
        ({"weight_decay": -0.1}, "weight_decay: expected a finite number >= 0, found -0.1"),
        ({"weight_decay": float("inf")}, "weight_decay: expected a finite number >= 0, found inf"),
        ({"eps": -1.0}, "eps: expected a finite number >= 0, found -1"),
        ({"eps": 1e39}, "eps: expected a finite number >= 0"),
        ({"beta1": 1.0}, r"beta1: expected a number in \[0, 1\), found 1"),
        ({"beta2": -0.5}, r"beta2: expected a number in \[0, 1\), found -0.5"),
        ({"momentum": 1.0}, r"momentum: expected a number in \[0, 1\), found 1"),
        ({"dampening": -0.5}, r"dampening: expected a number in \[0, 1\), found -0.5"),
        ({"beta": -1.0}, "beta: expected a finite number >= 0, found -1"),
        ({"initial_g2sum": 1e39}, "initial_g2sum: expected a finite number >= 0"),
        ({"l1": -1.0}, "l1: expected a finite number >= 0, found -1"),
        ({"l2": float("inf")}, "l2: expected a finite number >= 0, found inf"),
        ({"lower": 2.0, "upper": 1.0}, "lower: expected a number <= upper, found 2"),
        ({"upper": float("nan")}, "upper: expected a number, found nan"),
        ({"step": 0}, "step: expected a number >= 1, found 0"),
    ],
)
def test_a_wrong_value_of_a_step_is_refused_with_what_was_found(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadRequest, match=message):
        _core.RuleValues(**{"lr": 0.1, **values})
