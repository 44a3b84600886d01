"""Tables, rules, initializers and strategies check every value where it is written."""

from __future__ import annotations

from typing import Any

import pytest

import trireme as tr
from trireme.errors import BadRequest
from trireme.optim import values_of_group
from trireme.table import Table, TableSchema

WRONG: list[tuple[Any, str]] = [
    (lambda: tr.Table("t", dim=1, optimizer=tr.optim.SGD())[[7]], r"write trireme\.TableView"),
    (lambda: tr.Strategy("collective", k=3), "k belongs to mode 'geo'"),
    (lambda: tr.Strategy("bounded"), "expected staleness with mode 'bounded', found none"),
    (lambda: tr.Strategy("bounded", staleness=0), "expected staleness .* >= 1, found 0"),
    (lambda: tr.Strategy("bounded", staleness=True), "found True"),
    (lambda: tr.Strategy("fast"), "found 'fast'"),
    (lambda: tr.Strategy("sync", staleness=3), "staleness belongs to mode 'bounded'"),
    (lambda: tr.Strategy("async", k=3), "k belongs to mode 'geo'"),
    (lambda: tr.optim.SGD(lr=-1.0), "expected lr as a finite number >= 0, found -1.0"),
    (lambda: tr.optim.SGD(lr=float("nan")), "expected lr as a finite number >= 0, found nan"),
    (lambda: tr.optim.SGD(weight_decay=-1.0), "expected weight_decay as a finite number >= 0"),
    (lambda: tr.optim.SGD(weight_decay=float("inf")), "expected weight_decay .* found inf"),
    (lambda: tr.optim.SGD(bounds=(1.0, -1.0)), "expected bounds"),
    (lambda: tr.optim.Adagrad(eps=float("inf")), "expected eps .* found inf"),
    (lambda: tr.optim.Adagrad(initial_accumulator_value=float("inf")), "found inf"),
    (lambda: tr.optim.Adam(eps=float("inf")), "expected eps .* found inf"),
    (lambda: tr.optim.Adagrad(initial_accumulator_value=-0.1), "expected initial_accumulator"),
    (lambda: tr.optim.Adam(betas=(0.9, 1.0)), "expected betas"),
    (lambda: tr.optim.Adam(eps=0.0), "expected eps as a finite number > 0"),
    (lambda: tr.optim.Adam(bias_correction="none"), "bias_correction as one of global, row"),
    (lambda: tr.optim.SGD(momentum=1.0), r"expected momentum in \[0, 1\), found 1.0"),
    (lambda: tr.optim.SGD(dampening=0.1), "expected dampening 0 without momentum, found 0.1"),
    (
        lambda: tr.optim.SGD(momentum=0.9, dampening=0.1, nesterov=True),
        "expected dampening 0 with nesterov, found 0.1",
    ),
    (lambda: tr.optim.SGD(nesterov=True), "expected nesterov False without momentum, found True"),
    (lambda: tr.optim.FTRL(l1=-1.0), "expected l1 as a finite number >= 0, found -1.0"),
    (lambda: tr.optim.FTRL(weight_decay=0.1), "expected weight_decay 0: l2 regularizes"),
    (lambda: tr.optim.FleetAdagradV2(eps=0.0), "expected eps as a finite number > 0, found 0.0"),
    (lambda: tr.optim.Count(lr=1.0), "expected lr and weight_decay 0"),
    (lambda: tr.initializer.Uniform(1.0, 0.0), "expected low <= high, which is 0.0"),
    (lambda: tr.initializer.Normal(0.0, -1.0), "expected std as a finite number >= 0"),
    (lambda: tr.initializer.Uniform(-1e39, 1.0), "Uniform: expected low .*float32, found -1e"),
    (lambda: tr.initializer.Normal(0.0, float("inf")), "expected std as a finite float32"),
    (lambda: tr.initializer.Constant(float("nan")), "expected value as a finite float32"),
    (lambda: tr.Blocks(1 << 100), r"expected size as a multiple of 64 up to \d+, or None"),
    (lambda: Table("", dim=1), "expected a name of 1 to 200 bytes, found 0"),
    (lambda: Table("\ud800", dim=1), r"expected a name that UTF-8 can write, found '\\ud800'"),
    (lambda: Table("x" * 201, dim=1), "found 201"),
    (lambda: Table("t", dim=0), r"found 0"),
    (lambda: Table("t", dim=5000), r"found 5000"),
    (lambda: Table("t", dim=1, seed=-1), "expected 0 <= seed"),
    (lambda: Table("t", dim=1, optimizer="adam"), "expected optimizer as one of"),
]


@pytest.mark.parametrize(("make", "message"), WRONG)
def test_a_wrong_value_is_refused_with_what_was_found(make: Any, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        make()


def test_a_schema_survives_the_wire() -> None:
    table = Table(
        "t",
        dim=7,
        optimizer=tr.optim.Adagrad(shared=True, initial_accumulator_value=0.5),
        initializer=tr.initializer.Normal(0.0, 0.1),
        seed=2**64 - 1,
    )
    assert TableSchema.from_wire(table.schema.to_wire()) == table.schema


@pytest.mark.parametrize(
    "field", ["name", "dims", "dtype", "rule", "initializer", "seed", "columns"]
)
def test_an_incomplete_schema_is_refused(field: str) -> None:
    body = Table("t", dim=1).schema.to_wire()
    del body[field]
    with pytest.raises(BadRequest, match="expected a complete schema"):
        TableSchema.from_wire(body)


def test_unsupported_settings_are_refused_in_a_schema() -> None:
    body = Table("t", dim=1).schema.to_wire()
    with pytest.raises(
        BadRequest, match="expected dtype as one of float32, bfloat16, float16, found 'int8'"
    ):
        TableSchema.from_wire({**body, "dtype": "int8"})
    with pytest.raises(BadRequest, match=r"expected columns \[\],.*found \['show'\]"):
        TableSchema.from_wire({**body, "columns": ["show"]})


def test_two_declarations_differ_exactly_where_their_schema_does() -> None:
    base = Table("t", dim=2)
    assert Table("t", dim=2).schema == base.schema
    # A rate travels with the push; it is no part of the schema.
    assert Table("t", dim=2, optimizer=tr.optim.Adagrad(lr=0.9)).schema == base.schema
    assert Table("t", dim=2, optimizer=tr.optim.Adagrad(shared=True)).schema != base.schema
    assert Table("t", dim=2, seed=1).schema != base.schema
    assert Table("t", dim=2, dtype="bfloat16").schema != base.schema


def test_values_of_a_group_carry_every_rate() -> None:
    rule = tr.optim.Adam(lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3, bounds=(-1.0, 2.0))
    assert values_of_group(rule.group(), 5) == {
        "lr": 0.1,
        "weight_decay": 0.3,
        "eps": 1e-6,
        "beta1": 0.8,
        "beta2": 0.9,
        "l1": 0.0,
        "l2": 0.0,
        "lower": -1.0,
        "upper": 2.0,
        "step": 5,
    }
