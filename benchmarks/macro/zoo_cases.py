"""The cases of the zoo: the data, sizes and score of each model."""

from __future__ import annotations

import functools
import runpy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import trireme as tr
from benchmarks.harness import Absent
from benchmarks.macro import zoo_text
from examples.planted import behaviour as planted
from trireme.data import ArrayDataset, Batch, Dense, Label, Ragged, Schema, SkipGramDataset, Sparse
from trireme.models import (
    CRITEO_FEATURES,
    DCN,
    DIFM,
    DIN,
    DLRM,
    ESMM,
    FFM,
    FLEN,
    FM,
    LR,
    AutoInt,
    CtrDnn,
    DCNv2,
    DeepFEFM,
    DeepFM,
    GateNet,
    SkipGram,
    SlotDnn,
    TwoTower,
    WideDeep,
    XDeepFM,
)
from trireme.models.din import HISTORY, TARGET
from trireme.models.esmm import esmm_loss
from trireme.models.two_tower import ITEM, USER, InBatchSoftmax
from trireme.models.word2vec import skip_gram_loss

_ADULT = Path(__file__).resolve().parents[2] / "examples" / "adult.py"
_DIM, _FIELD_DIM = 8, 4
_LAYERS = (64, 32)
_ESMM_FEATURES = ("a", "b", "c", "d")
_K = 20

Make = Callable[[int], nn.Module]


@dataclass(frozen=True)
class Place:
    """The place of real data; smoke mode uses planted data instead."""

    is_smoke: bool
    folder: Path


@dataclass(frozen=True)
class Data:
    """train: a dataset with streams. test: all of it. items: of two towers, all of them."""

    train: Any
    test: list[Batch]
    items: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """A model, its data and its score.

    make: the model, its tables seeded; dense weights are torch's to seed.
    data: by place and the seed of the order.
    score: of a trained model in evaluation mode.
    """

    make: Make
    data: Callable[[Place, int], Data]
    score: Callable[[nn.Module, Data], float]
    loss: Callable[[Any, Any], Tensor] = nn.functional.binary_cross_entropy_with_logits
    label: str | None = "label"
    unit: str = "auc"
    epochs: int = 3
    lr: float = 1e-3


def auc(label: str = "label", output: str | None = None) -> Callable[[nn.Module, Data], float]:
    def score(model: nn.Module, data: Data) -> float:
        metric = tr.metrics.AUC()
        for batch in data.test:
            outputs, labels = model(batch), batch[label]
            assert isinstance(labels, Tensor)
            metric.update(outputs if output is None else outputs[output], labels)
        return metric.compute()

    return score


def held_out_loss(model: nn.Module, data: Data) -> float:
    sums = [float(skip_gram_loss(model(batch), batch)) * batch.num_examples for batch in data.test]
    return sum(sums) / sum(batch.num_examples for batch in data.test)


def recall(model: nn.Module, data: Data) -> float:
    """The share of choices whose item is among the nearest 20."""
    assert isinstance(model, TwoTower)
    vectors, hits = model.item(data.items), []
    for batch in data.test:
        nearest = (model.user(batch) @ vectors.T).topk(_K).indices
        ids = batch["item_id"]
        assert isinstance(ids, Ragged)
        chosen = ids.values[int(ids.offsets[0]) : int(ids.offsets[-1])]
        hits.append((data.items["item_id"][nearest] == chosen[:, None]).any(1))
    return float(torch.cat(hits).float().mean())


# ---- data ----

_SCRIPT = runpy.run_path(str(_ADULT))
_FEATURES = tuple(name for name in _SCRIPT["FEATURES"] if "_x_" not in name)
_NUM_DENSE = len(_SCRIPT["NUMBERS"])


def adult(place: Place, seed: int) -> Data:
    """The census without the crosses of examples/adult.py, which models must learn."""
    train, test = _census(place)
    schema = Schema([Label(), Dense("dense", train["dense"].shape[1]), *map(Sparse, _FEATURES)])
    return _arrays(train, test, schema, batch_size=256, seed=seed)


_ABOUT_MARRIAGE = ("marital_status", "relationship")
_OF_THE_MARRIED = tuple(name for name in _FEATURES if name not in _ABOUT_MARRIAGE)


def marriages(place: Place, seed: int) -> Data:
    """The census: the click is a marriage, the conversion a marriage and a high income."""
    fields = [Label("click"), Label("conversion"), Dense("dense", _NUM_DENSE)]
    schema = Schema([*fields, *map(Sparse, _OF_THE_MARRIED)])
    parts = []
    for columns in _census(place):
        married = np.char.startswith(columns["marital_status"], "Married")
        both = married & (columns["label"] > 0)
        named = {name: columns[name] for name in (*_OF_THE_MARRIED, "dense")}
        parts.append({**named, "click": married, "conversion": both})
    return _arrays(*parts, schema, batch_size=256, seed=seed)


@functools.cache
def _census(place: Place) -> tuple[dict[str, Any], dict[str, Any]]:
    if place.is_smoke:
        rng = np.random.default_rng(1)
        columns: dict[str, Any] = {name: rng.integers(0, 9, 600) for name in _FEATURES}
        columns = {name: values.astype(str) for name, values in columns.items()}
        columns["dense"] = rng.normal(size=(600, _NUM_DENSE))
        columns["label"] = rng.integers(0, 2, 600)
        return columns, columns
    paths = [place.folder / "adult" / name for name in ("adult.data", "adult.test")]
    for path in paths:
        if not path.is_file():
            raise Absent(f"expected the census in {path.parent}, found no {path.name}")
    train, test = (_SCRIPT["prepare"](_SCRIPT["read_csv"](str(path))) for path in paths)
    mean, spread = train["dense"].mean(0), np.maximum(train["dense"].std(0), 1e-6)
    for part in (train, test):
        part["dense"] = (part["dense"] - mean) / spread
    return train, test


def criteo(place: Place, seed: int) -> Data:
    """The first rows of Criteo's own data: four fifths to train on."""
    whole = _criteo_rows(place)
    cut = whole.num_examples * 4 // 5
    fields = (*tr.data.criteo().fields, tr.data.Show())
    train, test = (_slice(whole, *part) for part in ((0, cut), (cut, whole.num_examples)))
    for part in (train, test):
        part["show"] = torch.ones(len(part["label"]))
    return _arrays(train, test, Schema(fields), batch_size=64, seed=seed)


@functools.cache
def _criteo_rows(place: Place) -> Batch:
    schema = tr.data.criteo()
    if place.is_smoke:
        rng = np.random.default_rng(2)
        columns: dict[str, Any] = {name: rng.integers(0, 99, 400) for name in schema.sparse}
        columns |= {"label": rng.integers(0, 2, 400), "dense": rng.random((400, 13))}
        dataset: Any = ArrayDataset(columns, schema=Schema(schema.fields), batch_size=400)
    else:
        path = place.folder / "criteo_tiny.tsv"
        if not path.is_file():
            raise Absent(f"expected rows of Criteo's data in {path}, found none")
        dataset = tr.data.QueueDataset(str(path), schema=schema, batch_size=10_000)
    batch: Batch = next(iter(dataset))
    return batch


def _slice(batch: Batch, begin: int, end: int) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    for name, column in batch.items():
        if isinstance(column, Ragged):
            columns[name] = Ragged(column.values, column.offsets[begin : end + 1])
        else:
            columns[name] = column[begin:end]
    return columns


def histories(place: Place, seed: int) -> Data:
    schema = Schema([*map(Sparse, (*HISTORY, *TARGET)), Label()])
    train, test = (planted.clicks_after_history(n, seed=s) for n, s in _sizes(place, 20_000))
    return _arrays(train.columns, test.columns, schema, batch_size=200, seed=seed)


def conversions(place: Place, seed: int) -> Data:
    schema = Schema([Label("click"), Label("conversion"), *map(Sparse, _ESMM_FEATURES)])
    train, test = (
        planted.clicks_and_conversions(n, seed=s, features=_ESMM_FEATURES)
        for n, s in _sizes(place, 40_000)
    )
    return _arrays(train.columns, test.columns, schema, batch_size=200, seed=seed)


def chosen_items(place: Place, seed: int) -> Data:
    schema = Schema([*map(Sparse, (*USER, *ITEM)), Dense("item_share")])
    train, test = (planted.choices(n, seed=s, users=200) for n, s in _sizes(place, 40_000))
    data = _arrays(train.columns, test.columns, schema, batch_size=256, seed=seed)
    items = {name: torch.as_tensor(column) for name, column in train.items.items()}
    return Data(data.train, data.test, items)


def next_words(place: Place, seed: int) -> Data:
    """Prediction of the next word from a word."""
    schema = Schema([*map(Sparse, (*USER, *ITEM)), Dense("item_share")])
    words, *texts = zoo_text.parts(zoo_text.paragraphs(place.is_smoke))
    train, test = (zoo_text.next_words(words, text) for text in texts)
    data = _arrays(train, test, schema, batch_size=256, seed=seed)
    items = {name: torch.as_tensor(column) for name, column in words.items.items()}
    return Data(data.train, data.test, items)


def words_after_others(place: Place, seed: int) -> Data:
    """Prediction whether a word follows some others, or was drawn at random."""
    schema = Schema([*map(Sparse, (*HISTORY, *TARGET)), Label()])
    words, *texts = zoo_text.parts(zoo_text.paragraphs(place.is_smoke))
    train, test = (zoo_text.words_after_others(words, t, i) for i, t in enumerate(texts))
    return _arrays(train, test, schema, batch_size=200, seed=seed)


def words(place: Place, seed: int) -> Data:
    """Reference pages that come with Python. The test has newly drawn pairs and negatives."""
    dataset = SkipGramDataset(zoo_text.paragraphs(place.is_smoke), batch_size=1024, seed=seed)
    return Data(dataset, list(dataset.stream(0, 1, epoch=10_000)))


def _sizes(place: Place, num: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """(examples, seed) of training and of the test."""
    return ((400, 1), (200, 2)) if place.is_smoke else ((num, 1), (10_000, 2))


def _arrays(
    train: Mapping[str, Any], test: Mapping[str, Any], schema: Schema, *, batch_size: int, seed: int
) -> Data:
    options: dict[str, Any] = {"schema": schema, "batch_size": batch_size}
    shuffled = ArrayDataset(train, shuffle=True, seed=seed, **options)
    return Data(shuffled, list(ArrayDataset(test, **options)))


# ---- models ----

_ADAGRAD = tr.optim.Adagrad(lr=0.05, initial_accumulator_value=0.1)
_ADAM = tr.optim.Adam(lr=2e-3)


def _clicks(
    rule: tr.optim.Rule, features: Sequence[str] = CRITEO_FEATURES, num_dense: int = 13
) -> dict[str, Make]:
    """The click models on the same inputs; FLEN on the features alone, in two fields."""
    inputs: dict[str, Any] = {"features": features, "num_dense": num_dense}
    num = len(features) + num_dense

    def table(seed: int, dim: int = _DIM, name: str = "embedding") -> tr.Table:
        return tr.Table(name, dim=dim, optimizer=rule, seed=seed)

    deep = {"layers": _LAYERS, **inputs}
    return {
        "lr": lambda seed: LR(table(seed, 1), **inputs),
        "fm": lambda seed: FM(table(seed, 1 + _DIM), **inputs),
        "ctr_dnn": lambda seed: CtrDnn(table(seed), **deep),
        "wide_deep": lambda seed: WideDeep(table(seed, 1, "wide"), table(seed), **deep),
        "deepfm": lambda seed: DeepFM(table(seed, 1 + _DIM), **deep),
        "dcn": lambda seed: DCN(table(seed), num_cross=2, **deep),
        "xdeepfm": lambda seed: XDeepFM(table(seed, 1 + _DIM), interaction=(32, 16), **deep),
        "autoint": lambda seed: AutoInt(table(seed), attention=(32, 32), **inputs),
        "ffm": lambda seed: FFM(table(seed, 1 + num * _FIELD_DIM), **inputs),
        "deepfefm": lambda seed: DeepFEFM(table(seed, 1 + _DIM), **deep),
        "difm": lambda seed: DIFM(table(seed, 1 + _DIM), dense_layers=(32,), **deep),
        "gatenet": lambda seed: GateNet(table(seed), **deep),
        "flen": lambda seed: FLEN(
            table(seed, 1 + _DIM), fields=[features[::2], features[1::2]], layers=_LAYERS
        ),
        "dcn_v2": lambda seed: DCNv2(table(seed), rank=16, experts=2, stacked=True, **deep),
        "dlrm": lambda seed: DLRM(table(seed), bottom=(32, _DIM), top=_LAYERS, **inputs),
    }


def _table(name: str, seed: int, dim: int = _DIM, **options: Any) -> tr.Table:
    return tr.Table(name, dim=dim, optimizer=_ADAM, seed=seed, **options)


def _din(seed: int) -> nn.Module:
    return DIN(_table("item", seed), _table("category", seed), attention=(32,), layers=(32,))


def _history_lr(seed: int) -> nn.Module:
    return LR(_table("weights", seed, 1), features=(*HISTORY, *TARGET), num_dense=0)


def _esmm(seed: int) -> nn.Module:
    return ESMM(_table("embedding", seed), features=_ESMM_FEATURES, num_dense=0, layers=(64, 32))


def _esmm_married(seed: int) -> nn.Module:
    rows = tr.Table("embedding", dim=_DIM, optimizer=_ADAGRAD, seed=seed)
    return ESMM(rows, features=_OF_THE_MARRIED, num_dense=_NUM_DENSE, layers=_LAYERS)


def _lr_married(seed: int) -> nn.Module:
    rows = tr.Table("weights", dim=1, optimizer=_ADAGRAD, seed=seed)
    return LR(rows, features=_OF_THE_MARRIED, num_dense=_NUM_DENSE)


def _conversion_lr(seed: int) -> nn.Module:
    return LR(_table("weights", seed, 1), features=_ESMM_FEATURES, num_dense=0)


def _slot_dnn(seed: int) -> nn.Module:
    return SlotDnn(_table("embedding", seed), features=tr.data.criteo().sparse, layers=_LAYERS)


def _lr_ids(seed: int) -> nn.Module:
    """LR on the inputs of slot_dnn."""
    return LR(_table("embedding", seed, 1), features=tr.data.criteo().sparse, num_dense=0)


def _two_tower(seed: int) -> nn.Module:
    return TwoTower(_table("user", seed, 16), _table("item", seed, 16), layers=(64, 32))


def _skip_gram(seed: int) -> nn.Module:
    start = tr.initializer.Uniform(-1 / 64, 1 / 64)
    zeros = tr.initializer.Constant(0.0)
    return SkipGram(
        _table("words", seed, 32, initializer=start),
        _table("contexts", seed, 32, initializer=zeros),
    )


CASES: dict[str, Case] = {
    **{
        f"{name}_adult": Case(make, adult, auc())
        for name, make in _clicks(_ADAGRAD, features=_FEATURES, num_dense=_NUM_DENSE).items()
    },
    **{
        f"{name}_criteo": Case(make, criteo, auc(), epochs=5)
        for name, make in {**_clicks(_ADAM), "lr_ids": _lr_ids, "slot_dnn": _slot_dnn}.items()
    },
    "lr_history": Case(_history_lr, histories, auc()),
    "din_history": Case(_din, histories, auc()),
    "lr_conversion": Case(_conversion_lr, conversions, auc("conversion"), label="conversion"),
    "esmm_conversion": Case(
        _esmm, conversions, auc("conversion", "ctcvr"), loss=esmm_loss, label=None
    ),
    "two_tower_choice": Case(
        _two_tower, chosen_items, recall, loss=InBatchSoftmax(), label=None, unit=f"recall@{_K}"
    ),
    "lr_married": Case(_lr_married, marriages, auc("conversion"), label="conversion"),
    "esmm_married": Case(
        _esmm_married, marriages, auc("conversion", "ctcvr"), loss=esmm_loss, label=None
    ),
    "lr_text": Case(_history_lr, words_after_others, auc()),
    "din_text": Case(_din, words_after_others, auc()),
    "two_tower_text": Case(
        _two_tower, next_words, recall, loss=InBatchSoftmax(), label=None, unit=f"recall@{_K}"
    ),
    "word2vec_text": Case(
        _skip_gram, words, held_out_loss, loss=skip_gram_loss, label=None, unit="loss"
    ),
}
