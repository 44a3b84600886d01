"""Row policies: refused values, and how a policy is sent within a schema."""

from __future__ import annotations

from typing import Any

import pytest

from trireme.errors import BadRequest
from trireme.policy import (
    Admission,
    CountFilter,
    CtrCommonAccessor,
    Policy,
    Probability,
    ScoreFilter,
    ScorePolicy,
    ShowClick,
    SparseAccessor,
    admission_of,
    policy_of,
)
from trireme.table import Table, TableSchema


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (Policy, {"ttl_s": 0}, "expected ttl_s None or a whole number >= 1, found 0"),
        (Policy, {"max_rows": 1.5}, r"expected max_rows .* found 1.5"),
        (ScorePolicy, {"decay_rate": 0}, r"expected decay_rate in \(0, 1\], found 0"),
        (ScorePolicy, {"delete_threshold": "1"}, "expected delete_threshold a finite number"),
        (ScorePolicy, {"delta_keep_days": -1}, "expected delta_keep_days None or a number of days"),
        (SparseAccessor, {"pulls_statistics": 1}, "expected pulls_statistics True or False"),
        (CountFilter, {"n": 0}, "expected n from 1 to 2.*found 0"),
        (CountFilter, {"n": 2, "sketch_bytes": 10}, "expected sketch_bytes None or from"),
        (Probability, {"p": 0}, r"expected p in \(0, 1\], found 0"),
        (ScoreFilter, {"threshold": float("nan")}, "expected threshold finite, found nan"),
        (ShowClick, {"show": "", "click": "c"}, "show the name of a column, or None, found ''"),
        (ShowClick, {"show": "s", "click": ""}, "click the name of a column, found ''"),
        (ScorePolicy, {"show_click": "show"}, "show_click None or a ShowClick, found 'show'"),
    ],
)
def test_a_wrong_number_is_refused(
    kind: type[Policy | Admission | ShowClick], values: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadRequest, match=message):
        kind(**values)


@pytest.mark.parametrize(
    ("admit", "policy"),
    [
        (None, None),
        (CountFilter(3, sketch_bytes=1 << 20), Policy(ttl_s=86400, max_rows=10**6)),
        (Probability(0.5), SparseAccessor()),
        (ScoreFilter(1.0), CtrCommonAccessor(show_click=ShowClick("show", "click"))),
    ],
)
def test_a_schema_comes_back_from_the_wire(admit: Admission | None, policy: Policy | None) -> None:
    schema = Table("t", dim=4, admit=admit, policy=policy).schema
    assert TableSchema.from_wire(schema.to_wire()) == schema
    assert policy_of(schema.policy).fixed() == schema.policy
    if admit is not None and schema.admission is not None:
        assert admission_of(schema.admission) == admit


@pytest.mark.parametrize(
    "body",
    [
        {"policy": {"name": "plain"}},
        {"policy": {"name": "unknown"}},
        {"policy": {**ScorePolicy().fixed(), "decay_rate": 2}},
        {"policy": {**ScorePolicy().fixed(), "show_click": 1}},
        {"admission": {"name": "count_filter"}},
        {"admission": {"name": "score_filter", "threshold": 1.0}},
    ],
)
def test_a_wrong_policy_from_the_wire_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        TableSchema.from_wire({**Table("t", dim=4).schema.to_wire(), **body})


def test_values_that_are_no_policy_are_refused() -> None:
    with pytest.raises(BadRequest, match=r"expected policy as one of trireme\.policy"):
        Table("t", dim=4, policy=CountFilter(2))  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match=r"expected admit as one of trireme\.policy"):
        Table("t", dim=4, admit=Policy())  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match="ScoreFilter needs a ScorePolicy"):
        Table("t", dim=4, admit=ScoreFilter(1.0))
