"""The zoo: every model is found by its name, and made from its configuration."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import trireme as tr
from trireme.cluster import embedded, set_default
from trireme.config import Config
from trireme.data import Bags, Batch, Dense, Schema, Sparse
from trireme.errors import BadRequest
from trireme.models import zoo

NUM = 6
TWO_OF_EACH = ("hist_item_seq", "hist_cat_seq", "negatives")


def batch_of(schema: Schema) -> Batch:
    """Some examples of a schema; histories and negatives have two ids."""
    columns: dict[str, Any] = {}
    for field in schema.fields:
        if not isinstance(field, Sparse):
            shape = (NUM, field.dim) if isinstance(field, Dense) else (NUM,)
            columns[field.name] = (torch.rand(shape) > 0.5).float()
    sizes = [2 if name in TWO_OF_EACH else 1 for name in schema.sparse for _ in range(NUM)]
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    values = torch.randint(1, 1000, (int(offsets[-1]),))
    return Batch(columns, Bags(schema.sparse, values, offsets))


@pytest.mark.parametrize("name", zoo.NAMES)
def test_a_model_is_made_from_its_configuration_and_learns_a_step(name: str) -> None:
    torch.manual_seed(0)
    config = Config.load(zoo.config_path(name))
    recipe = zoo.load(name).create(config)
    assert recipe.schema is not None
    assert [key for key in config.unread() if not key.startswith("runner.")] == []
    assert config.get("runner.model_path") == name
    batch = batch_of(recipe.schema)
    with embedded() as cluster:
        set_default(cluster)
        optimizer = tr.DistributedOptimizer(recipe.optimizer, recipe.model, cluster=cluster)
        losses = []
        for _ in range(5):
            optimizer.zero_grad()
            outputs = recipe.model(batch)
            target = batch if recipe.label is None else batch[recipe.label]
            loss = recipe.loss(outputs, target)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        optimizer.flush()
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", zoo.NAMES)
def test_a_model_has_defaults_for_every_key(name: str, tmp_path: Any) -> None:
    empty = tmp_path / "empty.yaml"
    empty.write_text("{}")
    recipe = zoo.load(name).create(Config.load(empty))
    assert recipe.schema is not None
    assert (recipe.optimizer is None) == (name == "word2vec")


def test_paddlerecs_inputs_come_in_their_order() -> None:
    schema = zoo.load("ctr_dnn").create(Config({})).schema
    assert schema.names == ("click", *map(str, range(1, 27)), "dense_feature")
    schema = zoo.load("slot_dnn").create(Config({})).schema
    assert schema.names == ("show", "click", *map(str, range(2, 302)))


def test_hyper_parameters_shape_the_model() -> None:
    values = {
        "optimizer": {"class": "adagrad", "learning_rate": 0.25},
        "sparse_inputs_slots": 3,
        "dense_input_dim": 2,
        "sparse_feature_dim": 4,
        "fc_sizes": [8],
    }
    recipe = zoo.load("ctr_dnn").create(Config({"hyper_parameters": values}))
    assert isinstance(recipe.optimizer, torch.optim.Adagrad)
    assert recipe.optimizer.param_groups[0]["lr"] == 0.25
    assert recipe.schema.names == ("click", "1", "2", "dense_feature")
    rows = recipe.model.inputs.embedding.table
    assert (rows.name, rows.dim, rows.optimizer) == ("embedding", 4, tr.optim.Adagrad(lr=0.25))
    assert [tuple(p.shape) for p in recipe.model.parameters()] == [(8, 10), (8,), (1, 8), (1,)]


def test_wrong_names_and_values_are_refused_with_what_is_known() -> None:
    with pytest.raises(BadRequest, match=r"expected one of ctr_dnn, dcn_v2, .*, found 'deep'"):
        zoo.load("deep")
    for values, message in (
        ({"optimizer": {"class": "lbfgs"}}, "expected Adam, Adagrad or SGD, found 'lbfgs'"),
        ({"fc_sizes": "512-256"}, "fc_sizes: expected a list of positive integers"),
        ({"fc_sizes": [0]}, "fc_sizes: expected a list of positive integers"),
    ):
        with pytest.raises(BadRequest, match=message):
            zoo.load("ctr_dnn").create(Config({"hyper_parameters": values}))
    with pytest.raises(BadRequest, match="act: expected one of relu, sigmoid, found 'dice'"):
        zoo.load("din").create(Config({"hyper_parameters": {"act": "dice"}}))
