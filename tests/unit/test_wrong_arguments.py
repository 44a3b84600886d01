"""Arguments of other types than the public constructors take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import trireme as tr
from trireme import fleet
from trireme.errors import BadRequest, check_flags
from trireme.job.default import set_default
from trireme.job.embedded import embedded
from trireme.nn import Embedding, EmbeddingBag


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = tr.Table("t", dim=2)
        self.rows = EmbeddingBag(self.table, features=["a"])
        self.head = torch.nn.Linear(2, 1)


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with embedded(threads=1) as cluster:
        set_default(cluster)
        yield Model()


class Other(torch.nn.Module):
    """A metric of another library, with a name that is no attribute."""

    def update(self, *_: Any) -> None: ...

    def __repr__(self) -> str:
        return "another's"


class Count(tr.metrics.Metric):
    """A metric of one's own: only what every metric needs."""

    name = "count"

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)
        self.reset()

    def update(self, scores: Any, labels: Any) -> None:
        self.sum += len(scores)

    def state(self) -> dict[str, Any]:
        return {"sum": np.array([self.sum])}

    def merge(self, state: Any) -> None:
        self.sum += int(state["sum"][0])

    def compute(self) -> float:
        return self.sum

    def reset(self) -> None:
        self.sum = 0


class Floats(Count):
    def state(self) -> Any:
        return {"sum": 1.0}


class Scaled(torch.nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, outputs: torch.Tensor, _: Any) -> torch.Tensor:
        return (outputs * self.scale).mean()


def evaluate(used: Model, metric: Count) -> dict[str, float]:
    trained = trainer(used, metrics=[metric], progress=False)
    batch = {"a": torch.tensor([1, 2, 3]), "label": torch.zeros(3)}
    return trained.evaluate([batch], model=tr.Evaluation(model=used.rows, metrics=[metric]))


def sgd(model: Model) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def trainer(used: Model, **options: Any) -> tr.Trainer:
    options = {"loss": len, **options}
    return tr.Trainer(options.pop("model", used), sgd(used), **options)


CASES: list[tuple[Callable[[Model], Any], str]] = [
    (
        lambda m: tr.TableView(m.table, "a", 5),
        "expected values of feature .a. as a list, found 5",
    ),
    (lambda m: tr.TableView(m.table, "a", "xy"), "as a list, found 'xy'; the row of one is"),
    (lambda m: tr.TableView(m.table, "a", None), "as a list, found None"),
    (lambda m: tr.TableView(m.table, ["a"]), r"expected feature as a name, .*found \['a'\]"),
    (lambda m: tr.TableView(m.table, cluster=5), "expected cluster as what tr.init.. returns"),
    (lambda m: tr.Table(5, dim=2), "Table: expected name as a string, found 5"),
    (lambda m: tr.Table("x", dim=2, seed=None), "expected seed as a whole number, found None"),
    (lambda m: tr.Table("x", dim=2, initializer="normal"), "initializer as one of .*'normal'"),
    (
        lambda m: tr.Table("x", dim=2, admit=3),
        r"admit as one of .* tr.policy.CountFilter\(2\), .* 3",
    ),
    (lambda m: tr.Table("x", dim=2, policy="ttl"), r"policy as one of .*\(ttl_s=86400\), .* 'ttl'"),
    (lambda m: EmbeddingBag(m.table, features=5), "features as a name or a list of names, found 5"),
    (
        lambda m: Embedding(m.table, features=["a"], padding_key="0"),
        "padding_key as a whole",
    ),
    (
        lambda m: tr.DistributedOptimizer(m, sgd(m)),
        "model as a torch.nn.Module, found SGD",
    ),
    (lambda m: tr.DistributedOptimizer(sgd(m), m, strategy="sync"), "a Strategy, such as .*'sync'"),
    (lambda m: trainer(m, model=Model), "Trainer: expected model as .*, found the class Model"),
    (lambda m: trainer(m, metrics=[1]), "expected a metric of .*, or the name of one, found 1"),
    (lambda m: trainer(m, metrics=[Other()]), "a metric of trireme.metrics, .* found another's"),
    (lambda m: trainer(m, metrics=[Other()]), "without name, output, label, columns, state, merge"),
    (lambda m: trainer(m, metrics=[Count(columns=())]), r"with columns \(\), no mapping of"),
    (lambda m: evaluate(m, Floats(label="label")), "state.. as a dict of names to NumPy arrays"),
    (lambda m: trainer(m, loss=Scaled()), "loss without parameters of its own, found scale"),
    (lambda m: m.rows.requires_grad_(False), r".detach\(\) what the module returns to freeze"),
    (lambda m: trainer(m).set_time("2026-11-05"), "seconds since 1970, .*, found '2026-11-05'"),
    (lambda m: trainer(m).set_time(lambda: None), "expected seconds since 1970, .*, found None"),
    (lambda m: trainer(m, threads="2"), "expected threads as an integer >= 1, found '2'"),
    (lambda m: trainer(m, blocks=64), "expected blocks as tr.Blocks.*, found 64"),
    (lambda m: tr.prefetch([], Model), "prefetch: expected model as .*, found the class Model"),
    (lambda m: tr.data.ArrayDataset({"a": [1]}, schema=["a"]), r"expected schema as a Schema"),
    (lambda m: tr.data.ArrayDataset({"a": [1]}, batch_size="8"), "batch_size as an integer >= 1"),
    (lambda m: tr.data.ArrayDataset({"a": [1]}, seed="8"), "seed as an integer >= 0, found '8'"),
    (
        lambda m: tr.data.ArrayDataset({"a": [1]}, seed=-1),
        "expected seed as an integer >= 0, found -1",
    ),
    (lambda m: tr.optim.SGD(lr="1e-3"), "SGD: expected lr as a finite number >= 0, found '1e-3'"),
    (
        lambda m: tr.optim.SGD(momentum=True),
        "SGD: expected momentum as a finite number .*, found True",
    ),
    (
        lambda m: tr.EarlyStopping("loss", min_delta="0"),
        "expected min_delta as a finite number >= 0",
    ),
    (
        lambda m: tr.Checkpoints("x", every_s="60"),
        "expected every_s as a finite number > 0, found '60'",
    ),
    (
        lambda m: tr.nn.DataNorm(3, eps="0"),
        "DataNorm: expected eps as a finite number >= 0, found '0'",
    ),
    (lambda m: tr.nn.DataNorm(3, decay=2), r"decay as a finite number in \(0, 1\], found 2"),
    (
        lambda m: fleet.AdamD2Sum(m.parameters(), lr="1"),
        "AdamD2Sum: expected lr as a finite number",
    ),
    (lambda m: tr.data.SkipGramDataset([], batch_size=2.5), "batch_size as an integer >= 1"),
    (
        lambda m: tr.optim.Adagrad(eps=None),
        "Adagrad: expected eps as a finite number >= 0, found None",
    ),
    (
        lambda m: tr.optim.FTRL(l1=[1.0]),
        r"FTRL: expected l1 as a finite number >= 0, found \[1.0\]",
    ),
    (lambda m: tr.optim.Adam(betas=()), r"expected betas two values in \[0, 1\), found \(\)"),
    (lambda m: tr.optim.Adam(betas=(0.9, 0.9, 0.9)), r"two values .*, found \(0.9, 0.9, 0.9\)"),
    (lambda m: tr.optim.Adam(betas=0.9), r"expected betas two values .*, found 0.9"),
    (lambda m: tr.optim.SGD(bounds=3), r"bounds \(low, high\) with low <= high, found 3"),
    (lambda m: tr.initializer.Uniform("0", 1), "Uniform: expected low as a number, found '0'"),
    (lambda m: tr.metrics.TopK(1.5), "TopK: expected k as an integer >= 1, found 1.5"),
    (lambda m: tr.metrics.AUC(num_buckets="8"), "AUC: expected num_buckets as a whole number"),
    (lambda m: tr.metrics.GAUC(max_pairs=1e6), "GAUC: expected max_pairs as an integer >= 1"),
    (lambda m: tr.metrics.Accuracy("0.5"), "Accuracy: expected threshold as a finite number in"),
    (lambda m: tr.policy.CountFilter(2**31), r"expected n from 1 to 2\*\*31 - 1, found"),
    (lambda m: tr.data.Schema(5), "expected fields as a list of fields, found 5"),
    (lambda m: tr.data.Schema([tr.data.Dense("a", "2")]), "dim as an integer >= 1, found '2'"),
    (lambda m: tr.data.Schema([tr.data.Label()], format="csv"), "a format of files, or None"),
    (lambda m: tr.Strategy(["sync"]), r"Strategy: expected mode as one of .*, found \['sync'\]"),
    (lambda m: tr.Checkpoints("x", every_steps="5"), "every_steps as an integer >= 1, found '5'"),
    (lambda m: tr.metrics.TopK(2.5), "TopK: expected k as an integer >= 1, found 2.5"),
    (lambda m: tr.train_passes(trainer(m), [], poll_s="9"), "poll_s as a finite number > 0"),
    (lambda m: tr.train_passes(trainer(m), [], timeout_s=0), "timeout_s as a finite number > 0"),
    (lambda m: tr.train_passes(trainer(m), [], prefetch="no"), "prefetch as True or False"),
    (lambda m: tr.EarlyStopping("loss", patience="3"), "patience as an integer >= 1, found '3'"),
]


@pytest.mark.parametrize(("make", "message"), CASES, ids=[message[:40] for _, message in CASES])
def test_an_argument_of_another_type_is_refused_by_name(
    make: Callable[[Model], Any], message: str, model: Model
) -> None:
    with pytest.raises(BadRequest, match=message):
        make(model)


def test_a_time_that_is_refused_leaves_the_one_before(model: Model) -> None:
    refusing = trainer(model)
    refusing.set_time(86_400)
    with pytest.raises(BadRequest):
        refusing.set_time("2026-11-05")  # type: ignore[arg-type]
    assert refusing.optimizer.data_time.seconds() == 86_400


DATA = {"a": [1], "label": [1.0]}
FLAGS: list[tuple[Callable[[Model, Any], Any], str]] = [
    (lambda m, flag: tr.Table("x", dim=2, salt=flag), "salt"),
    (lambda m, flag: tr.Table("x", dim=2, ssd=flag), "ssd"),
    (lambda m, flag: tr.optim.Adagrad(shared=flag), "shared"),
    (lambda m, flag: tr.optim.SGD(momentum=0.9, nesterov=flag), "nesterov"),
    (lambda m, flag: tr.DistributedOptimizer(sgd(m), m, fresh=flag), "fresh"),
    (lambda m, flag: trainer(m, fresh=flag), "fresh"),
    (lambda m, flag: trainer(m, progress=flag), "progress"),
    (lambda m, flag: trainer(m, skip_not_finite=flag), "skip_not_finite"),
    (lambda m, flag: trainer(m).fit(DATA, resume=flag), "resume"),
    (lambda m, flag: trainer(m).fit(DATA, check_nan=flag), "check_nan"),
    (lambda m, flag: trainer(m).evaluate(DATA, labels=flag), "labels"),
    (lambda m, flag: trainer(m).evaluate(DATA, check_nan=flag), "check_nan"),
    (lambda m, flag: trainer(m).predict(DATA, check_nan=flag), "check_nan"),
    (lambda m, flag: tr.data.ArrayDataset(DATA, shuffle=flag), "shuffle"),
    (lambda m, flag: tr.data.ArrayDataset(DATA, drop_last=flag), "drop_last"),
    (lambda m, flag: tr.data.Schema([tr.data.Sparse("a", hashed=flag)]), "hashed"),
    (lambda m, flag: tr.metrics.AUC(from_logits=flag), "from_logits"),
    (lambda m, flag: files_of(tr.data.QueueDataset, drop_last=flag), "drop_last"),
    (lambda m, flag: files_of(tr.data.QueueDataset, own_files=flag), "own_files"),
    (lambda m, flag: files_of(tr.data.InMemoryDataset, drop_last=flag), "drop_last"),
]
WORDS: list[tuple[Callable[[Model, Any], Any], str]] = [
    (lambda m, word: tr.Table("x", dim=2, dtype=word), "expected dtype as one of"),
    (lambda m, word: tr.Table("x", dim=2, absent=word), "expected absent as one of"),
    (lambda m, word: EmbeddingBag(m.table, ["a"], mode=word), "expected mode as one of"),
    (
        lambda m, word: tr.nn.sequence_pool(torch.zeros(1, 2), torch.tensor([0, 1]), word),
        "expected mode as one of",
    ),
    (lambda m, word: trainer(m).save("x", mode=word), "save: expected mode full"),
    (lambda m, word: trainer(m).load("x", dense=word), "load: expected dense as one of strict"),
]


def files_of(kind: Any, **options: Any) -> Any:
    return kind("x", schema=tr.data.criteo(), batch_size=8, **options)


@pytest.mark.parametrize("flag", [np.array([1, 0]), torch.tensor([True]), "no", 2], ids=repr)
@pytest.mark.parametrize(("make", "name"), FLAGS, ids=[name for _, name in FLAGS])
def test_a_flag_is_true_or_false(
    make: Callable[[Model, Any], Any], name: str, flag: Any, model: Model
) -> None:
    with pytest.raises(BadRequest, match=rf"expected {name} as True or False, found"):
        make(model, flag)


@pytest.mark.parametrize(
    "flag", [True, 0, None, np.bool_(1), np.array(False), torch.tensor(1)], ids=repr
)
def test_a_flag_may_be_of_another_library(flag: Any) -> None:
    check_flags("x", flag=flag)


@pytest.mark.parametrize("word", [np.array(["sum", "mean"]), np.array([1, 0])], ids=repr)
@pytest.mark.parametrize(("make", "message"), WORDS, ids=[message for _, message in WORDS])
def test_an_array_is_no_word(
    make: Callable[[Model, Any], Any], message: str, word: Any, model: Model
) -> None:
    with pytest.raises(BadRequest, match=message):
        make(model, word)


def test_a_metric_of_ones_own_needs_a_name_and_methods_alone(model: Model) -> None:
    assert evaluate(model, Count(label="label"))["count"] == 3


def test_a_loss_may_have_parameters_of_the_model_and_frozen_ones(model: Model) -> None:
    trainer(model, loss=Scaled().requires_grad_(False))
    model.loss = Scaled()
    trainer(model, loss=model.loss)
