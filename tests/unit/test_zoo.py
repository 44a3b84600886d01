"""The zoo: every model is found by its name and created from its configuration."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import trireme as tr
from tests.paddlerec.tree import write_tree
from tests.zoo_batches import OWN_BATCHES
from trireme.config import Config
from trireme.data import Bags, Batch, Dense, Schema, Sparse
from trireme.data.batch import Strings
from trireme.dense.adam_d2sum import AdamD2Sum
from trireme.errors import BadRequest
from trireme.inference import Predictor
from trireme.inference.export import export_model
from trireme.job.default import set_default
from trireme.job.embedded import embedded
from trireme.models import zoo
from trireme.train.recipe import Recipe

TWO_OF_EACH = (
    *("hist_item_seq", "hist_cat_seq", "neg_hist_item_seq", "neg_hist_cat_seq", "negatives"),
    *("hist_item", "eval_item", "history", "cate", "position", "text", "neg_tag"),
    *("sentence_left", "sentence_right", "query", "pos_title", "neg_title"),
)
# Arrays of fixed widths, some of which `prepare` divides.
WIDTHS = {
    "sparse_input": 15, "sess_input": 100, "friends": 20, "user_packages": 50 * 22,
    "pack_neighbors_b": 20 * 22, "pack_neighbors_f": 20 * 22, "seq": 50, "pos": 50, "neg": 50,
    "src_ids": 50, "pos_ids": 50, "input_mask": 50, "title": 5 * 20, "user_title": 10 * 20,
    "cate_sample": 5, "sub_cate_sample": 5, "title_sample": 50, "content_sample": 150,
    "cate_visit": 10, "sub_cate_visit": 10, "title_visit": 100, "content_visit": 300,
}  # fmt: skip
SMALL_IDS = ("pos_ids", "mask_pos")


SIZES = {**dict.fromkeys(TWO_OF_EACH, 2), "items": 6, **WIDTHS}


def batch_of(schema: Schema, num: int = 6) -> Batch:
    """Some examples of a schema; histories and negatives have two ids. Of ensfm there are two
    items, and a third one for none, of two fields each.
    """
    columns: dict[str, Any] = {}
    for field in schema.fields:
        if not isinstance(field, Sparse):
            shape = (num, field.dim) if isinstance(field, Dense) else (num,)
            columns[field.name] = (torch.rand(shape) > 0.5).float()
            if field.name == "num_items":
                columns[field.name].fill_(2)
    sizes = {name: SIZES.get(name, 1) for name in schema.sparse}
    offsets = torch.tensor([0, *(s for s in sizes.values() for _ in range(num))]).cumsum(0)
    ids = [
        torch.randint(0, 50, (size * num,))
        if name in SMALL_IDS
        else torch.randint(1, 1000, (size * num,))
        for name, size in sizes.items()
    ]
    bags = Bags(schema.sparse, torch.cat([torch.zeros(0, dtype=torch.int64), *ids]), offsets)
    if "taken" in schema.sparse:
        bags["taken"].values.remainder_(3)
    if "unit_id" in schema.sparse:  # of leaves
        bags["unit_id"].values.remainder_(8).add_(7)
    return Batch(columns, bags)


def config_of(name: str, path: Path, folder: Path) -> Config:
    """A configuration, with the files that a model reads before it is made."""
    if name == "tdm":
        tree = write_tree(folder / "tree.pb", [(code, code) for code in range(7, 15)])
        return Config.load(path, [f"hyper_parameters.tree_path={tree}"])
    if name != "mhcn":
        return Config.load(path)
    rated = [(user, (3 * user + i) % 7) for user in range(10) for i in range(3)]
    (folder / "ratings").write_text("".join(f"{user}\t{item}\t2\n" for user, item in rated))
    trusts = [(user, (user + 1) % 10) for user in range(10)]
    (folder / "trusts").write_text("".join(f"{one}\t{other}\n" for one, other in trusts))
    files = {"rating_file": folder / "ratings", "relation_file": folder / "trusts"}
    return Config.load(path, [f"runner.{key}={file}" for key, file in files.items()])


@pytest.mark.parametrize("name", zoo.NAMES)
def test_a_model_is_made_from_its_configuration_and_learns_a_step_in_both_types(
    name: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    config = config_of(name, zoo.config_path(name), tmp_path)
    recipe = zoo.load(name).create(config)
    assert recipe.schema is not None
    assert [key for key in config.unread() if not key.startswith("runner.")] == []
    assert config.get("runner.model_path") == name
    batch = OWN_BATCHES[name]() if name in OWN_BATCHES else batch_of(recipe.schema)
    batch = batch if recipe.prepare is None else recipe.prepare(batch)
    with embedded() as cluster:
        set_default(cluster)
        optimizer = tr.DistributedOptimizer(recipe.optimizer, recipe.model, cluster=cluster)
        losses = []
        for step in range(5):
            torch.manual_seed(1)  # dropout and noise are the same in each step
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=step >= 2):
                outputs = recipe.model(batch)
            target = batch if recipe.label is None else batch[recipe.label]
            loss = recipe.loss(outputs, target)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        optimizer.flush()
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", zoo.NAMES)
def test_a_model_has_defaults_for_every_key(name: str, tmp_path: Path) -> None:
    empty = tmp_path / "empty.yaml"
    empty.write_text("{}")
    recipe = zoo.load(name).create(config_of(name, empty, tmp_path))
    assert recipe.schema is not None
    assert (recipe.optimizer is None) == (name == "word2vec")


@pytest.mark.parametrize("name", zoo.NAMES)
def test_every_model_has_its_gradients_clipped_as_configured(name: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("hyper_parameters:\n  clip_by_norm: 0.5\n")
    config = config_of(name, path, tmp_path)
    assert zoo.load(name).create(config).clip_norm == 0.5


EXPORTED = (
    *("bst", "deeprec", "dien", "din", "dsin", "dssm", "ensfm", "escm2", "esmm", "flen", "iprec"),
    *("match_pyramid", "mind", "mmoe", "multiview_simnet", "ncf", "ple", "share_bottom"),
    *("sign", "slot_dnn", "tagspace", "tdm", "textcnn", "tisas", "two_tower", "word2vec"),
)


def small(name: str, folder: Path) -> tuple[Recipe, Callable[[int], Batch]]:
    """A small model, and what makes batches for it of so many examples."""
    values: dict[str, Any] = {"slot_num": 3, "max_len": 4, "neg_samples": 5, "cate_size": 20}
    values |= {"query_len": 4, "pos_len": 4, "neg_len": 4, "layer_sizes": [30, 20]}
    values |= {"_voc_size": 1000}
    if name in ("mhcn", "tdm"):
        config = config_of(name, zoo.config_path(name), folder)
    else:
        config = Config({"hyper_parameters": values})
    recipe = zoo.load(name).create(config)

    def batch(num: int) -> Batch:
        made = OWN_BATCHES[name](num) if name in OWN_BATCHES else batch_of(recipe.schema, num)
        return made if recipe.prepare is None else recipe.prepare(made)

    return recipe, batch


# torch's export says so of every nn.GRU.
@pytest.mark.filterwarnings("ignore:The tensor attributes .*_flat_weights")
@pytest.mark.parametrize("name", EXPORTED)
def test_a_model_is_exported_and_serves_batches_of_other_sizes(name: str, tmp_path: Path) -> None:
    recipe, batch_of_size = small(name, tmp_path)
    with embedded() as cluster:
        trainer = tr.Trainer.from_recipe(recipe, progress=False, cluster=cluster)
        trainer.fit([batch_of_size(20)])
        export_model(trainer, tmp_path / "export", batch=batch_of_size(20))
        predictor = Predictor(tmp_path / "export")
        for num in (1, 20, 33):
            batch = batch_of_size(num)
            outputs = dict(predictor.predict(batch).outputs)
            torch.testing.assert_close(outputs, dict(trainer.predict([batch])))


def test_bert4rec_is_exported_for_two_examples_and_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe, batch_of_size = small("bert4rec", tmp_path)
    with embedded() as cluster:
        trainer = tr.Trainer.from_recipe(recipe, progress=False, cluster=cluster)
        export_model(trainer, tmp_path / "export", batch=batch_of_size(20))
        assert "the model is exported for two examples and more" in caplog.text
        predictor, two = Predictor(tmp_path / "export"), batch_of_size(2)
        outputs = dict(predictor.predict(two).outputs)
        torch.testing.assert_close(outputs, dict(trainer.predict([two])))
        with pytest.raises(BadRequest, match="expected columns of the same examples"):
            predictor.predict(batch_of_size(1))


@pytest.mark.parametrize("name", ["maml", "metaheac", "mhcn"])
def test_models_that_torch_cannot_export_are_refused(name: str, tmp_path: Path) -> None:
    recipe, batch_of_size = small(name, tmp_path)
    with embedded() as cluster:
        trainer = tr.Trainer.from_recipe(recipe, progress=False, cluster=cluster)
        with pytest.raises(BadRequest, match=r"expected a model that torch\.export takes"):
            export_model(trainer, tmp_path / "export", batch=batch_of_size(2))


def test_paddlerecs_inputs_come_in_their_order() -> None:
    schema = zoo.load("ctr_dnn").create(Config({})).schema
    assert schema.names == ("click", *map(str, range(1, 27)), "dense_feature")
    schema = zoo.load("slot_dnn").create(Config({})).schema
    assert schema.names == ("show", "click", *map(str, range(2, 302)))


def test_adam_d2sum_trains_the_dense_part() -> None:
    values: dict[str, Any] = {"adam_d2sum": True, "optimizer": {"learning_rate": 0.02}}
    recipe = zoo.load("ctr_dnn").create(Config({"hyper_parameters": values}))
    assert isinstance(recipe.optimizer, AdamD2Sum)
    assert recipe.optimizer.param_groups[0]["lr"] == 0.02
    values["optimizer"]["class"] = "SGD"
    with pytest.raises(BadRequest, match=r"expected optimizer\.class Adam with it, found SGD"):
        zoo.load("ctr_dnn").create(Config({"hyper_parameters": values}))


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
    with pytest.raises(
        BadRequest, match=r"expected name as one of .*autoint, bert4rec, .*, found 'deep'"
    ):
        zoo.load("deep")
    for values, message in (
        ({"optimizer": {"class": "lbfgs"}}, "expected Adam, Adagrad or SGD, found 'lbfgs'"),
        ({"fc_sizes": "512-256"}, "fc_sizes: expected a list of positive integers"),
        ({"fc_sizes": [0]}, "fc_sizes: expected a list of positive integers"),
    ):
        with pytest.raises(BadRequest, match=message):
            zoo.load("ctr_dnn").create(Config({"hyper_parameters": values}))
    for name, key, value, message in (
        ("two_tower", "user_features", "user_id", "a list of names"),
        ("two_tower", "temperature", 0, "a number > 0"),
        ("two_tower", "fc_sizes", [], "a list of positive integers, at least 1"),
        ("dlrm", "bot_layer_sizes", [], "a list of positive integers, at least 1"),
        ("dcn_v2", "is_Stacked", "no", "true or false"),
        ("dcn_v2", "is_Stacked", 2, "true or false"),
        ("metaheac", "optimizer.global_learning_rate", "fast", "a number > 0"),
        ("dcn_v2", "low_rank", 0, "an integer >= 1"),
        ("dcn_v2", "low_rank", 10**20, "an integer <= 2147483647"),
        ("ctr_dnn", "sparse_inputs_slots", 10**20, "an integer <= 2147483647"),
        ("ctr_dnn", "fc_sizes", [10**20], "a list of positive integers"),
        ("slot_dnn", "slot_num", "300", "an integer >= 1"),
        ("ctr_dnn", "sparse_inputs_slots", 1, "an integer >= 2"),
        ("ctr_dnn", "dense_input_dim", -1, "an integer >= 0"),
        ("ctr_dnn", "sparse_feature_dim", 8.5, "an integer >= 1"),
        ("ctr_dnn", "optimizer.learning_rate", "fast", "a number > 0"),
    ):
        with pytest.raises(BadRequest) as refused:
            zoo.load(name).create(Config({"hyper_parameters": {key: value}}))
        expected = f"hyper_parameters.{key}: expected {message}, found {value!r}"
        assert str(refused.value) == expected
    with pytest.raises(BadRequest, match="act: expected relu or sigmoid, found 'dice'"):
        zoo.load("din").create(Config({"hyper_parameters": {"act": "dice"}}))


def test_flags_may_be_1_and_0(tmp_path: Path) -> None:
    for flag in (1, True):
        config = config_of("mhcn", zoo.config_path("mhcn"), tmp_path)
        values = {key: config.get(f"runner.{key}") for key in ("rating_file", "relation_file")}
        for is_train, expected in ((flag, True), (1 - flag, False)):
            runner = {**values, "is_train": is_train}
            recipe = zoo.load("mhcn").create(Config({"runner": runner}))
            assert recipe.evaluation.model.also_taken is expected


def test_a_model_that_decays_its_weights_refuses_another_optimizer(tmp_path: Path) -> None:
    config = config_of("mhcn", zoo.config_path("mhcn"), tmp_path)
    files = {key: config.get(f"runner.{key}") for key in ("rating_file", "relation_file")}
    values = {"runner": files, "hyper_parameters": {"adam_d2sum": True}}
    with pytest.raises(BadRequest, match=r"adam_d2sum: expected false .* has weight_decay, found"):
        zoo.load("mhcn").create(Config(values))


LOOKED_FOR = (
    ("bert4rec", "pos_ids"),
    ("ctr_dnn", "dense_feature"),
    ("dssm", "query"),
    ("ensfm", "items"),
    ("ensfm", "num_items"),
    ("esmm", "conversion"),
    ("iprec", "friends"),
)


@pytest.mark.parametrize(("name", "column"), LOOKED_FOR)
def test_a_column_that_is_missing_or_of_strings_is_refused_by_name(name: str, column: str) -> None:
    recipe = zoo.load(name).create(Config({}))
    columns = dict(batch_of(recipe.schema).items())
    texts = Strings.encode(["a"] * 6)
    for wrong in ({n: c for n, c in columns.items() if n != column}, {**columns, column: texts}):
        with embedded() as cluster:
            trainer = tr.Trainer.from_recipe(recipe, progress=False, cluster=cluster)
            prepare = recipe.prepare or (lambda batch: batch)
            data = (prepare(batch) for batch in [Batch(wrong)])
            with pytest.raises(BadRequest, match=repr(column)):
                trainer.fit(data)


def accessor(**parts: Any) -> Config:
    """A configuration with table_parameters.embedding.accessor."""
    return Config({"table_parameters": {"embedding": {"accessor": parts}}})


ADAGRAD = {
    "learning_rate": 0.1,
    "initial_g2sum": 2.0,
    "initial_range": 0.01,
    "weight_bounds": [-3, 4],
}
ADAM = {
    "learning_rate": 0.01,
    "beta1_decay_rate": 0.8,
    "beta2_decay_rate": 0.9,
    "ada_epsilon": 1e-6,
}
BOUNDS = (-3.0, 4.0)


@pytest.mark.parametrize(
    ("name", "values", "rule"),
    [
        (
            "SparseAdaGradSGDRule",
            {"adagrad": ADAGRAD},
            tr.optim.FleetAdagrad(lr=0.1, initial_g2sum=2.0, bounds=BOUNDS),
        ),
        (
            "StdAdaGradSGDRule",
            {"adagrad": ADAGRAD},
            tr.optim.FleetAdagrad(lr=0.1, initial_g2sum=2.0, bounds=BOUNDS, shared=False),
        ),
        (
            "SparseAdamSGDRule",
            {"adam": ADAM},
            tr.optim.FleetAdam(lr=0.01, betas=(0.8, 0.9), eps=1e-6),
        ),
        (
            "SparseSharedAdamSGDRule",
            {"adam": ADAM},
            tr.optim.FleetSharedAdam(lr=0.01, betas=(0.8, 0.9), eps=1e-6),
        ),
        (
            "SparseAdaGradV2SGDRule",
            {"adagrad": {"learning_rate": 0.1}},
            tr.optim.FleetAdagradV2(lr=0.1),
        ),
        ("SparseNaiveSGDRule", {}, tr.optim.FleetSGD(lr=0.05)),
    ],
)
def test_table_parameters_say_how_rows_learn(name: str, values: Any, rule: Any) -> None:
    param = {"name": name, **values}
    config = accessor(embed_sgd_param=param, embedx_sgd_param=param, embedx_dim=8, fea_dim=11)
    table = zoo.load("ctr_dnn").create(config).model.inputs.embedding.table
    assert table.optimizer == rule
    assert table.schema.absent == "zeros"
    initial = values.get("adagrad", {}).get("initial_range", 1e-4)
    assert table.schema.initializer == ("tail_uniform", -initial, initial)
    assert config.unread() == []


def test_table_parameters_that_do_not_fit_are_refused() -> None:
    naive, adam = {"name": "SparseNaiveSGDRule"}, {"name": "SparseAdamSGDRule"}
    for config, message in (
        (accessor(embedx_dim=9), "embedx_dim: expected 8, as the model's rows have 9 floats"),
        (accessor(fea_dim=9), "fea_dim: expected 11"),
        (accessor(embed_sgd_param={"name": "SparseLionSGDRule"}), "expected name as one of Sparse"),
        (
            accessor(embed_sgd_param={"name": ["a"]}),
            r"expected name as one of Sparse.*found \['a'\]",
        ),
        (accessor(embed_sgd_param={**naive, "naive": {"learning_rate": "x"}}), "number, found 'x'"),
        (
            accessor(embed_sgd_param={**naive, "naive": {"weight_bounds": 10}}),
            r"weight_bounds: expected \[lowest, highest\], found 10",
        ),
        (accessor(embed_sgd_param=naive, embedx_sgd_param=adam), "one rule for head and tail"),
    ):
        with pytest.raises(BadRequest, match=message):
            zoo.load("ctr_dnn").create(config)


def test_a_range_that_table_parameters_replace_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hyper_parameters = {"hyper_parameters.init_range": 0.5}
    zoo.load("ctr_dnn").create(Config(hyper_parameters))
    assert not caplog.messages
    config = accessor(embed_sgd_param={"name": "SparseNaiveSGDRule"}).section("")
    zoo.load("ctr_dnn").create(Config({**config, **hyper_parameters}))
    (message,) = caplog.messages
    assert message.startswith("hyper_parameters.init_range: no effect on table embedding")


def test_the_page_says_how_many_models_have_held_out_scores() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    scored = re.findall(r"^\| `(\w+)` \|", page.split("## What they reach")[1], re.MULTILINE)
    assert set(scored) <= set(zoo.NAMES)
    assert f"These are {len(scored)} of the {len(zoo.NAMES)} models." in page
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    assert f"| Models | {len(zoo.NAMES)}, from " in readme
