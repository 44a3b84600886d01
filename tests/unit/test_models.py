"""The click models learn a generated signal, follow their papers, and use every option."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.export import Dim

import trireme as tr
from trireme.data import Batch
from trireme.errors import BadRequest
from trireme.job.default import set_default
from trireme.job.embedded import embedded
from trireme.models import DLRM, FM, LR, CtrDnn, DCNv2, DeepFM, SlotDnn, WideDeep
from trireme.models.layers import CrossLayer, CrossMixture, pairwise_products, sum_of_products

FEATURES = ("a", "b")
NUM_IDS, NUM_DENSE = 50, 3
SCHEMA = tr.data.Schema(
    [tr.data.Label(), tr.data.Dense("dense", NUM_DENSE), *map(tr.data.Sparse, FEATURES)]
)


def table(name: str = "embedding", dim: int = 4) -> tr.Table:
    return tr.Table(name, dim=dim, optimizer=tr.optim.Adam(lr=0.03))


Make = Callable[..., nn.Module]
MODELS: dict[str, Make] = {
    "lr": lambda **options: LR(table(dim=1), **options),
    "fm": lambda **options: FM(table(dim=5), **options),
    "ctr_dnn": lambda **options: CtrDnn(table(), **{"layers": (16, 8), **options}),
    "wide_deep": lambda **options: WideDeep(
        table("wide", 1), table(), **{"layers": (16, 8), **options}
    ),
    "deepfm": lambda **options: DeepFM(table(dim=5), **{"layers": (16, 8), **options}),
    "dcn_v2": lambda **options: DCNv2(table(), **{"layers": (16, 8), **options}),
    "dlrm": lambda **options: DLRM(table(), **{"bottom": (8, 4), "top": (16, 8), **options}),
}
OPTIONS: dict[str, Any] = {"features": FEATURES, "num_dense": NUM_DENSE}


def planted(num_examples: int, seed: int) -> tuple[tr.data.ArrayDataset, float]:
    """Labels of logit = u[a] + v[b] + dense . w, and the AUC that the logits themselves reach."""
    fixed = np.random.default_rng(7)
    u, v = 2 * fixed.normal(size=(2, NUM_IDS))
    w = fixed.normal(size=NUM_DENSE)
    rng = np.random.default_rng(seed)
    a, b = rng.integers(0, NUM_IDS, (2, num_examples))
    dense = rng.normal(size=(num_examples, NUM_DENSE)).astype(np.float32)
    logits = u[a] + v[b] + dense @ w
    labels = (rng.random(num_examples) < 1 / (1 + np.exp(-logits))).astype(np.float32)
    best = tr.metrics.AUC()
    best.update(torch.from_numpy(logits).float(), torch.from_numpy(labels))
    # One table holds both features: their ids must differ.
    columns = {"label": labels, "dense": dense, "a": a, "b": b + NUM_IDS}
    return tr.data.ArrayDataset(columns, schema=SCHEMA, batch_size=100), best.compute()


@pytest.mark.parametrize("name", MODELS)
def test_a_model_learns_a_planted_signal(name: str) -> None:
    torch.manual_seed(0)
    train, _ = planted(8000, seed=1)
    test, auc_possible = planted(4000, seed=2)
    model = MODELS[name](**OPTIONS)
    with embedded() as cluster:
        trainer = tr.Trainer(
            model,
            torch.optim.Adam(model.parameters(), lr=1e-2),
            loss=nn.functional.binary_cross_entropy_with_logits,
            metrics=[tr.metrics.AUC()],
            progress=False,
            cluster=cluster,
        )
        assert trainer.evaluate(test)["auc"] < 0.6
        trainer.fit(train, epochs=2)
        assert auc_possible - 0.03 < trainer.evaluate(test)["auc"] < auc_possible + 0.001


@pytest.mark.parametrize("name", MODELS)
def test_every_option_shapes_the_model(name: str) -> None:
    def shapes(**changed: Any) -> list[tuple[int, ...]]:
        model = MODELS[name](**{**OPTIONS, **changed})
        rows = [part.table.dim for part in model.modules() if hasattr(part, "lookup_specs")]
        return [(len(rows), *rows), *(tuple(p.shape) for p in model.parameters())]

    changes: dict[str, Any] = {"num_dense": 2}
    if name not in ("lr", "fm"):
        changes |= {"features": ("a",)}
    if name in ("ctr_dnn", "wide_deep", "deepfm", "dcn_v2"):
        changes |= {"layers": (16,)}
    if name == "dcn_v2":
        changes |= {"num_cross": 3, "rank": 2, "stacked": True}
        assert shapes(rank=2, experts=2) != shapes(rank=2)
    if name == "dlrm":
        changes |= {"bottom": (7, 4), "top": (16,)}
    for option, value in changes.items():
        assert shapes(**{option: value}) != shapes(), option


@pytest.mark.parametrize("name", [name for name in MODELS if name != "dlrm"])
def test_a_model_without_dense_columns_gives_one_logit_per_example(name: str) -> None:
    model = MODELS[name](features=FEATURES, num_dense=0)
    with embedded() as cluster:
        set_default(cluster)
        batch = {name: torch.arange(6) for name in FEATURES}
        assert model.eval()(batch).shape == (6,)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_reads_the_dense_column_by_its_name(name: str) -> None:
    model = MODELS[name](features=FEATURES, num_dense=NUM_DENSE, dense="numbers").eval()
    batch = {**{f: torch.arange(6) for f in FEATURES}, "numbers": torch.ones(6, NUM_DENSE)}
    with embedded() as cluster:
        set_default(cluster)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1)  # so that the numbers have an effect
        first = model(batch)
        batch["numbers"] = batch["numbers"] * 2
        assert not torch.equal(model(batch), first)


@pytest.mark.parametrize("name", MODELS)
def test_forward_is_exported_and_serves_batches_of_other_sizes(name: str) -> None:
    model = MODELS[name](**OPTIONS).eval()
    with embedded() as cluster:
        planner = tr.nn.Planner(model, pool=cluster.pool)

        def attached(num: int) -> Batch:
            batch = next(iter(planted(num, seed=num)[0]))
            plan = planner.plan(batch)
            rows = {p.table.class_id: torch.randn(len(p.keys), p.table.dim) for p in plan.tables}
            plan.attach(batch, rows, train=False)
            return batch

        batch = attached(20)
        shapes = torch.export.ShapesCollection()
        for tensor in torch.utils._pytree.tree_leaves(batch):
            if tensor is not None and tensor.numel() > 0:
                shapes[tensor] = [Dim.AUTO] + [Dim.STATIC] * (tensor.dim() - 1)
        exported = torch.export.export(model, (batch,), dynamic_shapes=shapes).module()
        for num in (20, 33):
            batch = attached(num)
            torch.testing.assert_close(exported(batch), model(batch))


def test_the_sum_of_products_is_that_of_all_pairs() -> None:
    vectors = torch.randn(5, 4, 3, dtype=torch.float64)
    pairs = [(vectors[:, i] * vectors[:, j]).sum(1) for i in range(4) for j in range(i)]
    torch.testing.assert_close(sum_of_products(vectors), sum(pairs))
    torch.testing.assert_close(pairwise_products(vectors), torch.stack(pairs, 1))


def test_cross_layers_are_those_of_the_paper() -> None:
    x0, x = torch.randn(2, 5, 6)
    full = CrossLayer(6)
    expected = x0 * (x @ full.up.weight.T + full.up.bias) + x
    torch.testing.assert_close(full(x0, x), expected)
    low = CrossLayer(6, rank=2)
    assert low.down is not None
    expected = x0 * (x @ (low.up.weight @ low.down.weight).T + low.up.bias) + x
    torch.testing.assert_close(low(x0, x), expected)
    mixture = CrossMixture(6, rank=2, experts=3)
    nn.init.normal_(mixture.bias)
    shares = torch.softmax(mixture.gate(x), 1)
    expected = x.clone()
    for e in range(3):
        inner = torch.tanh(torch.tanh(x @ mixture.v_EWR[e]) @ mixture.c_ERR[e])
        expected += shares[:, e, None] * x0 * (inner @ mixture.u_ERW[e] + mixture.bias)
    torch.testing.assert_close(mixture(x0, x), expected)


def test_fm_equals_its_formula() -> None:
    model = FM(tr.Table("t", dim=3), features=FEATURES, num_dense=1).eval()
    batch = {"a": torch.tensor([1]), "b": torch.tensor([2]), "dense": torch.tensor([[2.0]])}
    with embedded() as cluster, torch.no_grad():
        set_default(cluster)
        nn.init.constant_(model.bias, 0.3)
        a, b = model.fields.embedding(batch)[0]
        assert model.fields.vectors is not None
        c = 2.0 * model.fields.vectors[0]
        expected = 0.3 + a[0] + b[0] + c[0]
        expected += a[1:] @ b[1:] + a[1:] @ c[1:] + b[1:] @ c[1:]
        torch.testing.assert_close(model(batch)[0], expected)


def test_slot_dnn_sums_its_features_leaves_padding_out_and_clips() -> None:
    model = SlotDnn(tr.Table("t", dim=3), features=FEATURES, layers=(4,)).eval()
    ragged = tr.data.Ragged(torch.tensor([5, 6, 0]), torch.tensor([0, 2, 3]))
    batch = Batch({"a": ragged, "b": torch.tensor([7, 0])})
    with embedded() as cluster, torch.no_grad():
        set_default(cluster)
        rows = tr.nn.Embedding(model.inputs.embedding.table, features="k").eval()
        five, six, seven = rows({"k": torch.tensor([5, 6, 7])})
        actual = model.inputs(batch)
        torch.testing.assert_close(actual[0], torch.cat([five + six, seven]))
        assert not actual[1].any()
        nn.init.constant_(model.mlp[-1].bias, 100.0)
        assert model(batch).tolist() == [15.0, 15.0]


def test_parts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(BadRequest, match=r"expected a rank with 2 experts"):
        MODELS["dcn_v2"](experts=2)
    with pytest.raises(
        BadRequest, match=r"ends with the table's dim 4, found width 3 and \(8, 5\)"
    ):
        MODELS["dlrm"](num_dense=3, bottom=(8, 5))
    with pytest.raises(BadRequest, match=r"expected a dense column .* found width 0"):
        MODELS["dlrm"](num_dense=0)
