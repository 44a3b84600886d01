"""Embedding modules against torch's own: values, gradients, sharing, padding, salt, errors.

Legend: B examples, F features, L ids per example, D columns, K distinct keys, N ids.
"""

import numpy as np
import pytest
import torch
from torch import nn

from tests.long import sampled
from tests.tables import T_ROWS
from trireme import _core
from trireme.data import Bags, Batch, Ragged
from trireme.data.foreign import as_batch
from trireme.errors import BadRequest, NotReady, SchemaMismatch
from trireme.job.default import set_default
from trireme.job.embedded import embedded
from trireme.nn import Embedding, EmbeddingBag, Planner
from trireme.nn.lookup import LookupSpec, specs_by_class, specs_of
from trireme.nn.session import session_of
from trireme.table import Table
from trireme.worker.lookups import PendingLookups, RowLookup

D = 5
PADDING = -7


@pytest.fixture
def home():
    with embedded(threads=2) as cluster:
        set_default(cluster)
        yield cluster


def plan_for(batch, *modules, pool=None):
    named = Batch(batch) if isinstance(batch, dict) else batch
    return Planner(*modules, pool=pool or _core.Pool(2)).plan(named)


def random_rows(plan, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        part.table.class_id: torch.randn(len(part.keys), part.table.dim, generator=generator)
        for part in plan.tables
    }


def random_batch(seed, *, names=("a", "b", "c"), num_examples=40, weighted=False, with_empty=True):
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(
        0 if with_empty else 1, 4, (len(names) * num_examples,), generator=generator
    )
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    num_ids = int(offsets[-1])
    values = torch.randint(PADDING, 20, (num_ids,), generator=generator)
    weights = torch.randn(num_ids, generator=generator) if weighted else None
    dense = torch.randn(num_examples, 2, generator=generator)
    return Batch({"dense": dense}, Bags(names, values, offsets, weights))


def attached_rows(module, batch, seed=0):
    """Give the batch random rows for a module; the leaf whose gradient they get."""
    plan = plan_for(batch, module)
    [leaf] = plan.attach(batch, random_rows(plan, seed), train=True).values()
    return leaf


def as_weight(table_plan, rows):
    """A weight for nn.Embedding: the row of id i, PADDING to 19, is row i - PADDING."""
    weight = torch.zeros(20 - PADDING, rows.shape[1])
    for key, row in zip(table_plan.keys.view(np.int64), rows, strict=True):
        weight[int(key) - PADDING] = row
    return weight.requires_grad_()


def torch_bags(batch, name, weight, mode, padding_key):
    """nn.functional.embedding_bag on the bags of one feature: (B, D)."""
    ragged = batch[name]
    begin, end = int(ragged.offsets[0]), int(ragged.offsets[-1])
    return nn.functional.embedding_bag(
        ragged.values[begin:end] - PADDING,
        weight,
        ragged.offsets[:-1] - begin,
        mode=mode,
        per_sample_weights=None if ragged.weights is None else ragged.weights[begin:end],
        padding_idx=None if padding_key is None else padding_key - PADDING,
    )


def compare_with_torch(module, batch):
    """Values and gradients of a planned module equal torch's, for a random output gradient."""
    plan = plan_for(batch, module)
    rows = random_rows(plan)
    leaves = plan.attach(batch, rows, train=True)
    out = module(batch)
    weight = as_weight(plan.tables[0], rows[T_ROWS])
    expected = torch.stack(
        [torch_bags(batch, f, weight, module.mode, module.signed_padding) for f in module.features],
        1,
    )
    grad = torch.randn(out.shape)
    out.backward(grad)
    expected.backward(grad)
    torch.testing.assert_close(out, expected)
    assert out.is_contiguous()
    keys = torch.from_numpy(plan.tables[0].keys.view(np.int64))
    torch.testing.assert_close(leaves[T_ROWS].grad, weight.grad[keys - PADDING])
    return plan


class SignedBag(EmbeddingBag):
    """Remembers the padding key as torch takes it."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.signed_padding = kwargs.get("padding_key")


@sampled(keep=24)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mode", ["sum", "mean", "weighted sum"])
@pytest.mark.parametrize("padding_key", [None, PADDING, 3])
@pytest.mark.parametrize("features", [("a", "b", "c"), ("b", "c"), ("c", "a"), ("b",)])
def test_embedding_bag_equals_torch(seed, mode, padding_key, features):
    batch = random_batch(seed, weighted=mode == "weighted sum")
    module = SignedBag(
        Table("t", dim=D), features=features, mode=mode.split()[-1], padding_key=padding_key
    )
    plan = compare_with_torch(module, batch)
    if padding_key is not None:
        assert padding_key % 2**64 not in plan.tables[0].keys.tolist()


def test_one_id_per_bag_needs_no_offsets():
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(PADDING, 20, (3 * 40,), generator=generator)
    batch = Batch({}, Bags(("a", "b", "c"), values, torch.arange(121)))
    for mode in ("sum", "mean"):
        module = SignedBag(Table("t", dim=D), features=("a", "b", "c"), mode=mode, padding_key=3)
        compare_with_torch(module, batch)
        [lookup] = batch.lookups.values()
        assert lookup.offsets.numel() == lookup.bags.numel() == lookup.weights.numel() == 0


def test_an_empty_bag_gives_zeros():
    batch = Batch({}, Bags(("a",), torch.tensor([1, 2]), torch.tensor([0, 0, 2, 2])))
    module = EmbeddingBag(Table("t", dim=D), features="a")
    plan = plan_for(batch, module)
    plan.attach(batch, random_rows(plan), train=False)
    out = module.eval()(batch)
    assert out[0].eq(0).all()
    assert out[2].eq(0).all()
    assert out[1].ne(0).all()


@pytest.mark.parametrize("num_examples", [0, 5])
def test_a_batch_may_have_no_ids_at_all(num_examples):
    offsets = torch.zeros(num_examples + 1, dtype=torch.int64)
    batch = Batch({}, Bags(("a",), torch.empty(0, dtype=torch.int64), offsets))
    module = EmbeddingBag(Table("t", dim=D), features="a")
    plan = plan_for(batch, module)
    leaves = plan.attach(batch, random_rows(plan), train=True)
    out = module(batch)
    out.sum().backward()
    assert out.tolist() == [[[0.0] * D]] * num_examples
    assert leaves[T_ROWS].grad.shape == (0, D)


@pytest.mark.parametrize("padding_key", [None, PADDING])
def test_embedding_equals_torch(padding_key):
    generator = torch.Generator().manual_seed(1)
    batch = {
        "one": torch.randint(PADDING, 20, (30,), generator=generator),
        "many": torch.randint(PADDING, 20, (30, 4), generator=generator),
        "single": torch.randint(PADDING, 20, (30, 1), generator=generator),
        "ragged": random_batch(2, names=("x",), num_examples=30)["x"],
    }
    names = list(batch)
    module = Embedding(Table("t", dim=D), features=names, padding_key=padding_key)
    plan = plan_for(batch, module)
    rows = random_rows(plan)
    leaves = plan.leaves(rows, train=True)
    planned = Batch({}, lookups=plan.lookups(leaves))
    planned.columns.update(batch)
    actual = module(planned)

    weight = as_weight(plan.tables[0], rows[T_ROWS])
    padding_idx = None if padding_key is None else padding_key - PADDING
    ids = [*list(batch.values())[:3], batch["ragged"].values]
    expected = [nn.functional.embedding(x - PADDING, weight, padding_idx) for x in ids]
    assert [x.shape[:-1] for x in actual] == [x.shape for x in ids]
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b)
    grads = [torch.randn(x.shape) for x in expected]
    torch.autograd.backward(actual, grads)
    torch.autograd.backward(expected, grads)
    keys = torch.from_numpy(plan.tables[0].keys.view(np.int64))
    torch.testing.assert_close(leaves[T_ROWS].grad, weight.grad[keys - PADDING])


def test_embedding_of_one_name_returns_a_tensor(home):
    table = Table("t", dim=D)
    ids = {"a": torch.tensor([[1, 2], [3, 1]])}
    alone = Embedding(table, features="a")(ids)
    [in_tuple] = Embedding(table, features=["a"])(ids)
    assert alone.shape == (2, 2, D)
    torch.testing.assert_close(alone, in_tuple)


def test_columns_of_any_form_agree_with_bags(home):
    table = Table("t", dim=D)
    one = torch.tensor([4, 5, 6])
    many = torch.tensor([[1, 2], [3, 4], [5, 6]])
    ragged = Ragged(torch.tensor([9, 1, 1, 9, 2]), torch.tensor([1, 3, 4, 4]))
    module = EmbeddingBag(table, features=["one", "many", "ragged"]).eval()
    actual = module({"one": one, "many": many, "ragged": ragged})
    values = torch.cat([one, many.flatten(), ragged.values[1:4]])
    offsets = torch.tensor([0, 1, 2, 3, 5, 7, 9, 11, 12, 12])
    expected = module(Batch({}, Bags(("one", "many", "ragged"), values, offsets)))
    assert torch.equal(actual, expected)
    weighted = ragged._replace(weights=torch.tensor([0.0, 2, 3, 4, 0]))
    out = module({"one": one, "many": many, "ragged": weighted})
    assert torch.equal(out[:, :2], expected[:, :2])
    rows = module({"one": torch.tensor([1, 9, 2]), "many": many, "ragged": ragged})[:, 0]
    torch.testing.assert_close(out[0, 2], 5 * rows[0])
    torch.testing.assert_close(out[1, 2], 4 * rows[1])


class Pair(nn.Module):
    def __init__(self, *modules):
        super().__init__()
        self.parts = nn.ModuleList(modules)

    def forward(self, batch):
        return [part(batch) for part in self.parts]


def test_modules_on_one_table_share_its_keys_and_add_their_gradients():
    table = Table("t", dim=D)
    batch = random_batch(5)
    model = Pair(
        EmbeddingBag(table, features=["a", "b"]),
        EmbeddingBag(table, features=["c", "a"], mode="mean"),
        Embedding(table, features="b"),
    )
    plan = plan_for(batch, model)
    used = batch.bags.values.unique().numpy().view(np.uint64)
    assert sorted(plan.tables[0].keys.tolist()) == sorted(used.tolist())
    assert len(plan.tables) == 1

    together = plan.attach(batch, random_rows(plan), train=True)[T_ROWS]
    sum(out.sum() for out in model(batch)).backward()
    apart = torch.zeros_like(together)
    row = {int(key): i for i, key in enumerate(plan.tables[0].keys)}
    for part in model.parts:
        own = plan_for(batch, part)
        rows = together.detach()[[row[int(key)] for key in own.tables[0].keys]]
        leaf = own.attach(batch, {T_ROWS: rows}, train=True)[T_ROWS]
        part(batch).sum().backward()
        apart[[row[int(key)] for key in own.tables[0].keys]] += leaf.grad
    torch.testing.assert_close(together.grad, apart)


def test_tables_that_read_the_same_features_share_the_work():
    wide, deep = Table("wide", dim=1), Table("deep", dim=D)
    model = Pair(EmbeddingBag(wide, features=["a", "b"]), EmbeddingBag(deep, features=["a", "b"]))
    plan = plan_for(random_batch(0), model)
    assert [part.table for part in plan.tables] == [wide, deep]
    assert plan.tables[0].keys is plan.tables[1].keys


def test_salt_gives_each_feature_its_own_rows():
    ids = {"a": torch.tensor([1, 2, PADDING]), "b": torch.tensor([1, PADDING, 2])}
    for salt, distinct in ((False, 2), (True, 4)):
        table = Table("t", dim=D, salt=salt)
        module = EmbeddingBag(table, features=["a", "b"], padding_key=PADDING).eval()
        plan = plan_for(ids, module)
        assert len(plan.tables[0].keys) == distinct
        planned = Batch(dict(ids))
        plan.attach(planned, random_rows(plan), train=False)
        out = module(planned)
        assert torch.equal(out[0, 0], out[0, 1]) is not salt
        assert out[2, 0].eq(0).all()
        assert out[1, 1].eq(0).all()
    # A feature's keys do not depend on the other features, nor on the form of the batch.
    alone = plan_for({"b": ids["b"][:1]}, EmbeddingBag(table, features="b"))
    assert alone.tables[0].keys[0] in plan.tables[0].keys
    ragged = Ragged(ids["b"], torch.tensor([0, 3]))
    assert alone.tables[0].keys[0] in plan_for({"b": ragged}, module_of(table)).tables[0].keys


def module_of(table):
    return EmbeddingBag(table, features="b")


def test_forward_without_a_plan_pulls_and_remembers_in_training_only(home):
    module = EmbeddingBag(Table("t", dim=D), features="a")
    ids = {"a": torch.tensor([3, 3, 8])}
    with torch.no_grad():
        module(ids)
    out = module.eval()(ids)
    assert not out.requires_grad
    assert session_of(home).pending.take().entries == []
    out = module.train()(ids)
    out.sum().backward()
    [read] = session_of(home).pending.take().entries
    assert read.table is module.table
    assert (read.scale, read.columns) == (None, {})
    assert read.rows.grad.tolist() == [[{3: 2.0, 8: 1.0}[key]] * D for key in read.keys.tolist()]


def test_forward_without_a_cluster_is_an_error_with_the_remedy():
    module = EmbeddingBag(Table("t", dim=D), features="a")
    with pytest.raises(NotReady, match="init"):
        module({"a": torch.tensor([1])})


def test_a_batch_planned_for_evaluation_is_refused_in_training():
    module = EmbeddingBag(Table("t", dim=D), features="a")
    batch = Batch({"a": torch.tensor([1])})
    plan = plan_for(batch, module)
    plan.attach(batch, random_rows(plan), train=False)
    with pytest.raises(BadRequest, match="planned for training"):
        module(batch)
    with torch.no_grad():
        module(batch)
    other = EmbeddingBag(Table("u", dim=D), features="a").eval()
    with pytest.raises(BadRequest, match=r"Bag of table 'u': expected lookup .* found .*'t:"):
        other(batch)


GOOD = torch.tensor([1, 2])


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"b": GOOD}, "table 't': expected feature 'a' in the batch, found b"),
        (
            {"a": GOOD.to(torch.complex64), "b": GOOD},
            "'a' as a one-dimensional torch.int64 .* torch.complex64",
        ),
        (
            {"a": GOOD + 0.5, "b": GOOD},
            "'a' as integers or strings, found 1.5 of torch.float32 at 0",
        ),
        ({"a": GOOD.view(2, 1, 1), "b": GOOD}, "feature 'a' as Ragged .* shape \\(2, 1, 1\\)"),
        ({"a": torch.tensor(1), "b": GOOD}, "feature 'a' as Ragged .* shape \\(\\)"),
        ({"a": [1, 2], "b": GOOD}, "feature 'a' as Ragged .* found list"),
        (
            {"a": GOOD, "b": torch.tensor([1, 2, 3])},
            "expected 2 examples of feature 'b', as of 'a', found 3",
        ),
        (
            {"a": Ragged(GOOD, torch.tensor([0, 1, 3])), "b": GOOD},
            "offsets of feature 'a' from 0 to 2.* found 3 from \\[0\\] to \\[3\\]",
        ),
        (
            {"a": Ragged(GOOD, torch.tensor([0, 2, 1, 2])), "b": torch.tensor([1, 2, 3])},
            r"offsets of feature 'a' that do not decrease, found 2 before 1 at 2",
        ),
        (
            {"a": Ragged(GOOD, torch.tensor([0, 1, 2], dtype=torch.int32)), "b": GOOD},
            "offsets of feature 'a' as a one-dimensional torch.int64",
        ),
        (
            {"a": Ragged(GOOD, torch.tensor([0, 1, 2]), torch.ones(3)), "b": GOOD},
            "expected 2 weights of feature 'a', found 3",
        ),
        (
            {"a": Ragged(GOOD, torch.tensor([0, 1, 2]), torch.ones(2).double()), "b": GOOD},
            "weights of feature 'a' as a one-dimensional torch.float32",
        ),
        (
            {"a": Ragged(GOOD, torch.tensor([0, 1, 2]), torch.ones(2).requires_grad_()), "b": GOOD},
            "expected weights of feature 'a' without a gradient",
        ),
    ],
)
def test_a_wrong_batch_is_refused_naming_feature_expected_and_found(batch, message):
    module = EmbeddingBag(Table("t", dim=D), features=["a", "b"])
    with pytest.raises(BadRequest, match=message):
        plan_for(batch, module)


def test_a_wrong_module_is_refused():
    table = Table("t", dim=D)
    for features in ([], ["a", "a"], [""], [1]):
        with pytest.raises(BadRequest, match="EmbeddingBag of table 't': expected"):
            EmbeddingBag(table, features=features)
    with pytest.raises(BadRequest, match="'max'"):
        EmbeddingBag(table, features="a", mode="max")
    with pytest.raises(BadRequest, match="64 bits"):
        Embedding(table, features="a", padding_key=2**64)
    with pytest.raises(BadRequest, match=r"one padding_key .* found None and 0"):
        plan_for({}, Embedding(table, features="a"), Embedding(table, features="a", padding_key=0))
    with pytest.raises(BadRequest, match="two; share the object"):
        plan_for({}, Embedding(table, features="a"), Embedding(Table("t", dim=D), features="b"))
    weighted = random_batch(0, weighted=True)
    for mode in ("mean", "sqrt"):
        with pytest.raises(BadRequest, match=f"'{mode}' is not defined for weighted ids"):
            plan_for(weighted, EmbeddingBag(table, features="a", mode=mode))


def test_attach_refuses_rows_of_another_shape():
    module = EmbeddingBag(Table("t", dim=D), features="a")
    batch = Batch({"a": torch.tensor([1, 2])})
    plan = plan_for(batch, module)
    for rows in ({}, {T_ROWS: torch.zeros(3, D)}, {T_ROWS: torch.zeros(2, D).double()}):
        with pytest.raises(BadRequest, match=r"rows of table 't' as float32 of shape \(2, 5\)"):
            plan.attach(batch, rows, train=True)


def test_state_dict_names_the_table_and_loading_verifies_it():
    state = EmbeddingBag(Table("t", dim=D), features="a").state_dict()
    assert all(isinstance(value, torch.Tensor) for value in state.values())
    EmbeddingBag(Table("t", dim=D, seed=9), features="b").load_state_dict(state)
    others = {
        r"table 'u': expected \{'table': 'u'\}, found \{'table': 't'\}": Table("u", dim=D),
        r"'dim': 6.*found .*'dim': 5": Table("t", dim=D + 1),
        r"'salt': True.*found .*'salt': False": Table("t", dim=D, salt=True),
    }
    for difference, other in others.items():
        with pytest.raises(SchemaMismatch, match=difference):
            EmbeddingBag(other, features="a").load_state_dict(state)


def test_a_module_has_no_parameters_and_shows_its_table():
    module = EmbeddingBag(Table("t", dim=D), features=["a", "b"], mode="mean", padding_key=-1)
    assert list(module.parameters()) == []
    for part in ("Table('t'", "['a', 'b']", "mode='mean'", f"padding_key={2**64 - 1}"):
        assert part in repr(module)


def test_distinct_lookups_are_found_in_one_pass(monkeypatch):
    table = Table("t", dim=D)
    modules = [EmbeddingBag(table, features=[f"f{i % 50}"]) for i in range(100)]
    calls = []
    name = LookupSpec.name.fget
    monkeypatch.setattr(LookupSpec, "name", property(lambda spec: calls.append(spec) or name(spec)))
    (specs,) = specs_by_class(specs_of(modules)).values()
    assert [spec.features for spec in specs] == [(f"f{i}",) for i in range(50)]
    assert len(calls) == 100


@pytest.mark.parametrize(
    ("make", "is_told"),
    [
        (lambda t: [Embedding(t, ["history", "item"])], True),
        (lambda t: [EmbeddingBag(t, "history", mode="mean"), EmbeddingBag(t, "item")], True),
        (lambda t: [Embedding(t, ["history", "item", "other"])], True),
        (lambda t: [EmbeddingBag(t, ["history", "item"])], False),
        (lambda t: [EmbeddingBag(t, ["history", "item"]), Embedding(t, "item")], False),
    ],
)
@pytest.mark.parametrize(("salt", "strings"), [(False, True), (True, True), (False, False)])
def test_rows_of_strings_that_are_apart_unlike_those_of_integers_are_told(
    make, is_told, salt, strings, caplog
):
    modules = make(Table("items", dim=2, salt=salt))
    planner = Planner(*modules, pool=_core.Pool(1))
    batch = {"history": [["a", "b"], ["a"]], "item": ["b", "a"], "other": ["a", "b"]}
    if not strings:
        batch = {"history": [[1, 2], [1]], "item": [2, 1], "other": [1, 2]}
    for _ in range(2):
        planner.plan(as_batch(batch), train=True)
    lines = [record.message for record in caplog.records]
    assert len(lines) == (is_told and strings and not salt), lines
    assert all(
        "of different features, as history, item, are different rows" in line for line in lines
    )


def test_lookups_of_more_tables_than_the_limit_may_wait_for_a_step():
    """The limit tells of a step() that is missing, so it is for lookups of the same tables."""
    pending, keys = PendingLookups(), np.zeros(1, np.uint64)
    lookups = [RowLookup(Table(f"t{i}", dim=1), keys, torch.zeros(1, 1)) for i in range(1100)]
    for _ in range(2):
        for lookup in lookups:
            pending.add(lookup)
    pending.take()
    for _ in range(1024):
        pending.add(lookups[0])
    with pytest.raises(BadRequest, match=r"within 1024 lookups, found 1024, .* of table 't0'"):
        pending.add(lookups[0])
