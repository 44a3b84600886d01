"""Schema: what it accepts, and what it refuses by name."""

from __future__ import annotations

import pytest

from trireme.data import Dense, Label, Schema, Sparse, Weight, criteo
from trireme.errors import BadRequest


def test_criteo_names_its_columns():
    schema = criteo()
    assert schema.names[:2] == ("label", "dense")
    assert schema.sparse == tuple(f"C{i}" for i in range(1, 27))
    assert schema == criteo()
    assert hash(schema) == hash(criteo())
    assert schema != criteo(scale=1.0)
    assert "Dense(name='dense', dim=13)" in repr(schema)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ([], "at least one field"),
        (["label"], "expected fields of the kinds Label, .*, found 'label'"),
        ([Label(), Sparse("a"), Dense("a")], "distinct names, found twice: a"),
        ([Label("")], "a name that is not empty"),
        ([Dense("x", 0)], r"Dense\('x'\): expected dim as an integer >= 1, found 0"),
    ],
)
def test_schema_refuses(fields, message):
    with pytest.raises(BadRequest, match=message):
        Schema(fields)


def test_schema_keeps_the_order_of_fields():
    schema = Schema([Label("y"), Weight(), Sparse("b"), Dense("x", 3), Sparse("a")])
    assert schema.names == ("y", "weight", "b", "x", "a")
    assert schema.sparse == ("b", "a")


def test_a_schema_in_a_message_is_short():
    schema = Schema([Label(), *(Sparse(f"s{i}", hashed=True) for i in range(300)), Dense("x", 3)])
    assert str(schema) == (
        "schema: Label('label'), Sparse('s0', hashed=True) to Sparse('s299', hashed=True) (300), "
        "Dense('x', dim=3)"
    )
