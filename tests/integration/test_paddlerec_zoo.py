"""The zoo's models on files of the shapes of PaddleRec's: they train, infer and warm-start with the
keys and the readers as they are, and equal their twins in plain torch.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trireme as tr
from tests.paddlerec import readers
from trireme.commands import cli
from trireme.config import Config
from trireme.data import ArrayDataset
from trireme.data.prepared import PreparedDataset
from trireme.errors import BadRequest
from trireme.job.cluster import Cluster
from trireme.job.default import set_default
from trireme.job.embedded import embedded
from trireme.launch import environment
from trireme.models import zoo
from trireme.run.files import load_file
from trireme.run.rec_dataset import ExampleDataset, ReaderConfig
from trireme.run.runner import make_trainer, report_of
from trireme.run.settings import Settings

# The figure of inference, and what it must exceed.
EXPECTED = {
    "aitm": ("auc_conversion", 0.8),
    "autoint": ("auc", 0.8),
    "dcn": ("auc", 0.8),
    "deeprec": ("examples", 149),
    "dien": ("auc", 0.8),
    "din": ("auc", 0.8),
    "dssm": ("examples", 149),
    "ensfm": ("top_5.recall", 0.9),
    "escm2": ("auc_ctcvr", 0.8),
    "esmm": ("auc_ctcvr", 0.8),
    "lr": ("auc", 0.8),
    "mhcn": ("top_4.recall", 0.9),
    "mind": ("top_20.recall", 0.4),
    "mmoe": ("auc_income", 0.8),
    "naml": ("accuracy.recall", 0.8),
    "ncf": ("auc", 0.8),
    "sign": ("auc", 0.8),
    "textcnn": ("accuracy.recall", 0.8),
    "tisas": ("top_10.recall", 0.6),
    "word2vec": ("analogy.recall", -1),
    "xdeepfm": ("auc", 0.8),
}
HEAD = ("epoch", "batch", "reader_cost", "batch_cost", "ips")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for name in environment.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    caplog.set_level(logging.INFO)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_model_of_paddlerecs_shape_trains_infers_and_warm_starts(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    folder = readers.write(name, tmp_path / name)
    command = ["-m", str(folder / "config.yaml"), "-o", f"model={name}"]
    assert cli.main(["run", *command]) == 0
    output = capfd.readouterr()
    lines = [*output.out.splitlines(), *output.err.splitlines(), *caplog.messages]
    line = next(line for line in lines if "epoch 0, batch 5:" in line)
    assert re.search(r"loss .*reader_cost \S+ s, batch_cost \S+ s, ips \S+ examples/s", line)
    assert cli.main(["run", "--infer", *command]) == 0
    tested = [line for line in caplog.messages if line.startswith("run: infer epoch 1")]
    figure, least = EXPECTED[name]
    (value,) = re.findall(rf"{re.escape(figure)} ([\d.e+-]+)", tested[0])
    assert float(value) > least
    warm = ["runner.warmup_model_path=output/1", "runner.model_save_path=warm", "runner.epochs=1"]
    assert cli.main(["run", *command, *warm]) == 0
    assert "mode sync" in caplog.text
    assert "nothing reads it" not in caplog.text
    assert "word_count_dict_path" not in caplog.text


class Rows(nn.Module):
    """torch's own rows of ids, in place of a module of a table."""

    def __init__(self, weight_VD: torch.Tensor, columns: tuple[str, ...], pools: bool) -> None:
        super().__init__()
        self.rows = nn.Embedding.from_pretrained(weight_VD, freeze=False, padding_idx=0)
        self.columns, self.pools = columns, pools

    def forward(self, batch: Any) -> torch.Tensor:
        size = batch.num_examples
        outs = []
        for name in self.columns:
            bag = batch[name]
            ids = bag.values[int(bag.offsets[0]) : int(bag.offsets[-1])].view(size, -1)
            rows = self.rows(ids)
            outs.append(rows.sum(1) if self.pools else rows.flatten(0, 1))
        return torch.stack(outs, 1) if self.pools else outs[0]


def dataset_of(name: str, folder: Path, schema: Any) -> ExampleDataset:
    config = Config.load(folder / "config.yaml")
    reader = load_file(folder / "reader.py").RecDataset
    files = sorted(map(str, (folder / "data" / "train").iterdir()))
    return ExampleDataset(
        lambda own: reader(own, ReaderConfig(config)),
        files,
        schema=schema,
        batch_size=20,
        name=name,
    )


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("autoint", "fields.embedding"),
        ("dcn", "inputs.embedding"),
        ("escm2", "mixture.inputs.embedding"),
        ("esmm", "inputs.embedding"),
        ("lr", "fields.embedding"),
    ],
)
def test_a_model_equals_its_twin_in_plain_torch(name: str, module: str, tmp_path: Path) -> None:
    """SGD on both sides, so that a row without a gradient stays as it is."""
    folder = readers.write(name, tmp_path / name)
    sgd = {"hyper_parameters.optimizer.class": "SGD", "hyper_parameters.optimizer.learning_rate": 1}
    config = Config.load(folder / "config.yaml", [f"{key}={value}" for key, value in sgd.items()])
    torch.manual_seed(4)
    recipe = zoo.load(name).create(config)
    with embedded() as cluster:
        set_default(cluster)
        trainer = tr.Trainer.from_recipe(recipe, strategy=tr.Strategy("sync"), progress=False)
        own = recipe.model.get_submodule(module)
        keys = {own.features[0]: torch.arange(400)}
        look = tr.nn.Embedding(own.table, features=own.features[0]).eval()
        initial = look(keys)
        initial[0] = 0
        twin, twin_loss = copy.deepcopy((recipe.model, recipe.loss))
        parent, _, child = module.rpartition(".")
        rows = Rows(initial.clone(), own.features, pools=name not in ("autoint", "lr"))
        setattr(twin.get_submodule(parent), child, rows)
        optimizer = torch.optim.SGD(twin.parameters(), lr=1)
        dataset = dataset_of(name, folder, recipe.schema)
        figures = trainer.fit(dataset, epochs=2)
        losses: list[tuple[float, int]] = []
        for epoch in range(2):
            for batch in dataset:
                loss = twin_loss(
                    twin(batch), batch if recipe.label is None else batch[recipe.label]
                )
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses += [(float(loss.detach()), batch.num_examples)] * (epoch == 1)
        total = sum(loss * size for loss, size in losses) / sum(size for _, size in losses)
        assert figures["loss"] == pytest.approx(total, rel=1e-6)
        trained = look(keys)
        np.testing.assert_allclose(trained[1:], rows.rows.weight.detach()[1:], rtol=1e-5, atol=1e-6)
        assert not torch.equal(trained[1:], initial[1:])


def test_an_analogy_is_the_nearest_of_the_other_words(cluster: Cluster) -> None:
    recipe = zoo.load("word2vec").create(
        Config({"hyper_parameters": {"sparse_feature_number": 6, "sparse_feature_dim": 4}})
    )
    evaluation = recipe.evaluation
    bags = tr.data.Bags(
        ("analogy_a", "analogy_b", "analogy_c"), torch.tensor([0, 3, 1, 4, 2, 5]), torch.arange(7)
    )
    batch = evaluation.prepare(tr.data.Batch({}, bags))
    with torch.no_grad():
        scores = evaluation.model.eval()(batch)
        words = recipe.model.center.table
        rows = tr.nn.Embedding(words, features="w").eval()({"w": torch.arange(6)})
    known = torch.tensor([[0, 1, 2], [3, 4, 5]])
    a, b, c = rows[known].unbind(1)
    expected = (b - a + c) @ nn.functional.normalize(rows, dim=1).T
    expected = expected.scatter(1, known, torch.finfo(torch.float32).min)
    np.testing.assert_allclose(scores, expected, rtol=1e-5)


class Pairs(nn.Module):
    """The product of the rows of a user and an item; and of a user and each sampled item."""

    def __init__(self, rows: tr.Table) -> None:
        super().__init__()
        self.user = tr.nn.EmbeddingBag(rows, features="user")
        self.sampled = tr.nn.Embedding(rows, features="sampled")
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, batch: Any) -> torch.Tensor:
        return self.user(batch).squeeze(1) @ self.sampled(batch).T + self.bias


def test_an_auc_by_name_is_the_auc_of_use_auc(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("runner: {use_auc: True}\n")
    settings = Settings.read(Config.load(tmp_path / "config.yaml"))
    recipe = tr.Recipe(
        model=Pairs(tr.Table("rows", dim=4)),
        loss=nn.functional.mse_loss,
        optimizer=None,
        metrics=["auc"],
    )
    recipe.model.bias.requires_grad_(False)
    assert [metric.name for metric in make_trainer(recipe, settings).metrics] == ["auc"]


def test_use_auc_leaves_the_metrics_of_several_labels_as_they_are(
    cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config.yaml").write_text("runner: {use_auc: True}\n")
    settings = Settings.read(Config.load(tmp_path / "config.yaml"))
    model = Pairs(tr.Table("rows", dim=4))
    model.bias.requires_grad_(False)
    recipe = tr.Recipe(
        model=model,
        loss=nn.functional.mse_loss,
        optimizer=None,
        label=None,
        metrics=[tr.metrics.TopK(1, label="place")],
    )
    assert [metric.name for metric in make_trainer(recipe, settings).metrics] == ["top_1"]
    assert "use_auc: no effect: the metrics of the model are top_1" in caplog.text
    with pytest.raises(BadRequest, match="a Recipe with a label, or with metrics, found neither"):
        make_trainer(dataclasses.replace(recipe, metrics=()), settings)


def test_all_figures_of_a_metric_are_reported(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("runner: {print_interval: 2}\n")
    settings = Settings.read(Config.load(tmp_path / "config.yaml"))
    recipe = tr.Recipe(
        model=Pairs(tr.Table("rows", dim=4)),
        loss=nn.functional.mse_loss,
        optimizer=None,
        metrics=["auc", tr.metrics.TopK(2)],
    )
    recipe.model.bias.requires_grad_(False)
    report = report_of(make_trainer(recipe, settings), settings, "run")
    top = [f"top_2.{figure}" for figure in ("recall", "hit_rate", "ndcg", "mrr")]
    assert report.values == ("loss", "auc", *top)


def sample(batch: Any) -> Any:
    """Three items of the batch's own, as of its first example, so that they are looked up once."""
    ends = torch.full((batch.num_examples + 1,), 3)
    ends[0] = 0
    items = tr.data.Ragged(torch.tensor([1, 2, 3]), ends)
    return tr.data.Batch({**batch.columns, "sampled": items}, batch.bags)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with embedded() as cluster:
        set_default(cluster)
        yield cluster


def test_a_recipe_clips_schedules_prepares_and_evaluates_another_way(cluster: Cluster) -> None:
    model = Pairs(tr.Table("rows", dim=4, optimizer=tr.optim.SGD(lr=0.5)))
    rates: list[float] = []

    def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        def rate(step: int) -> float:
            rates.append(0.5**step)
            return rates[-1]

        return torch.optim.lr_scheduler.LambdaLR(optimizer, rate)

    recipe = tr.Recipe(
        model=model,
        loss=lambda scores, batch: nn.functional.cross_entropy(scores, batch["place"].long()),
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        label=None,
        clip_norm=1e-3,
        schedule=schedule,
        prepare=sample,
        evaluation=tr.Evaluation(model=model, metrics=[tr.metrics.TopK(2, label="place")]),
    )
    users = torch.arange(40) % 7
    columns = {"user": users, "place": (users % 3).float()}
    schema = tr.data.Schema([tr.data.Sparse("user"), tr.data.Label("place")])
    data = PreparedDataset(ArrayDataset(columns, schema=schema, batch_size=10), sample)
    trainer = tr.Trainer.from_recipe(recipe, strategy=tr.Strategy("sync"), progress=False)
    before = float(model.bias.detach())
    trainer.fit(data)
    assert abs(float(model.bias.detach()) - before) <= 1e-3 * (1 + 0.5 + 0.25 + 0.125)
    assert len(rates) % (4 + 1) == 0
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.5**4)
    figures = trainer.evaluate(data, model=recipe.evaluation)
    assert figures["examples"] == 40
    assert 0 <= figures["top_2.recall"] <= 1
    assert "loss" not in figures
    named = tr.Evaluation(model=model, metrics=["gauc"])
    with pytest.raises(BadRequest, match="a label column for each metric"):
        trainer.evaluate(data, model=named)
    assert trainer.evaluate(data, model=tr.Evaluation(model=model))["examples"] == 40
    nameless = tr.Evaluation(model=model, metrics=[tr.metrics.TopK(2)])
    with pytest.raises(BadRequest, match="a label column for each metric"):
        trainer.evaluate(data, model=nameless)
