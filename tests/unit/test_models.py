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
from trireme.models import (
    DCN,
    DIFM,
    DLRM,
    FFM,
    FGCNN,
    FM,
    LR,
    AutoFIS,
    AutoInt,
    CtrDnn,
    DCNv2,
    DeepFEFM,
    DeepFM,
    FATDeepFFM,
    GateNet,
    SlotDnn,
    WideDeep,
    XDeepFM,
)
from trireme.models.autofis import PairWeights
from trireme.models.columns import SplitIds
from trireme.models.dcn import PenalizedLogLoss
from trireme.models.inputs import FeatureVectors, Vocabularies
from trireme.models.layers import (
    BatchNorm,
    CompressedInteraction,
    CrossLayer,
    CrossMixture,
    SelfAttention,
    VectorCrossLayer,
    pairwise_products,
    sum_of_products,
)

FEATURES = ("a", "b")
NUM_IDS, NUM_DENSE = 50, 3
SCHEMA = tr.data.Schema(
    [tr.data.Label(), tr.data.Dense("dense", NUM_DENSE), *map(tr.data.Sparse, FEATURES)]
)


def table(name: str = "embedding", dim: int = 4) -> tr.Table:
    return tr.Table(name, dim=dim, optimizer=tr.optim.Adam(lr=0.03))


def _num_inputs(options: dict[str, Any]) -> int:
    return len(options["features"]) + int(options["num_dense"])


def auto_fis(layers: Any = (16, 8), **options: Any) -> AutoFIS:
    num = _num_inputs(options)
    fields = FeatureVectors(table(dim=5), **options)
    return AutoFIS(fields, PairWeights(num * (num - 1) // 2), layers=layers)


def fgcnn(**options: Any) -> FGCNN:
    inputs = {
        name: options.pop(name) for name in ("features", "num_dense", "dense") if name in options
    }
    small: dict[str, Any] = {"windows": (3,), "filters": (4,), "pools": (2,), "maps": (2,)}
    return FGCNN(FeatureVectors(table(dim=8), **inputs), **{"layers": (16, 8), **small, **options})


Make = Callable[..., nn.Module]
MODELS: dict[str, Make] = {
    "lr": lambda **options: LR(table(dim=1), **options),
    "fm": lambda **options: FM(table(dim=5), **options),
    "ctr_dnn": lambda **options: CtrDnn(table(), **{"layers": (16, 8), **options}),
    "wide_deep": lambda **options: WideDeep(
        table("wide", 1), table(), **{"layers": (16, 8), **options}
    ),
    "deepfm": lambda **options: DeepFM(table(dim=5), **{"layers": (16, 8), **options}),
    "xdeepfm": lambda **options: XDeepFM(
        table(dim=5), **{"layers": (16, 8), "interaction": (6, 4), **options}
    ),
    "dcn": lambda **options: DCN(table(), **{"layers": (16, 8), "num_cross": 2, **options}),
    "autoint": lambda **options: AutoInt(table(), **{"attention": (8, 8), **options}),
    "ffm": lambda **options: FFM(table(dim=1 + 2 * _num_inputs(options)), **options),
    "fat_deepffm": lambda **options: FATDeepFFM(
        table(dim=2 * _num_inputs(options)), **{"layers": (16, 8), "dropout": 0.1, **options}
    ),
    "autofis": auto_fis,
    "fgcnn": fgcnn,
    "gatenet": lambda **options: GateNet(table(), **{"layers": (16, 8), **options}),
    "deepfefm": lambda **options: DeepFEFM(table(dim=5), **{"layers": (16, 8), **options}),
    "difm": lambda **options: DIFM(
        table(dim=5), **{"layers": (16, 8), "dense_layers": (8,), **options}
    ),
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
        assert trainer.evaluate(test)["auc"] < 0.65
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
    if name not in ("lr", "fm", "ffm", "dlrm"):
        changes |= {"layers": (16,)}
    if name == "xdeepfm":
        changes |= {"interaction": (6,)}
    if name == "dcn":
        changes |= {"num_cross": 1}
    if name == "autoint":
        changes |= {"attention": (8,), "residual": False}
        assert shapes(layers=(4,)) != shapes()
    if name == "fgcnn":
        sizes = {"windows": (3, 3), "filters": (4, 4), "pools": (2, 2), "maps": (2, 2)}
        assert shapes(**sizes) != shapes()
        changes |= {"windows": (2,), "filters": (3,), "pools": (3,), "maps": (1,)}
    if name == "gatenet":
        changes |= {"gates_rows": False, "gates_hidden": False}
    if name == "difm":
        changes |= {"dense_layers": (), "head_width": 2, "heads": 2}
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


def test_a_vector_cross_layer_is_that_of_the_paper() -> None:
    x0, x = torch.randn(2, 5, 6)
    layer = VectorCrossLayer(6)
    nn.init.normal_(layer.bias)
    for b in range(5):
        expected = x0[b] * torch.dot(x[b], layer.weight) + layer.bias + x[b]
        torch.testing.assert_close(layer(x0, x)[b], expected)


def test_compressed_interaction_sums_products_of_all_pairs() -> None:
    vectors = torch.randn(2, 3, 4)
    cin = CompressedInteraction(3, (5, 2))
    x, sums = vectors, []
    for weight in cin.weights:
        weight_CIN = weight.view(len(weight), x.shape[1], 3)
        made = torch.zeros(2, len(weight), 4)
        for c in range(len(weight)):
            for i in range(x.shape[1]):
                for j in range(3):
                    made[:, c] += weight_CIN[c, i, j] * x[:, i] * vectors[:, j]
        x = made
        sums.append(x.sum(2))
    torch.testing.assert_close(cin(vectors), torch.cat(sums, 1))


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_self_attention_is_that_of_each_head(residual: bool, scaled: bool) -> None:
    x = torch.randn(2, 3, 4)
    attention = SelfAttention(4, 6, heads=2, residual=residual, scaled=scaled)
    weight = attention.queries_keys_values.weight.view(2, 3, 3, 4)  # head, query key value, width
    for b in range(2):
        heads = []
        for query, key, value in weight:
            products = (x[b] @ query.T) @ (x[b] @ key.T).T / (3**0.5 if scaled else 1)
            heads.append(torch.softmax(products, 1) @ (x[b] @ value.T))
        expected = torch.cat(heads, 1)
        if residual:
            expected = expected + x[b] @ attention.residual.weight.T
        torch.testing.assert_close(attention(x)[b], expected.relu())
    with pytest.raises(BadRequest, match="a multiple of 4 heads, found 6"):
        SelfAttention(4, 6, heads=4)


def fields_of(model: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights (N,) and vectors (N, D) of the inputs of the first example."""
    rows = model.fields(batch)[0]
    return rows[:, 0], rows[:, 1:]


def test_field_aware_models_equal_their_formulas() -> None:
    options = {"features": FEATURES, "num_dense": 1}
    ffm = FFM(tr.Table("t", dim=7), **options).eval()
    fefm = DeepFEFM(tr.Table("u", dim=3), layers=(4,), **options).eval()
    batch = {"a": torch.tensor([1]), "b": torch.tensor([2]), "dense": torch.tensor([[2.0]])}
    with embedded() as cluster, torch.no_grad():
        set_default(cluster)
        weights, vectors = fields_of(ffm, batch)
        v = vectors.view(3, 3, 2)
        pairs = v[0, 1] @ v[1, 0] + v[0, 2] @ v[2, 0] + v[1, 2] @ v[2, 1]
        torch.testing.assert_close(ffm(batch)[0], weights.sum() + pairs)
        weights, v = fields_of(fefm, batch)
        m = [one + one.T for one in fefm.matrices_PDD]
        products = torch.stack([v[0] @ m[0] @ v[1], v[0] @ m[1] @ v[2], v[1] @ m[2] @ v[2]])
        deep = fefm.mlp(torch.cat([v.flatten(), products]))[0]
        torch.testing.assert_close(fefm(batch)[0], weights.sum() + products.sum() + deep)
    with pytest.raises(BadRequest, match=r"a table of dim 1 \+ 3 \* D, found 6"):
        FFM(tr.Table("t", dim=6), **options)


def test_difm_with_equal_factors_is_a_factorization_machine() -> None:
    model = DIFM(tr.Table("t", dim=5), features=FEATURES, num_dense=2).eval()
    batch = {"a": torch.tensor([1]), "b": torch.tensor([2]), "dense": torch.tensor([[2.0, -1.0]])}
    with embedded() as cluster, torch.no_grad():
        set_default(cluster)
        weighed = model(batch)
        for last in (model.by_numbers[-1], model.by_vectors[-1]):
            nn.init.zeros_(last.weight)
        a, b = model.embedding(batch)[0]
        c = model.dense_vector(batch["dense"])[0]
        expected = a[0] + b[0] + model.dense_weight(batch["dense"])[0, 0]
        expected = expected + a[1:] @ b[1:] + a[1:] @ c + b[1:] @ c
        torch.testing.assert_close(model(batch)[0], expected)
        assert not torch.equal(weighed[0], expected)


def test_gates_of_half_and_none_are_known() -> None:
    model = GateNet(tr.Table("t", dim=2), features=FEATURES, num_dense=1, layers=(3,)).eval()
    batch = {"a": torch.tensor([1]), "b": torch.tensor([2]), "dense": torch.tensor([[2.0]])}
    with embedded() as cluster, torch.no_grad():
        set_default(cluster)
        nn.init.zeros_(model.row_gates_FD)
        nn.init.constant_(model.gates[0][0].bias, 0.5)
        x = model.inputs(batch)
        x = torch.cat([x[:, :4] / 2, x[:, 4:]], 1)
        hidden = model.hidden[0](x).relu()
        expected = model.head(hidden * torch.tanh(model.gates[0](hidden)))
        torch.testing.assert_close(model(batch), expected[:, 0])


def test_dcn_pays_for_the_weights_of_its_cross_layers() -> None:
    model = DCN(tr.Table("t", dim=2), features=FEATURES, num_dense=1, layers=(3,), num_cross=2)
    logits, labels = torch.randn(4), torch.tensor([0.0, 1.0, 1.0, 0.0])
    paid = PenalizedLogLoss(model, 0.1)(logits, labels)
    paid = paid - nn.functional.binary_cross_entropy_with_logits(logits, labels)
    squares = sum((layer.weight**2).sum() for layer in model.cross)
    torch.testing.assert_close(paid, 0.1 * squares)


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


def test_fgcnn_makes_vectors_of_neighbours() -> None:
    model = fgcnn(features=FEATURES, num_dense=2).eval()
    batch = {"a": torch.tensor([1]), "b": torch.tensor([2]), "dense": torch.tensor([[2.0, -1.0]])}
    with embedded() as cluster, torch.no_grad():
        set_default(cluster)
        rows_NE = model.fields(batch)[0]
        (convolution, norm, *_), (linear,) = model.convolutions[0], model.recombinations[0]
        made = torch.zeros(4, 2, 4)  # filters, pools, floats
        padded = nn.functional.pad(rows_NE[:, :4], (0, 0, 1, 1))
        for channel in range(4):
            kernel = convolution.weight[channel, 0, :, 0]
            one = [kernel @ padded[i : i + 3] + convolution.bias[channel] for i in range(4)]
            seen = torch.tanh(torch.stack(one) / (1 + norm.eps) ** 0.5)
            made[channel] = torch.stack([seen[:2].amax(0), seen[2:].amax(0)])
        new = torch.tanh(linear(made.flatten())).view(4, 4)
        vectors = torch.cat([rows_NE[:, 4:], new])[None]
        x = torch.cat([vectors.flatten(1), pairwise_products(vectors)], 1)
        torch.testing.assert_close(model(batch), model.mlp(x)[:, 0])


def test_fat_deepffm_equals_its_formula() -> None:
    model = FATDeepFFM(tr.Table("t", dim=4), features=FEATURES, num_dense=0, layers=(3,)).eval()
    batch = {"a": torch.tensor([1]), "b": torch.tensor([2])}
    with embedded() as cluster, torch.no_grad():
        set_default(cluster)
        v = model.fields(batch)[0].view(2, 2, 2)
        u = v * model.attention(v.amax(2).flatten()).view(2, 2, 1)
        hidden, *_, last = model.mlp
        deep = last(torch.relu(hidden(u[0, 1] * u[1, 0])))
        torch.testing.assert_close(model(batch), u.sum() + deep)
    with pytest.raises(BadRequest, match=r"a table of dim 2 \* D, found 5"):
        FATDeepFFM(tr.Table("t", dim=5), features=FEATURES, num_dense=0)


def test_weights_of_pairs_follow_grda_and_stay_zero_after_the_search() -> None:
    pairs = PairWeights(3, c=0.1, mu=0.5)
    with torch.no_grad():
        pairs.weights.copy_(torch.tensor([0.6, 0.6, -0.6]))
    optimizer = torch.optim.Adam([pairs.group()])
    gradient, a = torch.tensor([0.01, 0.03, -0.1]), torch.tensor([0.6, 0.6, -0.6])
    for step in range(16):
        optimizer.zero_grad()
        weights = pairs()
        expected = a.sign() * (a.abs() - 0.1 * step**0.5).relu()
        torch.testing.assert_close(weights.detach(), expected, rtol=1e-3, atol=1e-4)
        (weights @ gradient).backward()
        optimizer.step()
        a = a - gradient
    assert expected.ne(0).tolist() == [True, False, True]
    after = PairWeights(3, searches=False)
    after.load_state_dict(pairs.state_dict())
    (after() @ gradient).backward()
    assert (after() != 0).tolist() == after.weights.grad.ne(0).tolist() == [True, False, True]


def test_batch_normalization_of_one_example_takes_the_statistics_of_those_before() -> None:
    norm, plain = BatchNorm(2), nn.BatchNorm1d(2)
    x = torch.randn(5, 2)
    torch.testing.assert_close(norm(x), plain(x))
    torch.testing.assert_close(norm(x[:1]), plain.eval()(x[:1]))
    assert torch.equal(norm.running_mean, plain.running_mean)


def test_ids_of_vocabularies_have_rows_of_their_own() -> None:
    names = ("x", "y")
    parts = Vocabularies({name: tr.Table(name, dim=2, seed=i) for i, name in enumerate(names)})
    ids = tr.data.Ragged(torch.tensor([9, 5, 6, 6, 5]), torch.tensor([1, 3, 5]))
    batch = SplitIds("ids", names)(Batch({"ids": ids}))
    assert [batch[name].values.tolist() for name in names] == [[5, 6], [6, 5]]
    with embedded() as cluster, torch.no_grad():
        set_default(cluster)
        rows_BFD = parts.eval()(batch).view(2, 2, 2)
    assert len(rows_BFD.flatten(0, 1).unique(dim=0)) == 4
    with pytest.raises(
        BadRequest, match="expected 3 ids in 'ids' of every example, found 2 in example 0"
    ):
        SplitIds("ids", ("x", "y", "z"))(Batch({"ids": ids}))


def test_parts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(BadRequest, match=r"expected a rank with 2 experts"):
        MODELS["dcn_v2"](experts=2)
    with pytest.raises(
        BadRequest, match=r"ends with the table's dim 4, found width 3 and \(8, 5\)"
    ):
        MODELS["dlrm"](num_dense=3, bottom=(8, 5))
    with pytest.raises(BadRequest, match=r"expected a dense column .* found width 0"):
        MODELS["dlrm"](num_dense=0)
    with pytest.raises(BadRequest, match=r"FGCNN: expected pools that leave inputs, found \(6,\)"):
        fgcnn(**OPTIONS, pools=(6,))
    with pytest.raises(BadRequest, match=r"FGCNN: expected as many windows, filters, pools and"):
        fgcnn(**OPTIONS, pools=(2, 2))
