"""PaddleRec's table_parameters.*: the accessor and the numbers they select."""

from __future__ import annotations

from typing import Any

import pytest

import trireme as tr
from tests.repo import tree
from trireme.config import Config
from trireme.errors import BadRequest
from trireme.models import zoo
from trireme.policy import CtrCommonAccessor, CtrDoubleAccessor, ShowClick, SparseAccessor
from trireme.table import Table

ADAGRAD = {"name": "SparseAdaGradSGDRule"}
# What Fleet's Python fills in where a script says nothing.
UNSET = {
    "nonclk_coeff": 0.1,
    "click_coeff": 1.0,
    "base_threshold": 0.0,
    "delta_threshold": 0.0,
    "delta_keep_days": 16,
    "decay_rate": 1.0,
    "delete_threshold": 0.0,
    "delete_after_unseen_days": 30,
    "embedx_threshold": None,
}


def table_of(name: str = "ctr_dnn", *, dim: int = 9, **accessor: Any) -> Table:
    hyper = {"sparse_feature_dim": dim, **({"slot_num": 3} if name == "slot_dnn" else {})}
    parameters = {"embedding": {"accessor": accessor}}
    config = Config({"hyper_parameters": hyper, "table_parameters": parameters})
    model = zoo.load(name).create(config).model
    assert config.unread() == []
    table: Table = model.inputs.embedding.table
    assert table.schema.pulls_statistics == (getattr(model, "cvm", None) is not None)
    return table


def test_an_accessor_without_parameters_has_the_defaults_of_fleet() -> None:
    assert table_of(embed_sgd_param=ADAGRAD).policy == SparseAccessor(**UNSET)
    assert table_of("slot_dnn", embedx_dim=8).policy == SparseAccessor(
        show_click=ShowClick("show", "click"), **UNSET
    )
    alone = zoo.load("slot_dnn").create(Config({})).model.inputs.embedding.table
    assert alone.policy == SparseAccessor(show_click=ShowClick("show", "click"), **UNSET)
    assert type(zoo.load("ctr_dnn").create(Config({})).model.inputs.embedding.table.policy) is (
        tr.policy.Policy
    )


def test_every_number_of_an_accessor_is_read() -> None:
    numbers = {
        "nonclk_coeff": 0.2,
        "click_coeff": 3,
        "base_threshold": 1.5,
        "delta_threshold": 0.25,
        "delta_keep_days": 16.0,
        "show_click_decay_rate": 0.98,
        "delete_threshold": 0.8,
        "delete_after_unseen_days": 30.0,
    }
    table = table_of(
        accessor_class="SparseAccessor", embedx_threshold=10, ctr_accessor_param=numbers
    )
    assert table.policy == SparseAccessor(
        nonclk_coeff=0.2,
        click_coeff=3,
        base_threshold=1.5,
        delta_threshold=0.25,
        delta_keep_days=16,
        decay_rate=0.98,
        delete_threshold=0.8,
        delete_after_unseen_days=30,
        embedx_threshold=10,
    )


def test_paddlerecs_slot_dnn_has_fleets_accessor_with_its_own_numbers() -> None:
    config = Config.load(tree.ROOT / "tests/paddlerec/slot_dnn/config.yaml")
    model = zoo.load("slot_dnn").create(config).model
    table = model.inputs.embedding.table
    assert table.policy == SparseAccessor(show_click=ShowClick("show", "click"))
    assert table.schema.head_class == 1
    assert model.cvm is None


@pytest.mark.parametrize(
    ("kind", "policy"),
    [("CtrCommonAccessor", CtrCommonAccessor), ("CtrDoubleAccessor", CtrDoubleAccessor)],
)
def test_ctr_accessors_answer_shows_and_clicks_within_the_models_dim(
    kind: str, policy: type[SparseAccessor]
) -> None:
    options: dict[str, Any] = {"accessor_class": kind, "embedx_dim": 8, "fea_dim": 11}
    table = table_of("slot_dnn", dim=11, **options)
    assert table.policy == policy(show_click=ShowClick("show", "click"), **UNSET)
    assert (table.dim, table.width) == (9, 11)
    with pytest.raises(BadRequest, match=r"embedx_dim: expected 6, .* 9 floats with Ctr"):
        table_of(**options)


def test_heads_start_and_gradients_are_scaled_as_the_accessor_says() -> None:
    def made(dim: int = 9, **flags: bool) -> Table:
        return table_of(dim=dim, embed_sgd_param=ADAGRAD, ctr_accessor_param=flags)

    assert made().schema.initializer == ("tail_uniform", -1e-4, 1e-4)
    assert made().optimizer == tr.optim.FleetAdagrad(show_scale=True)
    assert made(zero_init=False).schema.initializer == ("uniform", -1e-4, 1e-4)
    assert made(dim=1).schema.initializer == ("uniform", -1e-4, 1e-4)
    assert made(show_scale=False).optimizer == tr.optim.FleetAdagrad(show_scale=False)


@pytest.mark.parametrize(
    ("accessor", "message"),
    [
        (
            {"accessor_class": "CtrDymfAccessor"},
            "expected accessor_class as one of SparseAccessor, ",
        ),
        (
            {"accessor_class": ["SparseAccessor"]},
            "expected accessor_class as one of SparseAccessor, ",
        ),
        ({"ctr_accessor_param": {"show_scale": 1}}, "show_scale: expected true or false, found 1"),
        (
            {"ctr_accessor_param": {"show_click_decay_rate": 2}},
            r"embedding\.accessor: SparseAccessor: expected decay_rate in \(0, 1\], found 2",
        ),
        ({"ctr_accessor_param": {"delta_keep_days": 1.5}}, "expected delta_keep_days None or a"),
        ({"embedx_threshold": "high"}, "expected embedx_threshold None or a finite number"),
    ],
)
def test_malformed_accessors_are_refused(accessor: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        table_of(**accessor)
